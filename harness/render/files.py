"""From records to files: every table as CSV, Markdown and LaTeX, every figure as PNG and SVG.

The files of a sweep depend on its plan and its records alone: rendering again, on any machine
with the same libraries, gives the same bytes. Each file is replaced in one step, so that a
reader never sees half of one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import pandas as pd

from harness import escapes
from harness.analysis.frame import build_frame
from harness.cases.columns import POINTS
from harness.cases.plugins import choices_of, why_missing
from harness.render.latex import to_latex
from harness.render.predicted_memory import summarise
from harness.render.registries import FIGURES, TABLES
from harness.render.report import DrawnFigure, write_report
from harness.render.spared import made, said
from harness.render.table import REASONS, Table, build_table, finding_of
from harness.render.terminal import render_terminal
from harness.store import atomic
from harness.store.attempts import Records
from harness.store.plain_json import readable_text
from harness.store.regular import require_inside
from harness.store.sweep_plan import PlanError, read_plan

__all__ = ["RenderedSweep", "render_sweep", "render_terminal"]


@dataclass(kw_only=True, slots=True)
class RenderedSweep:
    """The files written for one sweep."""

    label: str
    folder: Path
    report: Path
    tables: list[Table] = field(default_factory=list)
    """The sweep's tables, in the order of the plan."""
    findings: dict[str, str] = field(default_factory=dict)
    """What its tables and figures show, by their names, a sentence each; none twice."""
    memory: str | None = None
    """How predictions of peak memory hold, in words; None where no peak was measured on CUDA."""
    problems: list[str] = field(default_factory=list)
    """One line for each table and figure that could not be made."""
    paths: list[Path] = field(default_factory=list)
    """Every file written, the report last."""


def render_sweep(results: Path, label: str, records: Records, problems: list[str]) -> RenderedSweep:
    """Write the tables, figures and report of one sweep from its records.

    Args:
        records: the readable records of the results folder by case id; others are ignored.
        problems: one line per unreadable file, for the report.

    Raises PlanError, and OSError where the folder cannot be written.
    """
    plan = read_plan(results, label)
    folder = results / "sweeps" / label
    for written in (folder, folder / "tables", folder / "figures"):
        require_inside(written, results)
    measured = [records[case_id] for case_id in plan.case_ids if case_id in records]
    choices = choices_of(record.case for record in measured)
    choices += [(TABLES, name) for name in plan.tables] + [(FIGURES, name) for name in plan.figures]
    planned = [
        (registry, name) for registry, name in choices if f"{registry.group}={name}" in plan.plugins
    ]
    if reason := why_missing(planned, plan.plugins):
        raise PlanError(f"{folder}: {reason}")
    try:
        frame = build_frame(measured, records.values(), later=records.later)
    except (MemoryError, ImportError):
        raise
    except ValueError as error:
        raise PlanError(f"{folder}: {error}") from error
    except Exception as error:
        raise PlanError(f"{folder}: no table can be made of its records ({said(error)})") from error
    rendered = RenderedSweep(label=label, folder=folder, report=folder / "report.md")
    found: dict[str, str] = {}
    for name in plan.tables:
        made_table = made(f"table {name}", partial(_texts, name, frame), rendered.problems)
        table, texts = made_table or (None, {})
        if table is not None:
            rendered.tables.append(table)
            found.setdefault(finding_of(table), name)
        for suffix in ("csv", "md", "tex"):
            put(folder / "tables" / f"{name}.{suffix}", texts.get(suffix), rendered.paths)
    figures: list[DrawnFigure] = []
    for name in plan.figures:
        # Imported late: matplotlib takes as long to load as a small sweep's tables to make.
        from harness.render.figure import draw

        drawn = made(f"figure {name}", partial(draw, name, frame), rendered.problems)
        if drawn is not None:
            figures.append(DrawnFigure(name=name, caption=drawn.caption))
            found.setdefault(drawn.finding, name)
        for suffix in ("png", "svg"):
            data = getattr(drawn, suffix, None)
            put(folder / "figures" / f"{name}.{suffix}", data, rendered.paths)
    report = write_report(
        plan=plan,
        records=measured,
        attempts=records,
        tables=[(table, to_markdown) for table in rendered.tables],
        figures=figures,
        missing=[case_id for case_id in plan.case_ids if case_id not in records],
        problems=[
            *(problem.replace(f"{results}{os.sep}", "") for problem in problems),
            *rendered.problems,
        ],
    )
    put(rendered.report, readable_text(report).encode(), rendered.paths)
    rendered.findings = {name: sentence for sentence, name in found.items() if sentence}
    predictions = summarise(measured)
    rendered.memory = None if predictions is None else predictions.sentence
    return rendered


