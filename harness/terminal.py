"""A table in a terminal, as much of it as fits."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from harness import format as fmt
from harness.table import Table

MAX_ROWS = 40

GAP = 2
"""Spaces between columns: a divider and the padding before it."""


def render_terminal(table: Table, console: Console) -> None:
    """Print the table as wide as the console allows.

    Where columns do not fit, details are left to the files first, then the other results from
    the right; columns that say what was measured never.
    """
    headers = ["\n".join(column.full_header.split(" ")) for column in table.columns]
    cells = [_status_once(row) for row in table.cells()[:MAX_ROWS]]
    chosen = _fitting(table, headers, cells, console.width)
    shown = RichTable(
        box=box.SIMPLE_HEAD, padding=(0, GAP - 1, 0, 0), show_edge=False, pad_edge=False
    )
    for index in chosen:
        shown.add_column(
            escape(headers[index]),
            justify="left" if table.columns[index].align == "left" else "right",
            vertical="bottom",
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in cells:
        shown.add_row(*(escape(row[index]) for index in chosen))
    console.print(escape(table.caption), highlight=False)
    console.print()
    console.print(shown)
    for note in table.footnotes:
        console.print(escape(note), highlight=False)
    hidden = [
        f"{count} more {what if count > 1 else what[:-1]}"
        for count, what in (
            (len(table.rows) - len(cells), "rows"),
            (len(headers) - len(chosen), "columns"),
        )
        if count
    ]
    if hidden:
        console.print(f"{' and '.join(hidden)} in the files.", style="dim", highlight=False)


def _status_once(row: list[str]) -> list[str]:
    """A status spelled out in one cell of the row instead of in each."""
    words = set(fmt.STATUS_WORDS.values())
    first = next((index for index, cell in enumerate(row) if cell in words), None)
    return [
        fmt.ABSENT if cell in words and index != first else cell for index, cell in enumerate(row)
    ]


def _fitting(table: Table, headers: list[str], cells: list[list[str]], width: int) -> list[int]:
    """Indices of the columns to show in ``width`` characters."""
    widths = [
        max(len(text) for text in (*header.split("\n"), *(row[index] for row in cells)))
        for index, header in enumerate(headers)
    ]
    chosen = list(range(len(headers)))
    results = [index for index in chosen if not table.columns[index].point]
    results.sort(key=lambda index: table.columns[index].detail)
    while results and sum(widths[index] + GAP for index in chosen) > width:
        chosen.remove(results.pop())
    return chosen
