"""Reads results folders into the document that is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pandas as pd

from harness.analysis.frame import build_frame
from harness.cases import format as fmt
from harness.cases.recorded import load
from harness.cases.sweep import OTHER_THEME, THEMES, Sweep, load_sweep
from harness.paths import config_files
from harness.render.figure import build_figure
from harness.render.report import (
    counts_of,
    environment_of,
    measurement_facts,
    reason_of,
    template,
)
from harness.render.spared import made
from harness.render.table import Table, build_table, finding_of
from harness.store.attempts import Records
from harness.store.record import Record, RecordStore
from harness.store.sweep_plan import PlanError, SweepPlan, planned_labels, read_plan
from harness.writeup.document import (
    Document,
    Gap,
    NumberedFigure,
    NumberedTable,
    Question,
    Section,
    Theme,
    facts_of,
)
from harness.writeup.folding import fold, shown_cases
from harness.writeup.gaps import folder_of_cuda, gaps_of, sweeps_without
from harness.writeup.limits import limits_of
from harness.writeup.questions import Asked, asked_of, build_question


@dataclass(kw_only=True, slots=True)
class _Planned:
    """A sweep of a results folder before its tables are made."""

    plan: SweepPlan
    results: Path
    sweep: Sweep | None
    """Its file, where there still is one of that name."""
    found: Records
    asked: list[Asked] = field(default_factory=list)

    @property
    def theme(self) -> str:
        """The heading of the sweep's theme."""
        return THEMES.get(self.sweep.theme if self.sweep else "", OTHER_THEME)


def collect(folders: Sequence[Path], *, with_appendix: bool = True) -> Document:
    """The document of all sweeps in the results folders, theme by theme.

    Args:
        with_appendix: without it, no table and no figure is made but those of the paper.

    Raises:
        ValueError: in one line, where a folder holds no sweep.
    """
    problems: list[str] = []
    gaps: list[Gap] = []
    planned = [one for folder in folders for one in _planned(folder, problems)]
    asked_of([(one.plan, one.sweep, one.results, one.asked) for one in planned])
    records: dict[tuple[Path, str], Record] = {}
    facts: list[pd.DataFrame] = []
    themes = {title: _theme(title) for title in (*THEMES.values(), OTHER_THEME)}
    for one in planned:
        gaps += gaps_of(one.plan, one.found, one.results)
    order = list(themes)
    numbers = Counter[str]()
    for one in sorted(planned, key=lambda one: order.index(one.theme)):
        measured = [one.found[case_id] for case_id in one.plan.case_ids if case_id in one.found]
        records |= {(one.results, record.case_id): record for record in measured}
        if not with_appendix and not one.asked:
            continue
        part = made(
            f"{one.results}: {one.plan.label}",
            partial(_part, one, measured, len(folders) > 1, numbers, with_appendix, problems),
            problems,
        )
        if part is None:
            continue
        section, questions, rows = part
        facts.append(rows)
        themes[one.theme].sections.append(section)
        for question in questions:
            themes[question.theme].questions.append(question)
    for theme in themes.values():
        theme.questions.sort(key=lambda question: question.place)
    _number([question for theme in themes.values() for question in theme.questions])
    labels = [one.plan.label for one in planned]
    gaps += sweeps_without(labels, folders, folder_of_cuda(folders, records))
    every = list(records.values())
    return Document(
        title=f"Measurements of {', '.join(folder.name for folder in folders)}",
        themes=[theme for theme in themes.values() if theme.sections or theme.questions],
        environment=environment_of(every),
        method=_method(every),
        limits=limits_of(every, facts, gaps),
        gaps=gaps,
        problems=problems,
        records=records,
    )


def _planned(results: Path, problems: list[str]) -> list[_Planned]:
    """The sweeps of one results folder whose plans can be read."""
    if not results.is_dir():
        raise ValueError(f"RESULTS={results}: no such folder")
    labels = planned_labels(results)
    if not labels:
        raise ValueError(f"RESULTS={results}: not a results folder (no sweeps/*/plan.json)")
    found, unreadable = load(RecordStore(results))
    problems += unreadable
    planned = []
    for label in labels:
        try:
            plan = read_plan(results, label)
        except PlanError as error:
            problems.append(str(error))
            continue
        sweep = _sweep_of(plan)
        planned.append(_Planned(plan=plan, results=results, sweep=sweep, found=found))
    return planned


def _sweep_of(plan: SweepPlan) -> Sweep | None:
    """The named sweep that a plan was made from; None where there is none of its name now."""
    if plan.name not in config_files("sweeps"):
        return None
    try:
        return load_sweep(plan.name)
    except ValueError:
        return None


