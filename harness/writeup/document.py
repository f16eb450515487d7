"""The write-up: all tables and figures of results folders as one numbered document.

``attnbench-writeup RESULTS...`` reads plans and records and measures nothing. Each table and
figure stands with its caption and the sentence that its data say; then come the environment,
the method, and what is missing with the command that makes it. Written as Markdown, as LaTeX
(and PDF, where a TeX is installed) and as one HTML page.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pandas as pd

from harness.analysis.frame import build_frame
from harness.cases import format as fmt
from harness.cases.recorded import load
from harness.cases.sweep import Sweep, load_sweep
from harness.cases.task import TASKS
from harness.paths import project_sweeps
from harness.render.figure import CaptionedFigure, build_figure
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
from harness.store.sweep_plan import (
    PlanError,
    SweepPlan,
    command_into,
    planned_labels,
    read_plan,
)

MISSING_SHOWN = 5
"""Ids of cases without a record that a gap names; the command measures all of them."""


@dataclass(kw_only=True, slots=True)
class NumberedTable:
    """A table with its place in the document."""

    number: int
    anchor: str
    table: Table
    finding: str
    source: Path
    """The table in full, as the sweep's own report has it; without a suffix."""


@dataclass(kw_only=True, slots=True)
class NumberedFigure:
    """A figure with its place in the document."""

    number: int
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
    """One sweep of one results folder."""

    title: str
    anchor: str
    about: str
    command: str
    counts: str
    results: Path
    tables: list[NumberedTable] = field(default_factory=list)
    figures: list[NumberedFigure] = field(default_factory=list)
    failures: list[tuple[str, str, int]] = field(default_factory=list)
    """Status as text, reason, and number of cases."""


@dataclass(kw_only=True, slots=True)
class Document:
    """Everything that the write-up says, before it is written in any format."""

    title: str
    sections: list[Section]
    environment: list[tuple[str, str]]
    method: list[tuple[str, str]]
    """A heading and a paragraph each."""
    gaps: list[Gap]
    problems: list[str]
    records: dict[tuple[Path, str], Record]
    """The records of all sections, by results folder and case id."""

    def main_findings(self) -> Iterator[tuple[str, int, str, str]]:
        """The first finding of each sweep: ``Table`` or ``Figure``, number, anchor and sentence.

        The sentences of its other tables and figures stand below them.
        """
        for section in self.sections:
            found = [
                *(("Table", item.number, item.anchor, item.finding) for item in section.tables),
                *(
                    ("Figure", item.number, item.anchor, item.drawn.finding)
                    for item in section.figures
                ),
            ]
            yield from [finding for finding in found if finding[-1]][:1]


def collect(folders: Sequence[Path]) -> Document:
    """The document of all sweeps in the results folders, in the order of their names.

    Raises:
        ValueError: in one line, where a folder holds no sweep.
    """
    sections: list[Section] = []
    gaps: list[Gap] = []
    records: dict[tuple[Path, str], Record] = {}
    problems: list[str] = []
    numbers = Counter[str]()
    seen: list[str] = []
    for results in folders:
        if not results.is_dir():
            raise ValueError(f"RESULTS={results}: no such folder")
        labels = planned_labels(results)
        if not labels:
            raise ValueError(f"RESULTS={results}: not a results folder (no sweeps/*/plan.json)")
        found, unreadable = load(RecordStore(results))
        problems += unreadable
        for label in labels:
            try:
                plan = read_plan(results, label)
            except PlanError as error:
                problems.append(str(error))
                continue
            anchor = label if len(folders) == 1 else f"{results.name}-{label}"
            measured = [found[case_id] for case_id in plan.case_ids if case_id in found]
            records |= {(results, record.case_id): record for record in measured}
            gaps += _gaps_of(plan, found, results)
            section = made(
                f"{results}: {label}",
                partial(_section, plan, measured, results, anchor, numbers, found, problems),
                problems,
            )
            if section is None:
                continue
            if len(folders) > 1:
                section.title += f" ({results.name})"
            sections.append(section)
        seen += labels
    gaps += _sweeps_without(seen, folders, _folder_of_cuda(folders, records))
    every = list(records.values())
    return Document(
        title=f"Measurements of {', '.join(folder.name for folder in folders)}",
        sections=sections,
        environment=environment_of(every),
        method=_method(every),
        gaps=gaps,
        problems=problems,
        records=records,
    )


