"""Parts of a table, chosen by the headers that a reader sees: for a page, or for the paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import NOTES, SPREAD, Column, Table, footnotes_of


@dataclass(kw_only=True, slots=True, frozen=True)
class Selection:
    """What to show of a table.

    ``where`` says which rows of the sweep's frame the table is built from, in the syntax of
    pandas' ``DataFrame.query``; ``columns`` holds the headers of the columns to show, between
    semicolons. ``down``, ``across`` and ``cell`` are headers of the columns whose values name the
    rows and the columns of a smaller table, and of the one whose cells it holds.
    """

    where: str = ""
    columns: str = ""
    down: str = ""
    across: str = ""
    cell: str = ""


def rows_where(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """The rows of the frame that ``where`` asks for: all of them if it is empty.

    ValueError in one line where the frame has no such columns.
    """
    if not where:
        return frame
    try:
        return frame.query(where)
    except (NameError, SyntaxError, TypeError) as error:
        raise ValueError(f"where: {where}: {error}") from error


def selected(table: Table, selection: Selection) -> Table:
    """The columns, or the cells by the text of other columns' cells, that the selection names.

    The caption keeps what all rows share. ValueError in one line for a header that the table does
    not have, and where several rows share a cell.
    """
    if selection.cell:
        return _pivoted(table, selection)
    if selection.columns:
        return _with_columns(table, _columns(table, selection.columns))
    return table


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


def _pivoted(table: Table, selection: Selection) -> Table:
    """The cells of one column, by the text of other columns' cells."""
    down, across = _columns(table, selection.down), _columns(table, selection.across)
    (value,) = _columns(table, selection.cell)
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
    # One column's values stand under its header, several with theirs.
    group = across[0].full_header if len(across) == 1 else ""
    heads = [
        column[0] if group else ", ".join(map(_described, across, column)) for column in columns
    ]
    rows = pd.DataFrame(
        [[*row, *(cells.get(column) for column in columns)] for row, cells in found.items()]
    )
    headers = [*(column.full_header for column in down), *heads]
    # Names of rows lie to the left, and numbers, already in words, to the right.
    formats = [fmt.text] * len(down) + [str] * len(heads)
    return Table(
        name=table.name,
        caption=" ".join([f"Cells: {value.full_header}.", slim.caption]).strip(),
        columns=[
            Column(
                key=rows.columns[place],
                header=header,
                format=format,
                group=group if place >= len(down) else "",
                point=place < len(down),
            )
            for place, (header, format) in enumerate(zip(headers, formats, strict=True))
        ],
        rows=rows,
        footnotes=slim.footnotes,
    )


def _described(column: Column, text: str) -> str:
    """``512 seq_len``, ``CUDA graph yes``."""
    return f"{column.full_header} {text}"