def _theme(title: str) -> Theme:
    return Theme(title=title, anchor=f"theme-{_slug(title).lower()}")


def _part(
    one: _Planned,
    measured: list[Record],
    several: bool,
    numbers: Counter[str],
    with_appendix: bool,
    problems: list[str],
) -> tuple[Section, list[Question], pd.DataFrame]:
    """A sweep's section, its questions, and what the limits count of its rows."""
    frame = build_frame(measured, one.found.values(), later=one.found.later)
    section = _section(one, measured, several)
    if with_appendix:
        _fill(section, one.plan, frame, numbers, problems)
        shown = {case_id for item in section.tables for case_id in shown_cases(item.table)}
        folded = {record.case_id for record in measured if record.status == "unsupported"}
        section.unshown = [
            record.case_id for record in measured if record.case_id not in shown | folded
        ]
    questions = []
    for asked in one.asked:
        made_question = made(
            f"{one.plan.label}: {asked.choice.question}",
            partial(build_question, asked, one.plan, section, frame, section.anchor),
            problems,
        )
        if made_question is not None:
            made_question.theme = THEMES.get(asked.choice.theme, section.theme)
            questions.append(made_question)
    return section, questions, facts_of(frame)


def _section(one: _Planned, measured: list[Record], several: bool) -> Section:
    plan = one.plan
    anchor = f"{one.results.name}-{plan.label}" if several else plan.label
    found = {record.case_id for record in measured}
    apart = [one.results.name] if several else []
    if plan.label.startswith(f"{plan.name}-"):
        apart.append(plan.label.removeprefix(f"{plan.name}-").replace("_", " "))
    return Section(
        title=f"{plan.title} ({', '.join(apart)})" if apart else plan.title,
        anchor=f"sweep-{_slug(anchor)}",
        about=" ".join(plan.about.split()),
        command=plan.command,
        counts=counts_of(measured, [case_id for case_id in plan.case_ids if case_id not in found]),
        results=one.results,
        theme=one.theme,
        failures=_failures(measured),
    )


def _fill(
    section: Section,
    plan: SweepPlan,
    frame: pd.DataFrame,
    numbers: Counter[str],
    problems: list[str],
) -> None:
    """Make the sweep's tables, with what says nothing folded away, and its figures."""
    place = section.anchor.removeprefix("sweep-")
    folder = section.results / "sweeps" / plan.label
    for name in plan.tables:
        table = made(f"{plan.label}: table {name}", partial(_table, name, frame), problems)
        if table is None:
            continue
        numbers["table"] += 1
        folded = fold(table)
        section.tables.append(
            NumberedTable(
                number=f"A{numbers['table']}",
                anchor=f"tab-{place}-{_slug(name)}",
                table=folded.table,
                finding=finding_of(table),
                source=folder / "tables" / name,
                folded=folded.sentences,
                num_folded=folded.num_rows,
            )
        )
    for name in plan.figures:
        drawn = made(f"{plan.label}: figure {name}", partial(build_figure, name, frame), problems)
        if drawn is None:
            continue
        numbers["figure"] += 1
        section.figures.append(
            NumberedFigure(
                number=f"A{numbers['figure']}",
                anchor=f"fig-{place}-{_slug(name)}",
                drawn=drawn,
                source=folder / "figures" / f"{name}.png",
            )
        )


def _table(name: str, frame: pd.DataFrame) -> Table | None:
    """A built table of which every cell can be written."""
    table = build_table(name, frame)
    if table is not None:
        table.cells()
    return table


def _number(questions: Sequence[Question]) -> None:
    """Give the paper's tables and figures their numbers, in its order."""
    tables = [question.table for question in questions if question.table]
    figures = [question.figure for question in questions if question.figure]
    for number, table in enumerate(tables, 1):
        table.number = str(number)
    for number, figure in enumerate(figures, 1):
        figure.number = str(number)


def _slug(text: str) -> str:
    """A text as it appears in anchors, labels and file names."""
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-")


def _failures(measured: Sequence[Record]) -> list[tuple[str, str, int]]:
    """Why cases have no number: alike ones counted together, the most frequent first."""
    reasons = Counter(
        (fmt.STATUS_WORDS[record.status], reason_of(record))
        for record in measured
        if record.status != "ok"
    )
    return [(status, reason, count) for (status, reason), count in reasons.most_common()]


def _method(records: Sequence[Record]) -> list[tuple[str, str]]:
    text = template("method.md.j2").render(**measurement_facts(records))
    return re.findall(r"^- \*\*(.+?)\.\*\* (.+)$", text.replace("*wrong*", "wrong"), re.MULTILINE)
