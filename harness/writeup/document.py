"""The write-up as data: what the paper and the appendix say, before any format is written.

``attnbench-writeup RESULTS...`` reads plans and records and measures nothing. The paper answers
questions, each with a figure, a table of few rows and a verdict; the appendix has every table and
figure of every sweep. Both are in the order of the themes of :data:`harness.cases.sweep.THEMES`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from harness.analysis.host_time import host_bound
from harness.render.figure import CaptionedFigure
from harness.render.table import Table
from harness.store.record import Record


@dataclass(kw_only=True, slots=True)
class NumberedTable:
    """A table with its place in the paper, or in the appendix."""

    number: str
    """``3``, in the appendix ``A3``."""
    anchor: str
    table: Table
    finding: str
    source: Path
    """The table in full, as the sweep's own report has it; without a suffix."""
    folded: list[str] = field(default_factory=list)
    """Sentences that stand for rows without a number."""
    num_folded: int = 0
    """Rows for which they stand."""


@dataclass(kw_only=True, slots=True)
class NumberedFigure:
    """A figure with its place in the paper, or in the appendix."""

    number: str
    anchor: str
    drawn: CaptionedFigure
    source: Path
    """Where the sweep's own report has it, as PNG."""


@dataclass(kw_only=True, slots=True)
class Gap:
    """Something that is missing, and the command that makes it."""

    what: str
    command: str


@dataclass(kw_only=True, slots=True)
class Section:
    """One sweep of one results folder, in the appendix."""

    title: str
    anchor: str
    about: str
    command: str
    counts: str
    results: Path
    theme: str
    """Heading of the theme that it belongs to."""
    tables: list[NumberedTable] = field(default_factory=list)
    figures: list[NumberedFigure] = field(default_factory=list)
    failures: list[tuple[str, str, int]] = field(default_factory=list)
    """Status as text, reason, and number of cases."""
    unshown: list[str] = field(default_factory=list)
    """Ids of measured cases that no table of the sweep shows."""


@dataclass(kw_only=True, slots=True)
class Question:
    """A question of the paper with its figure, its table and its verdict."""

    question: str
    theme: str
    anchor: str
    place: int
    verdict: str
    """A sentence that follows from the table or the figure; empty where nothing can be said."""
    section: Section
    table: NumberedTable | None = None
    figure: NumberedFigure | None = None
    rows_left: int = 0
    """Rows of the table that are in the appendix alone."""


@dataclass(kw_only=True, slots=True)
class Theme:
    """Questions of the paper and sections of the appendix under one heading."""

    title: str
    anchor: str
    questions: list[Question] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Document:
    """Everything that the write-up says, before it is written in any format."""

    title: str
    themes: list[Theme]
    environment: list[tuple[str, str]]
    method: list[tuple[str, str]]
    """A heading and a paragraph each."""
    limits: list[tuple[str, str]]
    """The same, on what the results do not say."""
    gaps: list[Gap]
    problems: list[str]
    records: dict[tuple[Path, str], Record]
    """The records of all sections, by results folder and case id."""

    @property
    def sections(self) -> list[Section]:
        return [section for theme in self.themes for section in theme.sections]

    @property
    def questions(self) -> list[Question]:
        return [question for theme in self.themes for question in theme.questions]

    def short_answer(self) -> Iterator[Question]:
        """The first question of each theme to which there is an answer."""
        for theme in self.themes:
            yield from [question for question in theme.questions if question.verdict][:1]

    def figures(self) -> Iterator[tuple[Section, NumberedFigure]]:
        """Every figure of the paper and of the appendix, with the section that it comes from."""
        for question in self.questions:
            if question.figure is not None:
                yield question.section, question.figure
        for section in self.sections:
            yield from ((section, figure) for figure in section.figures)


CASE_FACTS = ("case_id", "status", "disturbed", "stale", "host")


def facts_of(frame: pd.DataFrame) -> pd.DataFrame:
    """What :mod:`harness.writeup.limits` counts of a frame's rows."""
    return frame[[*CASE_FACTS]].assign(host_bound=host_bound(frame))


def relative(path: Path, start: Path) -> str:
    """A link from the folder ``start``, with forward slashes."""
    return Path(os.path.relpath(path, start)).as_posix()
