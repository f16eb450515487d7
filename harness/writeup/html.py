"""The paper and the appendix as one HTML page that needs no network and no other file.

One file, so that it can be mailed: pictures beside it would stay behind, and the tables with their
records are most of the page anyway. Figures and records are held compressed, and the browser
unpacks a figure when it comes into view. Tables are plain HTML that JavaScript sorts, filters and
searches; a row leads to a summary of the record that it came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from harness.analysis.case_columns import GIB
from harness.analysis.memory import own_peak_bytes
from harness.analysis.stats import median, quartiles, slowest_rank
from harness.cases import format as fmt
from harness.paths import ROOT
from harness.render.report import template
from harness.render.table import Column
from harness.store.record import Record, RecordStore
from harness.writeup.document import Document, NumberedFigure, NumberedTable, relative
from harness.writeup.svg import on_dark, packed, to_svg, width_and_height
from harness.writeup.words import notes_of, words_of

MAX_CHOICES = 12
"""A column that names the point gets a list to choose from up to this many values."""

MAX_ROWS = 3000
"""A browser stays quick with this many rows of a table; the CSV has all."""

MAX_SAMPLES = 100
"""A record's summary draws this many of its samples."""

_TEMPLATES = ROOT / "harness" / "writeup" / "templates"


def to_html(document: Document, folder: Path) -> str:
    """The page; links to record files are relative to ``folder``, where it will lie."""
    places = {key: place for place, key in enumerate(document.records)}
    colours: set[str] = set()

    def table(item: NumberedTable, results: Path) -> dict[str, Any]:
        return {"item": item, **_table(item, results, places)}

    def figure(item: NumberedFigure) -> dict[str, Any]:
        width, height = width_and_height(item)
        return {"item": item, "packed": packed(to_svg(item, colours)), "ratio": width / height}

    themes = [
        {
            "theme": theme,
            "questions": [
                {
                    "question": question,
                    "table": question.table and table(question.table, question.section.results),
                    "notes": question.table and notes_of(question.table, question.rows_left),
                    "figure": question.figure and figure(question.figure),
                }
                for question in theme.questions
            ],
            "sections": [
                {
                    "section": section,
                    "tables": [table(item, section.results) for item in section.tables],
                    "figures": [figure(item) for item in section.figures],
                }
                for section in theme.sections
            ],
        }
        for theme in document.themes
    ]
    return template("document.html.j2", package="harness.writeup", autoescape=True).render(
        document=document,
        words=words_of(document),
        themes=themes,
        style=(_TEMPLATES / "document.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "document.js").read_text(encoding="utf-8"),
        dark="".join(f"--c{tint[1:]}:{on_dark(tint)};" for tint in sorted(colours)),
        records=packed(json.dumps(_records(document, folder), separators=(",", ":"))),
        link=lambda path: relative(path, folder),
    )


def _table(
    item: NumberedTable, results: Path, places: dict[tuple[Path, str], int]
) -> dict[str, Any]:
    table = item.table
    cells = table.cells()[:MAX_ROWS]
    choices: list[tuple[int, str, list[str]]] = []
    more = len(table.rows) - MAX_ROWS
    for index, column in enumerate(table.columns):
        words = list(dict.fromkeys(row[index] for row in cells)) if column.point else []
        if 1 < len(words) <= MAX_CHOICES:
            choices.append((index, column.header, words))
    rows = table.rows.iloc[:MAX_ROWS].to_dict("records")
    # HTML lets the end tags of rows and cells be left out, which is a tenth of the page.
    body = "".join(
        f"<tr>{''.join(_cells(table.columns, texts, row, results, places))}\n"
        for texts, row in zip(cells, rows, strict=True)
    )
    groups = _groups(table.columns)
    left = [index + 1 for index, column in enumerate(table.columns) if column.align == "left"]
    return {
        "choices": choices,
        "body": body,
        "groups": groups,
        "more": max(0, more),
        "left": left,
    }


def _cells(
    columns: list[Column],
    texts: list[str],
    row: dict[Any, Any],
    results: Path,
    places: dict[tuple[Path, str], int],
) -> Iterator[str]:
    """The cells of a row; the first one of each record is a link to it."""
    last = None
    for column, text in zip(columns, texts, strict=True):
        words = escape(text)
        place = places.get((results, str(row.get(column.record))))
        if place not in (None, last) and not column.point and text != fmt.ABSENT:
            last = place
            words = f'<a href="#r{place}">{words}</a>'
        yield f"<td>{words}"


def _groups(columns: list[Column]) -> list[tuple[str, int]]:
    """Shared headings and how many columns each covers; nothing where there are none."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if runs and runs[-1][0] == column.group:
            runs[-1] = (column.group, runs[-1][1] + 1)
        else:
            runs.append((column.group, 1))
    return runs if any(group for group, _ in runs) else []


def _records(document: Document, folder: Path) -> dict[str, Any]:
    """The part of each record that the page needs; equal environments are stored once."""
    environments: dict[str, int] = {}
    kept = []
    for (results, _), record in document.records.items():
        text = json.dumps(record.environment, sort_keys=True)
        place = environments.setdefault(text, len(environments))
        path = RecordStore(results).place(record.case_id, record.attempt)
        kept.append({**_summary(record), "file": relative(path, folder), "environment": place})
    return {"records": kept, "environments": [json.loads(text) for text in environments]}


def _summary(record: Record) -> dict[str, Any]:
    """A record in few words: its case, its times, its memory, its check."""
    phases = {}
    samples: list[float] = []
    for name, phase in record.phases.items() if record.status == "ok" else ():
        series = slowest_rank(phase.samples_ms) if phase.samples_ms else []
        if series:
            low, high = quartiles(series)
            shown = [fmt.number(value) for value in (median(series), low, high, min(series))]
            phases[name] = [phase.clock, len(series), *shown]
            samples = [float(f"{value:.4g}") for value in series[:MAX_SAMPLES]]
    facts: dict[str, str] = {}
    peaks = [own_peak_bytes(rank) or 0 for rank in record.memory]
    if any(peaks):
        facts["peak memory (GiB)"] = fmt.number(max(peaks) / GIB)
    check = record.check or {}
    if check.get("errors"):
        worst = max(check["errors"].values())
        facts["error against float64"] = f"{worst:.1e} (tolerance {check.get('tolerance')})"
    if record.compilation.get("compile_s"):
        facts["compile time (s)"] = fmt.number(record.compilation["compile_s"])
    if record.error:
        facts["reason"] = str(record.error.get("message") or "")
    facts["measured"] = f"{record.started_at}, attempt {record.attempt}"
    return {
        "id": record.case_id,
        "status": fmt.STATUS_WORDS.get(record.status, record.status),
        "case": dict(_flat(record.case)),
        "phases": phases,
        "samples": samples,
        "facts": facts,
    }


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """``task.mode: forward`` and so on; what is not set is left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}".removesuffix(".name"), str(value)