def _texts(name: str, frame: pd.DataFrame) -> tuple[Table | None, dict[str, bytes]]:
    """A table, and its files by their suffixes."""
    table = build_table(name, frame)
    if table is None:
        return None, {}
    texts = {"csv": to_csv(table), "md": to_markdown(table), "tex": to_latex(table)}
    return table, {suffix: readable_text(text).encode() for suffix, text in texts.items()}


def to_csv(table: Table) -> str:
    """Numbers in full precision and everything that names the point, for other programs."""
    rows = table.rows
    keys = [name for name in ("case_id", *POINTS) if name in rows]
    for column in table.columns:
        keys += column.raw or [key for key in (column.key, column.spread, column.iqr) if key]
        if column.status and "status" not in rows:
            keys.append(column.status)
    keys += [name for name in ("status", "throttled", "recompilations") if name in rows]
    words = _word_keys(table)
    keys += words
    found = rows[list(dict.fromkeys(keys))].copy()
    for name in words:
        found[name] = [" ".join(some) if isinstance(some, list) else "" for some in found[name]]
    for key in found.select_dtypes(exclude="number").columns:
        cells = found[key].tolist()
        if any(escapes.spreadsheet(cell) is not cell for cell in cells):
            found[key] = pd.Series(map(escapes.spreadsheet, cells), found.index, dtype=object)
    return found.to_csv(index=False, lineterminator="\n")


def _word_keys(table: Table) -> list[str]:
    """Columns that say in words why values are marked."""
    kinds = [kind for kind, _ in REASONS.values()]
    found = [column.words_key(kind, table.rows) for column in table.columns for kind in kinds]
    return list(dict.fromkeys(filter(None, found)))


def to_markdown(table: Table, limit: int | None = None) -> str:
    """GitHub's table syntax: caption, rows (the first ``limit``), footnotes."""
    cells = [[_markdown_cell(cell) for cell in row] for row in table.cells()[:limit]]
    headers = [_markdown_cell(column.full_header) for column in table.columns]
    widths = [max(3, *map(len, column)) for column in zip(headers, *cells, strict=True)]
    left = [column.align == "left" for column in table.columns]
    rule = [
        ":" + "-" * (width - 1) if is_left else "-" * (width - 1) + ":"
        for width, is_left in zip(widths, left, strict=True)
    ]

    def line(row: list[str]) -> str:
        padded = (
            cell.ljust(width) if is_left else cell.rjust(width)
            for cell, width, is_left in zip(row, widths, left, strict=True)
        )
        return f"| {' | '.join(padded)} |\n"

    body = "".join(line(row) for row in [headers, rule, *cells])
    notes = "".join(f"\n{escapes.markdown(note)}\n" for note in table.footnotes)
    return f"{escapes.markdown(table.caption)}\n\n{body}{notes}"


@lru_cache(maxsize=100_000)
def _markdown_cell(text: str) -> str:
    return " ".join(escapes.markdown(text).split())


def put(path: Path, data: bytes | None, written: list[Path]) -> None:
    """Replace a file in one step, or remove it where there is nothing to say any more."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(path, data)
    written.append(path)
