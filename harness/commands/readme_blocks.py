"""Blocks of a page that hold a table, or its sentence, as it follows from committed records.

A block begins with a comment that names a table as ``attnbench-report`` writes it, and what to show
of it, one option on each line, and it ends with another comment::

    <!-- table: RESULTS/sweeps/SWEEP/tables/TABLE.md
    where: seq_len == 512
    columns: attention; both (ms)
    -->
    ...
    <!-- end -->

``finding:`` instead of ``table:`` gives the sentence, ``<!-- list: models -->`` one of the lists
of :mod:`harness.commands.readme_lists`. Options of a table are

- ``where``: which rows of the sweep's frame the table is built from, in the syntax of pandas'
  ``DataFrame.query``. What all of them share is said below the table.
- ``columns``: headers of the columns to show.
- ``down``, ``across``, ``cell``: headers of the columns whose values name the rows and the columns
  of a smaller table, and of the one whose cells it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.cases import format as fmt
from harness.commands.readme_lists import markdown_list
from harness.render.files import to_markdown
from harness.render.table import (
    NOTES,
    SPREAD,
    Column,
    Table,
    build_table,
    finding_of,
    footnotes_of,
)

Frames = Callable[[Path, str], pd.DataFrame]
"""The frame of a sweep in a results folder."""

OPTIONS = ("where", "columns", "down", "across", "cell")

_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|finding|list): (?P<path>\S+)(?P<options>.*?)-->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Shown:
    """What a block shows of a table."""

    where: str = ""
    columns: str = ""
    down: str = ""
    across: str = ""
    cell: str = ""


def filled(text: str, root: Path, frames: Frames) -> str:
    """The text of a page with every block filled anew.

    ValueError in one line for a block that asks for what there is not.
    """

    def fill(match: re.Match[str]) -> str:
        if match["kind"] == "list":
            return f"{match['begin']}{markdown_list(match['path'])}\n{match['end']}"
        path = root / match["path"]
        frame = frames(path.parents[3], path.parents[1].name)
        shown = _read_options(match["options"], match["path"])
        try:
            body = _body(match["kind"], path.stem, frame, shown)
        except ValueError as error:
            raise ValueError(f"{match['path']}: {error}") from None
        return f"{match['begin']}{body}\n{match['end']}"

    return _BLOCK.sub(fill, text)


def without_blocks(text: str) -> str:
    """The text of a page apart from its blocks: what people wrote."""
    return _BLOCK.sub("", text)


def _read_options(text: str, place: str) -> Shown:
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, _, value = line.partition(":")
        if key not in OPTIONS:
            raise ValueError(f"{place}: {key}: one of {', '.join(OPTIONS)}")
        found[key] = value.strip()
    return Shown(**found)


def _body(kind: str, name: str, frame: pd.DataFrame, shown: Shown) -> str:
    rows = frame.query(shown.where) if shown.where else frame
    table = build_table(name, rows)
    if table is None:
        raise ValueError("the sweep's records hold nothing for this table")
    if kind == "finding":
        said = finding_of(table)
        if not said:
            raise ValueError("nothing can be said of this table")
        return said
    if shown.cell:
        return _pivoted(table, shown)
    if shown.columns:
        table = _with_columns(table, _columns(table, shown.columns))
    caption, _, body = to_markdown(table).partition("\n\n")
    return "\n\n".join(filter(None, (body.strip(), caption)))


def _columns(table: Table, headers: str) -> list[Column]:
    """The table's columns with these headers, in this order."""
    known = {column.full_header: column for column in table.columns}
    wanted = [header.strip() for header in headers.split(";")]
    if unknown := [header for header in wanted if header not in known]:
        raise ValueError(f"{unknown[0]}: one of the headers {'; '.join(known)}")
    return [known[header] for header in wanted]


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    """The table with some of its columns, what their marks mean, and what all rows share."""
    has_spread = any(column.key == "spread" for column in columns)
    rows = table.rows
    times = [column for column in columns if column.iqr]
    if has_spread and times:
        ratios = [rows[column.iqr] / rows[column.key].astype(float) for column in times]
        rows = rows.assign(spread=pd.concat(ratios, axis=1).max(axis=1))
    own = [note for note in table.footnotes if not note.startswith(_SYMBOLS)]
    return replace(
        table,
        caption=_common(table.caption, has_spread=has_spread),
        columns=list(columns),
        rows=rows,
        footnotes=[*footnotes_of(rows, columns), *own],
        _cells=None,
    )


_SYMBOLS = tuple(note[0] for note in NOTES)


def _common(caption: str, *, has_spread: bool) -> str:
    """A caption's sentence on what all rows share, and that on the spread column."""
    found = re.search(r"All rows: .*", caption)
    parts = [f"{SPREAD}." if has_spread else "", found[0] if found else ""]
    return " ".join(filter(None, parts))


def _pivoted(table: Table, shown: Shown) -> str:
    """The cells of one column, by the text of other columns' cells."""
    down, across = _columns(table, shown.down), _columns(table, shown.across)
    (value,) = _columns(table, shown.cell)
    slim = _with_columns(table, [*down, *across, value])
    found: dict[tuple[str, ...], dict[tuple[str, ...], str]] = {}
    columns: list[tuple[str, ...]] = []
    for *names, cell in slim.cells():
        row, column = tuple(names[: len(down)]), tuple(names[len(down) :])
        if column in found.setdefault(row, {}):
            raise ValueError(
                f"several rows are {', '.join((*row, *column))}: narrow where, or down"
            )
        found[row][column] = cell
        if column not in columns:
            columns.append(column)
    heads = [", ".join(map(_described, across, column)) for column in columns]
    rows = pd.DataFrame(
        [[*row, *(cells.get(column) for column in columns)] for row, cells in found.items()]
    )
    headers = [*(column.full_header for column in down), *heads]
    # Names of rows lie to the left, and numbers, already in words, to the right.
    formats = [fmt.text] * len(down) + [str] * len(heads)
    small = Table(
        caption="",
        columns=[
            Column(key=rows.columns[place], header=header, format=format)
            for place, (header, format) in enumerate(zip(headers, formats, strict=True))
        ],
        rows=rows,
    )
    notes = [*slim.footnotes, " ".join([f"Cells: {value.full_header}.", slim.caption]).strip()]
    return "\n\n".join(filter(None, (to_markdown(small).strip(), *notes)))


def _described(column: Column, text: str) -> str:
    """``512 seq_len``, ``CUDA graph yes``."""
    return f"{column.full_header} {text}"
