"""Tables without what says nothing: rows of unsupported cases, columns that are alike throughout.

A row that holds nothing but ``unsupported`` becomes part of a sentence that names the backend, the
reason and how many rows there are; a column with the same cell in every row becomes words of the
caption.
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
    columns, stated = _varying(table.columns, [cells[index] for index in kept])
    caption = " ".join(filter(None, (table.caption, stated)))
    shorter = replace(table, rows=rows, columns=columns, caption=caption, _cells=None)
    return Folded(table=shorter, sentences=sentences, num_rows=len(cells) - len(kept))


def shown_cases(table: Table) -> set[str]:
    """Ids of the cases that the table's rows and cells come from."""
    keys = {"case_id", *(column.record for column in table.columns)} & set(table.rows.columns)
    return {str(case_id) for key in keys for case_id in table.rows[key]}


def _says_nothing(table: Table, index: int) -> bool:
    """Whether a row is of a case that is not supported, and holds nothing else."""
    results = [
        cell
        for column, cell in zip(table.columns, table.cells()[index], strict=True)
        if not column.point and column.key not in ("reason", "phase")
    ]
    return UNSUPPORTED in results and EMPTY.issuperset(results)


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


def _varying(columns: list[Column], cells: list[list[str]]) -> tuple[list[Column], str]:
    """The columns whose cells differ, and a sentence on those that are alike in every row."""
    if len(cells) < 2:
        return columns, ""
    kept, alike = [], []
    for column, texts in zip(columns, zip(*cells, strict=True), strict=True):
        if len(set(texts)) > 1:
            kept.append(column)
        elif texts[0] not in EMPTY:
            alike.append(f"{column.full_header} {texts[0]}")
    if not kept:
        return columns, ""
    return kept, f"In every row: {', '.join(alike)}." if alike else ""
