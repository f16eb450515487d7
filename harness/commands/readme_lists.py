"""Lists of everything that can be chosen, for pages: sweeps, tasks, models, backends, keys.

A page asks for one with a comment, and :mod:`harness.commands.readme_blocks` puts it there::

    <!-- list: models -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from harness.cases.case import Case
from harness.cases.format import ABSENT
from harness.cases.sweep import Sweep, load_sweep
from harness.paths import CONF, project_sweeps
from harness.render.table import NOTES, REASONS
from harness.request.choices import REGISTRIES
from harness.request.grid import expand
from harness.request.help import template
from kernels.registry import Entry, Registry
from models.accounting import num_parameters
from models.config import ModelConfig

CPU_SCALES = ("tiny", "gloo")


def markdown_list(name: str) -> str:
    """The Markdown table of a list. ValueError in one line if there is no such list."""
    if name not in LISTS:
        raise ValueError(f"{name}: no such list; there are {', '.join(LISTS)}")
    return LISTS[name]()


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    """A Markdown table whose last ``numbers`` columns are numbers."""
    sides = [":---"] * (len(headers) - numbers) + ["---:"] * numbers
    lines = [headers, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _models() -> str:
    """Models by size, with the parameters that the models' own count gives them."""
    rows = []
    for path in (CONF / "model").glob("*.yaml"):
        config = ModelConfig(**OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
        sizes = (config.num_layers, config.d_model, config.num_heads, config.kv_heads, config.d_ff)
        cells = [f"`{config.name}`", *(f"{size:,}" for size in (*sizes, config.vocab_size))]
        rows.append((num_parameters(config), [*cells, f"{num_parameters(config):,}"]))
    headers = ["`model=`", "layers", "width", "heads", "key heads", "feed-forward", "vocabulary"]
    return _table([*headers, "parameters"], [row for _, row in sorted(rows)], numbers=7)


def _sweeps() -> str:
    rows = []
    for name in project_sweeps():
        sweep = load_sweep(name)
        sizes = "; ".join(_size(sweep, scale) for scale in sweep.scales)
        rows.append([f"`{name}`", sweep.title, sizes])
    return _table(["`sweeps=`", "about", "`scale=`: cases, devices"], rows)


def _size(sweep: Sweep, scale: str) -> str:
    """``full``: 20 cases, 2 GPUs."""
    device = "cpu" if scale in CPU_SCALES else "cuda"
    cases = list(expand(sweep.scales[scale], {}, device).values())
    return f"`{scale}`: {len(cases)}, {_devices(cases)}"


def _devices(cases: Sequence[Case]) -> str:
    if not any(case.task.measures for case in cases):
        return "none"
    ranks = max(case.world_size for case in cases)
    if cases[0].device == "cpu":
        return "CPU" if ranks == 1 else f"{ranks} CPU ranks"
    return "1 GPU" if ranks == 1 else f"{ranks} GPUs"


def _registered(group: str) -> Callable[[], str]:
    """A list of a group's registered choices, with the first sentence of each docstring."""

    def make() -> str:
        own = [entry for entry in REGISTRIES[group] if _is_ours(REGISTRIES[group], entry)]
        rows = [[f"`{entry.name}`", _says(entry)] for entry in own]
        return _table([f"`{group}=`", ""], rows)

    return make


def _is_ours(registry: Registry[Any], entry: Entry[Any]) -> bool:
    return registry.plugin(entry.name) is None


def _says(entry: Entry[Any]) -> str:
    """The first sentence of a choice's docstring, and the options that its name presets."""
    preset = ", ".join(f"`{key}={value}`" for key, value in entry.preset.items())
    return _first_sentence(entry.target) + (f" Presets {preset}." if preset else "")


def _first_sentence(documented: Any) -> str:
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return _plain(re.split(r"(?<=\.)\s", paragraph)[0])


def _plain(text: str) -> str:
    """Docstring markup as Markdown, in one table cell."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def _files(group: str) -> Callable[[], str]:
    """A list of the files of a folder of ``conf``, with the comment that begins each."""

    def make() -> str:
        rows = [[f"`{path.stem}`", _comment(path)] for path in sorted((CONF / group).glob("*"))]
        return _table([f"`{group}=`", ""], rows)

    return make


def _comment(path: Path) -> str:
    """The comment at the top of a YAML file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    return _plain(" ".join(line.lstrip("# ") for line in comments))


def _hardware() -> str:
    kinds = ("bfloat16", "float16", "tf32", "float32")
    rows = []
    for path in sorted((CONF / "hardware").glob("*.yaml")):
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        peaks = [
            f"{values['peak_tflops'][kind]:g}" if kind in values["peak_tflops"] else ABSENT
            for kind in kinds
        ]
        sizes = (
            f"{values['memory_gib']:g}",
            f"{values['memory_bandwidth_gb_s']:,}",
            f"{values['multiprocessors']}",
        )
        rows.append([f"`{path.stem}`", ", ".join(values["match"]), *sizes, *peaks])
    headers = ["file", "the driver says", "memory (GiB)", "GB/s", "multiprocessors"]
    return _table([*headers, *(f"{kind} (TFLOP/s)" for kind in kinds)], rows, numbers=7)


def _options(group: str) -> Callable[[], str]:
    """The options of a group's registered choices, with their defaults; first those of all."""

    def make() -> str:
        own = [entry for entry in REGISTRIES[group] if _is_ours(REGISTRIES[group], entry)]
        found = {entry.name: _described_options(group, entry) for entry in own}
        common = [row for row in next(iter(found.values())) if _is_in_all(row, found.values())]
        rows = _named("every choice", common)
        for name, described in found.items():
            rows += _named(f"`{group}={name}`", [row for row in described if row not in common])
        return _table(["choice", "option", "default", ""], rows)

    return make


Described = tuple[str, str, str]
"""Key, default and docstring of an option, as cells."""


def _is_in_all(row: Described, choices: Iterable[list[Described]]) -> bool:
    return all(row[::2] in [other[::2] for other in described] for described in choices)


def _named(name: str, rows: list[Described]) -> list[list[str]]:
    """Rows of one choice, whose name stands in the first."""
    return [[name if number == 0 else "", *row] for number, row in enumerate(rows)]


def _described_options(group: str, entry: Entry[Any]) -> list[Described]:
    made = entry.target(name=entry.name, **entry.preset)
    documented = _field_docs(entry.target)
    rows = []
    for field in fields(entry.target):
        if field.name in documented and field.name not in entry.preset:
            default = getattr(made, field.name)
            shown = "" if default is None else f"`{default}`"
            rows.append((f"`{group}.{field.name}`", shown, _plain(documented[field.name])))
    return rows


def _field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a class and of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(inspect.cleandoc(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = _string(after)
                if text:
                    found[statement.target.id] = text
    return found


def _string(statement: ast.stmt) -> str:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return str(statement.value.value)
    return ""


def _keys() -> str:
    """The keys that say how to run, as ``--help`` explains them."""
    section = template().partition("How to run")[2].partition("\n\n")[0]
    rows: list[list[str]] = []
    for line in section.splitlines()[1:]:
        if named := re.match(r"  (\w+) +(.*)", line):
            rows.append([f"`{named[1]}=`", named[2]])
        else:
            rows[-1][1] += f" {line.strip()}"
    return _table(["key", ""], rows)


def _marks() -> str:
    """The marks of tables, and the reasons that some of them give."""
    rows = []
    for note in NOTES:
        mark, _, meaning = note.partition(" ")
        reasons = REASONS.get(note, ("", {}))[1].items()
        said = "; ".join(f"*{word}*: {_plain(text)}" for word, text in reasons)
        rows.append([mark, f"{meaning}: {said}." if said else meaning])
    return _table(["mark", "meaning"], rows)


LISTS: dict[str, Callable[[], str]] = {
    "sweeps": _sweeps,
    "tasks": _registered("task"),
    "models": _models,
    "attention": _registered("attention"),
    "caches": _registered("cache"),
    "strategies": _registered("parallel"),
    "profilers": _registered("profile"),
    "launchers": _registered("launcher"),
    "precisions": _files("precision"),
    "checkpointing": _files("checkpoint"),
    "hardware": _hardware,
    "task_options": _options("task"),
    "attention_options": _options("attention"),
    "strategy_options": _options("parallel"),
    "launcher_options": _options("launcher"),
    "run_keys": _keys,
    "marks": _marks,
}
"""Each list by its name."""
