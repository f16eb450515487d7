"""The paper's questions: which sweeps answer one, and the figure and table that do.

A sweep's file says so under ``paper`` (:class:`harness.cases.sweep.PaperQuestion`). A sweep without
a file, such as a command without ``sweeps=``, asks by its title and answers with its first table
and figure; so do all sweeps of folders in which no file asks anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from harness.cases.sweep import PaperQuestion, Sweep
from harness.render.figure import CaptionedFigure, build_figure
from harness.render.selection import Selection, rows_where, selected
from harness.render.table import Table, build_table, finding_of
from harness.store.sweep_plan import SweepPlan
from harness.writeup.document import NumberedFigure, NumberedTable, Question, Section
from harness.writeup.folding import fold

MAX_ROWS = 20
"""Rows of a table in the paper; the others are in the appendix."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Asked:
    """A question that a sweep of a results folder has to answer."""

    choice: PaperQuestion
    number: int
    """Among those of its sweep."""


def asked_of(
    planned: Sequence[tuple[SweepPlan, Sweep | None, Path, list[Asked]]],
) -> None:
    """Fill the lists of what each sweep is asked.

    Where several runs of one sweep lie in a folder, the one under the sweep's own name is asked.
    """
    own = {(results, plan.label) for plan, _, results, _ in planned}
    taken: set[tuple[Path, str]] = set()
    for plan, sweep, results, asked in planned:
        if sweep is None:
            choices = [PaperQuestion(question=plan.title)]
        else:
            key = (results, plan.name)
            if key in taken or (plan.label != plan.name and key in own):
                continue
            choices = sweep.paper
            taken.add(key)
        asked += [Asked(choice=choice, number=index) for index, choice in enumerate(choices)]
    if not any(asked for *_, asked in planned):
        for plan, _, _, asked in planned:
            asked.append(Asked(choice=PaperQuestion(question=plan.title), number=0))


def build_question(
    asked: Asked, plan: SweepPlan, section: Section, frame: pd.DataFrame, anchor: str
) -> Question | None:
    """The question with its figure, table and verdict; None where the frame has neither."""
    choice = asked.choice
    place = f"{anchor.removeprefix('sweep-')}-{asked.number + 1}"
    # A plan may be of other tables than its sweep's file has now.
    first = next(iter(plan.tables), "")
    table_name = choice.table if choice.table in plan.tables else first
    figure_name = choice.figure or ("" if choice.table else next(iter(plan.figures), ""))
    whole, shown = _table(table_name, frame, choice) if table_name in plan.tables else (None, None)
    drawn = _figure(figure_name, frame, choice) if figure_name in plan.figures else None
    if shown is None and drawn is None:
        return None
    verdict = finding_of(whole) if whole is not None else ""
    if not verdict and drawn is not None:
        verdict = _finding_of_all(figure_name, frame, choice, drawn)
    question = Question(
        question=choice.question,
        theme=section.theme,
        anchor=f"paper-{place}",
        place=choice.place,
        verdict=verdict,
        section=section,
    )
    folder = section.results / "sweeps" / plan.label
    if shown is not None:
        folded = fold(shown)
        rows = folded.table.rows
        question.rows_left = max(0, len(rows) - MAX_ROWS)
        question.table = NumberedTable(
            number="",
            anchor=f"paper-tab-{place}",
            table=replace(folded.table, rows=rows.iloc[:MAX_ROWS], _cells=None),
            finding="",
            source=folder / "tables" / table_name,
            folded=folded.sentences,
            num_folded=folded.num_rows,
        )
    if drawn is not None:
        question.figure = NumberedFigure(
            number="",
            anchor=f"paper-fig-{place}",
            drawn=drawn,
            source=folder / "figures" / f"{figure_name}.png",
        )
    return question


def _table(
    name: str, frame: pd.DataFrame, choice: PaperQuestion
) -> tuple[Table | None, Table | None]:
    """The table that the choice asks for, before and after its columns are chosen.

    Records of one's own may have no such rows or columns: then the table is shown as it is.
    """
    selection = Selection(
        where=choice.where,
        columns=choice.columns,
        down=choice.down,
        across=choice.across,
        cell=choice.cell,
    )
    try:
        whole = build_table(name, rows_where(frame, selection.where))
    except ValueError:
        whole = None
    if whole is None:
        whole = build_table(name, frame)
    if whole is None:
        return None, None
    try:
        shown = selected(whole, selection)
    except ValueError:
        return whole, whole
    lead = _first_sentence(whole.caption)
    if shown.caption.startswith(lead):
        return whole, shown
    return whole, replace(shown, caption=f"{lead} {shown.caption}", _cells=None)


def _figure(name: str, frame: pd.DataFrame, choice: PaperQuestion) -> CaptionedFigure | None:
    try:
        drawn = build_figure(name, rows_where(frame, choice.figure_where))
    except ValueError:
        drawn = None
    return drawn or build_figure(name, frame)


def _finding_of_all(
    name: str, frame: pd.DataFrame, choice: PaperQuestion, drawn: CaptionedFigure
) -> str:
    """The figure's finding on all rows, where it shows but some of them and the table all."""
    whole = build_figure(name, frame) if choice.figure_where else None
    return whole.finding if whole is not None else drawn.finding


def _first_sentence(caption: str) -> str:
    """Up to the first full stop or colon that a new sentence follows."""
    head, stop, _ = caption.partition(". ")
    return head + "." if stop else caption
