"""The words around the paper's questions: its title, scope, method in brief, limits and marks."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from harness.cases import format as fmt
from harness.render.table import NOTES
from harness.writeup.document import Document, NumberedTable
from harness.writeup.limits import NAMED

BRIEF_SENTENCES = 2
"""How many sentences of each paragraph of the method the paper has."""

_QUESTION = (
    "Which attention backend and which parallel strategy should one run on this hardware, and how "
    "does one know? Each section asks one question and answers it by one figure, one table and one "
    "verdict: a sentence that a program writes from the records, and that claims no more than "
    "their intervals carry. Where it says that something cannot be told, the measurements do not "
    "decide. The appendix has every measurement."
)

_SYMBOLS = tuple(note[0] for note in NOTES)

_IN_LIMITS = ("Measured by ", "Measured on ")
"""Beginnings of notes on revisions and hosts, which the limits count for all tables."""


_KEPT = (
    *("All rows:", "In every row:", "Cells:", "In brackets:", "Spread:"),
    *("Hollow markers", "Numbers with a sign"),
)
"""Beginnings of the sentences of a caption that a shorter one keeps."""


@dataclass(kw_only=True, slots=True)
class Words:
    """What the paper says besides its questions."""

    title: str
    question: str
    scope: str
    environment: list[tuple[str, str]]
    method: list[tuple[str, str]]
    limits: list[tuple[str, str]]
    marks: list[str]
    """Meanings of the marks that its tables show."""


def words_of(document: Document) -> Words:
    """The words of the paper, as they follow from the document."""
    return Words(
        title=f"Attention backends and parallel strategies: {_lower(document.title)}",
        question=_QUESTION,
        scope=_scope(document),
        environment=[(name, _few(value)) for name, value in document.environment],
        method=[(heading, in_brief(text)) for heading, text in document.method],
        limits=document.limits,
        marks=_marks(document),
    )


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _scope(document: Document) -> str:
    """How much was measured, and on what."""
    devices = Counter(
        str(record.environment.get("device_name") or record.case["device"])
        for record in document.records.values()
    )
    named = ", ".join(f"{name} ({count})" for name, count in devices.most_common(NAMED))
    questions = fmt.counted(len(document.questions), "question")
    cases = fmt.counted(len(document.records), "case")
    return f"{questions} to {cases}, by device: {named}."


def _few(value: str) -> str:
    """The values of an entry of the environment, or their number where there are many."""
    values = value.split("; ")
    return value if len(values) <= NAMED else f"{len(values)} different ones"


def in_brief(text: str) -> str:
    """The first sentences of a paragraph."""
    return ". ".join(text.split(". ")[:BRIEF_SENTENCES]).rstrip(".") + "."


def _marks(document: Document) -> list[str]:
    """The meaning of each mark in the paper's tables, without what each table adds."""
    tables = [question.table.table for question in document.questions if question.table]
    shown = {note[0] for table in tables for note in table.footnotes if note}
    return [note.rstrip(".") + "." for note in NOTES if note[0] in shown]


def short(caption: str) -> str:
    """A caption's first sentence, and what all rows share; the appendix has it in full."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", caption)
    return " ".join([first, *(words for words in others if words.startswith(_KEPT))])


def notes_of(item: NumberedTable, rows_left: int) -> str:
    """What stands below a table of the paper: its notes, but for the marks that all share."""
    notes = [note for note in item.table.footnotes if not note.startswith(_SYMBOLS + _IN_LIMITS)]
    notes += item.folded
    if rows_left:
        notes.append(f"{fmt.counted(rows_left, 'more row')} in the appendix.")
    return " ".join(notes)
