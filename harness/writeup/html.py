"""The write-up as one HTML page that needs no network and no other file.

Tables are plain HTML that a few lines of JavaScript sort and filter; figures are inline SVG
whose points have been given their values; a cell leads to a summary of the record that it came
from. Colours are variables, so that a dark page is another set of values.
"""

from __future__ import annotations

import colorsys
import json
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.colors import to_hex, to_rgb

from harness.analysis.case_columns import GIB
from harness.analysis.memory import own_peak_bytes
from harness.analysis.stats import median, quartiles, slowest_rank
from harness.cases import format as fmt
from harness.paths import ROOT
from harness.render.figure import save
from harness.render.report import template
from harness.render.table import Column
from harness.store.record import Record, RecordStore
from harness.writeup.document import Document, NumberedFigure, NumberedTable, relative
from harness.writeup.hover import spots

DARK_PAGE = "#15181c"
CONTRAST = 3.2
"""Least contrast of a line with the dark page; WCAG 2.1 asks 3 of graphics."""

FURNITURE = frozenset(("#000000", "#222222", "#444444", "#cccccc", "#dddddd", "#ffffff"))
"""Greys of text, axes, grid and paper; any other colour stands for data."""

MAX_CHOICES = 12
"""A column that names the point gets a list to choose from up to this many values."""

MAX_ROWS = 3000
"""A browser stays quick with this many rows of a table; the CSV has all."""

MAX_SAMPLES = 100
"""A record's summary draws this many of its samples."""

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_TEMPLATES = ROOT / "harness" / "writeup" / "templates"


def to_html(document: Document, folder: Path) -> str:
    """The page; links to record files are relative to ``folder``, where it will lie."""
    places = {key: place for place, key in enumerate(document.records)}
    colours: set[str] = set()
    sections = [
        {
            "section": section,
            "tables": [
                {"item": item, **_table(item, section.results, places)} for item in section.tables
            ],
            "figures": [{"item": item, "svg": _figure(item, colours)} for item in section.figures],
        }
        for section in document.sections
    ]
    return template("document.html.j2", package="harness.writeup", autoescape=True).render(
        document=document,
        sections=sections,
        style=(_TEMPLATES / "document.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "document.js").read_text(encoding="utf-8"),
        dark="".join(f"--c{tint[1:]}:{on_dark(tint)};" for tint in sorted(colours)),
        records=_embedded(_records(document, folder)),
        link=lambda path: relative(path, folder),
    )


def _embedded(values: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    return json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")


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
    body = "".join(
        f"<tr>{''.join(_cells(table.columns, texts, row, results, places))}</tr>\n"
        for texts, row in zip(cells, rows, strict=True)
    )
    groups = _groups(table.columns)
    return {"choices": choices, "body": body, "groups": groups, "more": max(0, more)}


def _cells(
    columns: list[Column],
    texts: list[str],
    row: dict[Any, Any],
    results: Path,
    places: dict[tuple[Path, str], int],
) -> Iterator[str]:
    for column, text in zip(columns, texts, strict=True):
        key = _sort_key(row.get(column.key), text)
        kind = ' class="l"' if column.align == "left" else ""
        words = escape(text)
        place = places.get((results, str(row.get(column.record))))
        if place is not None and not column.point and text != fmt.ABSENT:
            words = f'<a href="#r{place}">{words}</a>'
        yield f'<td{kind} data-v="{key}">{words}</td>'


def _sort_key(value: Any, text: str) -> str:
    """A number to sort by; text where the cell is not one, nothing where it is missing."""
    if fmt.is_missing(value):
        return ""
    if isinstance(value, str):
        # The first number of "0.12 / 0.31 / 0.43", else the word itself.
        found = re.match(r"-?[\d,]+\.?\d*(e[-+]\d+)?(?= / |$)", text)
        return found[0].replace(",", "") if found else escape(value)
    return f"{float(value):.10g}"


def _groups(columns: list[Column]) -> list[tuple[str, int]]:
    """Shared headings and how many columns each covers; nothing where there are none."""
    runs: list[tuple[str, int]] = []
    for column in columns:
        if runs and runs[-1][0] == column.group:
            runs[-1] = (column.group, runs[-1][1] + 1)
        else:
            runs.append((column.group, 1))
    return runs if any(group for group, _ in runs) else []


def _figure(item: NumberedFigure, colours: set[str]) -> str:
    """The SVG with its text as text, its colours as variables, and a spot for each value."""
    svg = save(item.drawn, "svg", **{"svg.fonttype": "none"}).decode()
    found = list(spots(item.drawn.figure))
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Ids are unique in a file of matplotlib's, and this page holds many.
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{item.anchor}-", svg)
    width = item.drawn.figure.get_figwidth() * 72
    svg = re.sub(
        r'(<svg [^>]*?)width="[\d.]+pt"([^>]*?)height="[\d.]+pt"|'
        r'(<svg [^>]*?)height="[\d.]+pt"([^>]*?)width="[\d.]+pt"',
        lambda match: "".join(part for part in match.groups() if part),
        svg,
        count=1,
    )
    label = escape(item.drawn.caption, quote=True)
    svg = svg.replace(
        "<svg ", f'<svg role="img" aria-label="{label}" style="max-width:{1.5 * width:.0f}px" ', 1
    )

    def as_variable(match: re.Match[str]) -> str:
        tint = match[0].lower()
        colours.add(tint)
        return f"var(--c{tint[1:]},{tint})"

    svg = re.sub(r'style="[^"]*"', lambda match: _COLOUR.sub(as_variable, match[0]), svg)
    overlay = "".join(
        f'<rect class="spot" x="{spot.x:.1f}" y="{spot.y:.1f}" width="{spot.width:.1f}" '
        f'height="{spot.height:.1f}" data-tip="{escape(spot.text, quote=True)}"/>'
        for spot in found
    )
    return svg.replace("</svg>", f"{overlay}</svg>")


@cache
def on_dark(tint: str) -> str:
    """The colour on a dark page: ink and paper change places, dark data are lightened."""
    red, green, blue = to_rgb(tint)
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if tint in FURNITURE:
        # White becomes the page, black nearly white, and what lies between keeps its order.
        page, ink = to_rgb(DARK_PAGE), 0.93
        return to_hex([ink + (channel - ink) * lightness for channel in page])
    while contrast(to_hex((red, green, blue)), DARK_PAGE) < CONTRAST and lightness < 1:
        lightness += 0.02
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return to_hex((red, green, blue))


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2.1), from 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(tint: str) -> float:
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in to_rgb(tint)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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
