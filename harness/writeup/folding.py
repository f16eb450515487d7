"""Tables without what says nothing: rows of unsupported cases, columns that are alike throughout.

A row in which every measured cell says ``unsupported`` becomes part of a sentence that names the
backend, the reason and how many rows there are, whatever else the row repeats of its case or its
baseline. A column of such cells becomes a sentence, too; one with the same cell in every row
becomes words of the caption.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table

UNSUPPORTED = fmt.STATUS_WORDS["unsupported"]

EMPTY = frozenset(("", fmt.ABSENT, UNSUPPORTED))
"""Cells that hold no result."""


@dataclass(kw_only=True, slots=True)
class Folded:
    """A table without rows of unsupported cases, and the sentences that stand for them."""

    table: Table
    sentences: list[str]
    num_rows: int


def fold(table: Table) -> Folded:
    """The table with fewer rows and columns, which says as much; it is not changed itself."""
    cells = table.cells()
    empty = [_says_nothing(table, index) for index in range(len(cells))]
    sentences = _sentences(table, empty)
    kept = [index for index, is_empty in enumerate(empty) if not is_empty]
    rows = table.rows.iloc[kept]
    columns, stated, empty_columns = _varying(table.columns, [cells[index] for index in kept])
    sentences += [f"{header}: {UNSUPPORTED} in every row." for header in empty_columns]
    caption = " ".join(filter(None, (table.caption, stated)))
    shorter = replace(table, rows=rows, columns=columns, caption=caption, _cells=None)
    return Folded(table=shorter, sentences=sentences, num_rows=len(cells) - len(kept))


def shown_cases(table: Table) -> set[str]:
    """Ids of the cases that the table's rows and cells come from."""
    keys = {"case_id", *(column.record for column in table.columns)} & set(table.rows.columns)
    return {str(case_id) for key in keys for case_id in table.rows[key]}


def _says_nothing(table: Table, index: int) -> bool:
    """Whether a row is of a case that is not supported: nothing that was to be measured is.

    Those are the cells that spell out a status where they have none. Others, such as the number of
    samples, the baseline's time or what was chosen, are filled for any case.
    """
    measured = [
        cell
        for column, cell in zip(table.columns, table.cells()[index], strict=True)
        if column.status is not None and not column.point
    ]
    return UNSUPPORTED in measured and EMPTY.issuperset(measured)


def _sentences(table: Table, empty: list[bool]) -> list[str]:
    """``flash_attn_2: unsupported in 12 rows (flash-attn is not installed)``."""
    counts: Counter[tuple[str, str]] = Counter()
    for (_, row), is_empty in zip(table.rows.iterrows(), empty, strict=True):
        if is_empty:
            counts[_name_of(row), _word(row.get("reason"))] += 1
    return [
        f"{name}: {UNSUPPORTED} in {fmt.counted(count, 'row')}"
        + (f" ({reason})." if reason else ".")
        for (name, reason), count in counts.most_common()
    ]


def _name_of(row: pd.Series) -> str:
    """What was not supported: the backend, or the strategy, else the task."""
    for key in ("attention_choice", "attention", "strategy", "task"):
        if name := _word(row.get(key)):
            return name
    return "Not told"


def _word(value: object) -> str:
    return "" if fmt.is_missing(value) else " ".join(str(value).split())


def _varying(columns: list[Column], cells: list[list[str]]) -> tuple[list[Column], str, list[str]]:
    """The columns whose cells differ, a sentence on those that are alike in every row, and the
    headers of those in which nothing is supported."""
    if len(cells) < 2:
        return columns, "", []
    kept, alike, unsupported = [], [], []
    for column, texts in zip(columns, zip(*cells, strict=True), strict=True):
        if EMPTY.issuperset(texts):
            unsupported += [column.full_header] if UNSUPPORTED in texts else []
        elif len(set(texts)) > 1:
            kept.append(column)
        else:
            alike.append(f"{column.full_header} {texts[0]}")
    if not kept:
        return columns, "", []
    return kept, f"In every row: {', '.join(alike)}." if alike else "", unsupported
