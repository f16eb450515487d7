"""The README shows what is committed, and every command, choice and link in it exists."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable

import pandas as pd
import pytest

from harness.analysis.loading import load_frames
from harness.commands.writeup import ROWS_IN_MARKDOWN
from harness.paths import ROOT
from harness.render.files import to_markdown
from harness.render.table import Table, build_table
from harness.request.choices import choices
from harness.request.compose import compose_request
from harness.request.config import GROUPS

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results/h200"


@functools.cache
def table_of(sweep: str, name: str) -> Table | None:
    """A table as ``attnbench-report`` makes it from the committed records."""
    return build_table(name, frame_of(sweep))


@functools.cache
def frame_of(sweep: str) -> pd.DataFrame:
    return frames()(sweep)


@functools.cache
def frames() -> Callable[[str | None], pd.DataFrame]:
    """As ``harness.load`` makes them, of records that are read once for all sweeps."""
    return load_frames(RESULTS)


# Commands, choices and links


COMMANDS = [
    line.split("#")[0].split()[1:]
    for line in README.splitlines()
    if line.startswith(".venv/bin/attnbench ")
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_compose(arguments: list[str]) -> None:
    assert compose_request([*arguments, "device=cpu"]).cases


def test_programs_targets_and_modules_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(re.findall(r"\b(attnbench(?:-\w+)?)\b(?=[ `])", README)) <= set(scripts)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`|: )make ([a-z-]+)", README, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert importlib.util.find_spec(module), module


def test_every_choice_named_in_the_table_exists() -> None:
    known = {name for group in GROUPS for name in choices(group)}
    options = tuple(f"{group}." for group in GROUPS)
    for group in GROUPS:
        for line in README.splitlines():
            if line.startswith(f"| `{group}` |"):
                names = set(re.findall(r"`([\w.]+)=?`", line)) - {group}
                assert not {x for x in names - known if not x.startswith(options)}
                assert names & set(choices(group))


def test_every_sweep_is_named() -> None:
    names = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert names <= set(re.findall(r"`(\w+)`", README))


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "docs"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for file in sorted(path.glob("*.md")) if path.suffix == "" else [path]:
        targets = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")))
        inside = {target for target in targets if not target.startswith("http")}
        assert not {target for target in inside if not (file.parent / target).exists()}, file


def test_the_committed_write_up_shows_the_committed_tables() -> None:
    """Longer tables are cut in Markdown; the others stand there row by row."""
    lines = set((RESULTS / "writeup/writeup.md").read_text(encoding="utf-8").splitlines())
    compared = 0
    for plan in sorted(RESULTS.glob("sweeps/*/plan.json")):
        for name in json.loads(plan.read_text(encoding="utf-8"))["tables"]:
            table = table_of(plan.parent.name, name)
            text = to_markdown(table) if table is not None else ""
            rows = [line for line in text.splitlines() if line.startswith("|")][2:]
            if len(rows) <= ROWS_IN_MARKDOWN:
                missing = [row for row in rows if row not in lines]
                assert not missing, f"{plan.parent.name}: attnbench-writeup results/h200"
                compared += len(rows)
    assert compared > 500
