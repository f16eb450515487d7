"""The paper and the appendix as Markdown; links are relative to where they will lie."""

from __future__ import annotations

from pathlib import Path

from harness import escapes
from harness.render.files import to_markdown
from harness.render.report import template
from harness.render.table import Table
from harness.writeup.document import Document, NumberedTable, relative
from harness.writeup.words import notes_of, short, words_of

ROWS_IN_MARKDOWN = 40
"""Longer tables of the appendix are cut, and complete in their CSV and on the HTML page."""


def to_markdown_document(
    name: str, document: Document, folder: Path, pictures: dict[str, Path]
) -> str:
    """The ``paper`` or the ``appendix``.

    Args:
        folder: where it will lie.
        pictures: the file of each figure, by its anchor.
    """

    def limited(table: Table) -> str:
        return to_markdown(table, ROWS_IN_MARKDOWN)

    def without_notes(item: NumberedTable, rows_left: int) -> str:
        bare = Table(
            caption=short(item.table.caption), columns=item.table.columns, rows=item.table.rows
        )
        notes = notes_of(item, rows_left)
        return to_markdown(bare) + (f"\n{escapes.markdown(notes)}\n" if notes else "")

    return template(f"{name}.md.j2", package="harness.writeup").render(
        document=document,
        words=words_of(document),
        paper_table=without_notes,
        markdown=limited,
        limit=ROWS_IN_MARKDOWN,
        pictures=pictures,
        link=lambda path: relative(path, folder),
    )
