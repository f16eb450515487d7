"""Named sweeps: one YAML file per table or figure of a write-up.

A sweep file states its question, the tables and figures that answer it, and for each ``scale``
a list of grids. A grid maps keys of the command line to one value or a list of values, and
stands for every combination of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from harness.did_you_mean import did_you_mean
from harness.paths import config_files

_KEYS = {"title", "about", "tables", "figures", "isolate", "scales"}
_KEYS |= {"interleave", "until", "budget_s", "theme", "paper"}

THEMES = {
    "kernels": "Kernels",
    "long_sequences": "Long sequences",
    "many_devices": "Many devices",
    "memory": "Memory",
    "inference": "Inference",
    "training": "Training on one device",
}
"""What a sweep is about, in the order of the write-up, and the heading there."""

OTHER_THEME = "Other measurements"
"""Heading of sweeps that name no theme."""

UNTIL = ("rounds", "decided")
"""What ends the measuring: the number of rounds, or verdicts on all compared cases."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PaperQuestion:
    """One question that a sweep answers in the paper: a figure, a table and a verdict."""

    question: str
    place: int = 100
    """Among the questions of its theme; the first is in the short answer, too."""
    theme: str = ""
    """One of :data:`THEMES`, where it is not the sweep's."""
    table: str = ""
    figure: str = ""
    """One table and one figure of the sweep's; the sweep's first of each where it names none."""
    figure_where: str = ""
    """Rows of the frame that the figure is drawn from, as ``where`` for the table."""
    where: str = ""
    columns: str = ""
    down: str = ""
    across: str = ""
    cell: str = ""
    """What the table shows, as :class:`harness.render.selection.Selection` says."""


@dataclass(kw_only=True, slots=True)
class Sweep:
    """The contents of a sweep file."""

    name: str
    title: str
    about: str = ""
    tables: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    interleave: int = 1
    """Rounds that each case's measured passes are split into, unless the user says otherwise."""
    until: str = "rounds"
    """One of :data:`UNTIL`."""
    budget_s: float | None = None
    """Seconds for rounds that are added until verdicts are reached."""
    isolate: bool = False
    """Whether every case runs in its own process."""
    theme: str = ""
    """One of :data:`THEMES`: where the write-up shows it."""
    paper: list[PaperQuestion] = field(default_factory=list)
    """What the paper asks of it; without any, it is in the appendix alone."""
    scales: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def ad_hoc_sweep(tables: list[str], figures: list[str]) -> Sweep:
    """The sweep of a command without ``sweeps=``: one grid, given by the command's keys."""
    return Sweep(
        name="run",
        title="Measurements",
        about="Cases chosen on the command line.",
        tables=tables,
        figures=figures,
        scales={"full": [{}]},
    )


def load_sweep(name: str) -> Sweep:
    """Read a sweep by name or by path. ValueError in one line if it is not one."""
    known = config_files("sweeps")
    path = Path(name) if name.endswith((".yaml", ".yml")) else known.get(name)
    if path is None or not path.is_file():
        raise ValueError(
            f"sweeps={name}: no such sweep{did_you_mean(name, known)}; there are "
            f"{', '.join(known)}; or give the path of a YAML file"
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: not valid YAML: {problem}") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    if not isinstance(values, dict) or not isinstance(values.get("scales"), dict):
        raise ValueError(f"{path}: needs a mapping 'scales' with a list of grids for each scale")
    unknown = sorted(map(str, set(values) - _KEYS))
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]}; known are {', '.join(sorted(_KEYS))}")
    _require_types(path, values)
    values.setdefault("title", path.stem)
    values["paper"] = [_question(path, entry, values) for entry in values.get("paper", [])]
    return Sweep(name=path.stem, **values)


def _require_types(path: Path, values: dict[str, Any]) -> None:
    """Raise ValueError unless every key of a sweep file has its type."""
    for key in ("title", "about"):
        if not isinstance(values.get(key, ""), str):
            raise ValueError(f"{path}: {key} must be text")
    for key in ("tables", "figures"):
        names = values.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{path}: {key} must be a list of names")
    for scale, grids in values["scales"].items():
        if not isinstance(grids, list) or not all(map(_is_grid, grids)):
            raise ValueError(
                f"{path}: scales.{scale} must be a list of mappings from key to values"
            )
    if values.get("theme", "") not in ("", *THEMES):
        raise ValueError(f"{path}: theme: {values['theme']}: one of {', '.join(THEMES)}")
    if not isinstance(values.get("paper", []), list):
        raise ValueError(f"{path}: paper must be a list of questions")
    if values.get("until", UNTIL[0]) not in UNTIL:
        raise ValueError(f"{path}: until: {values['until']}: one of {', '.join(UNTIL)}")
    rounds = values.get("interleave", 1)
    if not _is_number(rounds, int) or rounds < 1:
        raise ValueError(f"{path}: interleave: {rounds}: must be a number of rounds, at least 1")
    budget_s = values.get("budget_s")
    if budget_s is not None and not (_is_number(budget_s, int | float) and budget_s >= 0):
        raise ValueError(f"{path}: budget_s: {budget_s}: must be a number of seconds, at least 0")
    if not isinstance(values.get("isolate", False), bool):
        raise ValueError(f"{path}: isolate: {values['isolate']}: must be true or false")


def _question(path: Path, entry: object, values: dict[str, Any]) -> PaperQuestion:
    """One entry of ``paper``; ValueError where it names what there is not."""
    kinds = get_type_hints(PaperQuestion)
    if not isinstance(entry, dict) or "question" not in entry:
        raise ValueError(f"{path}: paper: every entry is a mapping with a question")
    for key, value in entry.items():
        if key not in kinds:
            raise ValueError(f"{path}: paper.{key}: one of {', '.join(kinds)}")
        if not isinstance(value, kinds[key]):
            raise ValueError(f"{path}: paper.{key}: {value}: must be {kinds[key].__name__}")
    tables, figures = values.get("tables", []), values.get("figures", [])
    for key, names in {"theme": [*THEMES], "table": tables, "figure": figures}.items():
        if entry.get(key) and entry[key] not in names:
            raise ValueError(f"{path}: paper.{key}: {entry[key]}: one of {', '.join(names)}")
    return PaperQuestion(**entry)


def _is_number(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_grid(grid: object) -> bool:
    """Whether a grid maps keys to one simple value or a list of them."""
    return isinstance(grid, dict) and all(
        isinstance(key, str)
        and all(
            item is None or isinstance(item, str | int | float)
            for item in (value if isinstance(value, list) else [value])
        )
        for key, value in grid.items()
    )
