"""A table in a terminal, as much of it as fits."""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from harness.cases import format as fmt
from harness.escapes import printable
from harness.render.table import Table

MAX_ROWS = 40

GAP = 2
"""Spaces between columns: a divider and the padding before it."""

NUM_RESULTS = 3
"""Results that are shown beside what was measured, in however few columns that has to go."""

MAX_TEXT = 28
"""Characters of a result that is words, such as the name of a kernel; longer ones are cut."""

NARROWEST = 30
"""Characters of the one column that names the measured point."""


def render_terminal(table: Table, console: Console, *, has_files: bool = True) -> None:
    """Print the table as wide as the console allows.

    Where columns do not fit, details are left to the files first, then the other results from
    the right; columns that say what was measured never. Where those leave no room, they share one.

    Args:
        has_files: whether there are files with what is left out here.
    """
    cells = [[*map(printable, _status_once(row))] for row in table.cells()[:MAX_ROWS]]
    headers = [
        _header(column.full_header, [row[index] for row in cells])
        for index, column in enumerate(table.columns)
    ]
    widths = _widths(table, headers, cells)
    shown = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False, pad_edge=False
    )
    points = [index for index, column in enumerate(table.columns) if column.point]
    joins = _needed(table, widths) > console.width
    if joins:
        room = console.width - NARROWEST - GAP
        chosen = _fitting(table, widths, room, points=[])
        left = console.width - sum(widths[index] + GAP for index in chosen)
        shown.add_column(
            escape(", ".join(table.columns[index].full_header for index in points)),
            width=left - GAP,
            vertical="bottom",
        )
    else:
        chosen = _fitting(table, widths, console.width, points)
    for index in chosen:
        shown.add_column(
            escape(headers[index]),
            justify="left" if table.columns[index].align == "left" else "right",
            vertical="bottom",
            no_wrap=True,
            overflow="ellipsis",
            max_width=widths[index],
        )
    for row in cells:
        what = [", ".join(row[index] for index in points)] if joins else []
        shown.add_row(*(escape(cell) for cell in [*what, *(row[index] for index in chosen)]))
    console.print(escape(printable(table.caption)), highlight=False)
    console.print()
    console.print(shown)
    for note in table.footnotes:
        console.print(escape(printable(note)), highlight=False)
    hidden = [
        f"{count} more {what if count > 1 else what[:-1]}"
        for count, what in (
            (len(table.rows) - len(cells), "rows"),
            (len(headers) - len(chosen) - (len(points) if joins else 0), "columns"),
        )
        if count
    ]
    if hidden:
        where = "in the files" if has_files else "not shown"
        console.print(f"{' and '.join(hidden)} {where}.", style="dim", highlight=False)


def _header(text: str, cells: list[str]) -> str:
    """Over as many lines as it takes to be no wider than the cells, or than its longest word."""
    width = max(len(word) for word in (*text.split(" "), *cells))
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def _status_once(row: list[str]) -> list[str]:
    """A status spelled out in one cell of the row instead of in each."""
    words = set(fmt.STATUS_WORDS.values())
    first = next((index for index, cell in enumerate(row) if cell in words), None)
    return [
        fmt.ABSENT if cell in words and index != first else cell for index, cell in enumerate(row)
    ]


def _widths(table: Table, headers: list[str], cells: list[list[str]]) -> list[int]:
    """Characters that each column takes."""
    found = []
    for index, (column, header) in enumerate(zip(table.columns, headers, strict=True)):
        width = max(len(text) for text in (*header.split("\n"), *(row[index] for row in cells)))
        is_words = column.align == "left" and not column.point
        found.append(min(width, MAX_TEXT) if is_words else width)
    return found


def _results(table: Table) -> list[int]:
    """Columns that do not say what was measured, the most important first."""
    found = [index for index, column in enumerate(table.columns) if not column.point]
    return sorted(found, key=lambda index: table.columns[index].detail)


def _needed(table: Table, widths: list[int]) -> int:
    """Characters of a row with the least that is worth showing."""
    points = [index for index, column in enumerate(table.columns) if column.point]
    return sum(widths[index] + GAP for index in (*points, *_results(table)[:NUM_RESULTS]))


def _fitting(table: Table, widths: list[int], width: int, points: list[int]) -> list[int]:
    """Indices of the columns to show in ``width`` characters: ``points``, and results."""
    results = _results(table)
    while results and sum(widths[index] + GAP for index in (*points, *results)) > width:
        results.pop()
    return sorted([*points, *results])