def _section(
    plan: SweepPlan,
    measured: list[Record],
    results: Path,
    anchor: str,
    numbers: Counter[str],
    found: Records,
    problems: list[str],
) -> Section:
    frame = build_frame(measured, found.values(), later=found.later)
    missing = [None] * (len(plan.case_ids) - len(measured))
    section = Section(
        title=plan.title,
        anchor=f"sweep-{_slug(anchor)}",
        about=" ".join(plan.about.split()),
        command=plan.command,
        counts=counts_of(measured, [str(item) for item in missing]),
        results=results,
        failures=_failures(measured),
    )
    for name in plan.tables:
        table = made(f"{plan.label}: table {name}", partial(_table, name, frame), problems)
        if table is not None:
            numbers["table"] += 1
            section.tables.append(
                NumberedTable(
                    number=numbers["table"],
                    anchor=f"tab-{_slug(anchor)}-{_slug(name)}",
                    table=table,
                    finding=finding_of(table),
                    source=results / "sweeps" / plan.label / "tables" / name,
                )
            )
    for name in plan.figures:
        drawn = made(f"{plan.label}: figure {name}", partial(build_figure, name, frame), problems)
        if drawn is not None:
            numbers["figure"] += 1
            section.figures.append(
                NumberedFigure(
                    number=numbers["figure"],
                    anchor=f"fig-{_slug(anchor)}-{_slug(name)}",
                    drawn=drawn,
                    source=results / "sweeps" / plan.label / "figures" / f"{name}.png",
                )
            )
    return section


def _table(name: str, frame: pd.DataFrame) -> Table | None:
    """A built table of which every cell can be written."""
    table = build_table(name, frame)
    if table is not None:
        table.cells()
    return table


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


def _gaps_of(plan: SweepPlan, found: Records, results: Path) -> Iterator[Gap]:
    label = plan.label
    command = command_into(plan.command or f"attnbench sweeps={label}", results)
    missing = [case_id for case_id in plan.case_ids if case_id not in found]
    if missing:
        named = ", ".join(missing[:MISSING_SHOWN])
        rest = len(missing) - MISSING_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        yield Gap(
            what=f"{label}: {fmt.counted(len(missing), 'case')} not measured ({named}{more})",
            command=command,
        )
    broken = Counter(
        found[case_id].status
        for case_id in plan.case_ids
        if case_id in found and found[case_id].status in ("failed", "timeout", "wrong")
    )
    if broken:
        words = ", ".join(f"{number} {fmt.STATUS_WORDS[name]}" for name, number in broken.items())
        yield Gap(
            what=f"{label}: {fmt.counted(broken.total(), 'case')} without a result ({words})",
            command=command_into(command, results, retry="true"),
        )
    overtaken = Counter(
        found.later[case_id].status
        for case_id in plan.case_ids
        if case_id in found.later and found.later[case_id].status in ("failed", "timeout")
    )
    if overtaken:
        words = ", ".join(
            f"{number} {fmt.STATUS_WORDS[name]}" for name, number in overtaken.items()
        )
        yield Gap(
            what=f"{label}: {fmt.counted(overtaken.total(), 'case')} with a newer attempt that "
            f"gave no result ({words})",
            command=command_into(command, results, retry="true"),
        )


def _folder_of_cuda(
    folders: Sequence[Path], records: dict[tuple[Path, str], Record]
) -> Path | None:
    """The first folder with something that ran on a CUDA device."""
    ran = {results for (results, _), record in records.items() if record.case["device"] == "cuda"}
    return next((folder for folder in folders if folder in ran), None)


def _sweeps_without(
    labels: Sequence[str], folders: Sequence[Path], cuda: Path | None
) -> Iterator[Gap]:
    """The project's named sweeps that no results folder has.

    What is measured belongs beside what a GPU has measured, if there is any; what is only counted
    needs no device, and goes into the first folder.
    """
    for name in project_sweeps():
        if any(label == name or label.startswith(f"{name}-") for label in labels):
            continue
        command = f"attnbench sweeps={name}"
        if not _measures(load_sweep(name)):
            yield Gap(what=f"{name}: not run", command=command_into(command, folders[0]))
        elif cuda is not None:
            yield Gap(
                what=f"{name}: not run",
                command=command_into(command, cuda, device="cuda"),
            )
        else:
            yield Gap(
                what=f"{name}: not run (on a CPU at a size for one; in full on a GPU, into a "
                "folder of its own)",
                command=command_into(command, folders[0]),
            )


def _measures(sweep: Sweep) -> bool:
    """Whether any task of the sweep measures, rather than counts."""
    named = [grid.get("task", []) for grids in sweep.scales.values() for grid in grids]
    names = {
        str(name) for value in named for name in (value if isinstance(value, list) else [value])
    }
    return not names or any(TASKS[name].target.measures for name in names)


def _method(records: Sequence[Record]) -> list[tuple[str, str]]:
    text = template("method.md.j2").render(**measurement_facts(records))
    return re.findall(r"^- \*\*(.+?)\.\*\* (.+)$", text.replace("*wrong*", "wrong"), re.MULTILINE)


def relative(path: Path, start: Path) -> str:
    """A link from the folder ``start``, with forward slashes."""
    return Path(os.path.relpath(path, start)).as_posix()
