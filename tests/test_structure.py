"""Rules of the design: arrows of imports, no work at import, no choice named by another file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from rooms import PACKAGES, house
from setuptools import find_namespace_packages

import attnbench
from harness.analysis.case_columns import CASE_COLUMNS
from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS
from harness.render.figure import FIGURES
from harness.render.table import TABLES
from harness.run.launcher import LAUNCHERS
from kernels import BACKENDS
from kernels.caches import CACHES
from kernels.registry import Registry
from parallel import STRATEGIES

MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "parallel": {"parallel", "kernels"},
    "harness": {"harness", "parallel", "kernels", "models"},
}

CHOSEN: tuple[Registry[Any], ...] = (BACKENDS, STRATEGIES, TASKS, CACHES, PROFILERS, LAUNCHERS)
"""The registries of what users choose on the command line."""

REGISTRIES: tuple[Registry[Any], ...] = (*CHOSEN, TABLES, FIGURES)

SAME_WORD = {
    *("none", "auto", "torch", "memory", "compiled"),
    *("context_parallel", "torch_compile"),
}
"""Choices whose names are also options, libraries or mesh axes."""

MAY_NAME = {
    "kernels/backends/auto.py": "its subject is the choice among the others",
    "kernels/decode/__init__.py": "exports a function of the same name",
    "parallel/context/schemes/context_parallel_torch.py": "PyTorch splits three of its kernels",
    "harness/commands/backends.py": "asks backends about one problem for each cache",
    "harness/forecast/extract.py": "reads what each of several tasks measured",
}
"""Files that name choices of others, and why."""


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: imports are absolute here"
            assert node.module is not None
            yield node.module


class TestArrows:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_point_one_way(self, package: str) -> None:
        """harness -> parallel -> kernels; models import neither harness nor parallel."""
        ours = {*PACKAGES, "benchmarks", "tests", "conf", "sweeps"}
        assert sources(package)
        for path in sources(package):
            used = {name.split(".")[0] for name in imports(path)} & ours
            assert used <= MAY_IMPORT[package], f"{relative(path)} imports {used}"

    def test_every_package_is_installed(self) -> None:
        """A folder with code or data that setup.py forgets is missing after installing."""
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
        (folders,) = (
            ast.literal_eval(node.value)
            for node in setup.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FOLDERS"
        )
        assert set(folders) == {*PACKAGES, "conf", "sweeps"}
        listed = set(find_namespace_packages(str(ROOT), include=[f"{name}*" for name in folders]))
        kinds = {
            path.removeprefix("*") for path in settings["tool"]["setuptools"]["package-data"]["*"]
        }
        for folder in folders:
            for path in (ROOT / folder).rglob("*"):
                if path.is_dir() or "__pycache__" in path.parts:
                    continue
                assert relative(path.parent).replace("/", ".") in listed, relative(path)
                assert path.suffix in {".py", *kinds}, relative(path)

    def test_the_public_module_knows_the_arrows(self) -> None:
        """What attnbench looks for before it imports from a package."""
        assert {name: set(needs) for name, needs in attnbench.NEEDS.items()} == MAY_IMPORT


class TestRooms:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_arrows_between_rooms_point_one_way(self, package: str) -> None:
        assert house(package).cycles() == []

    def test_floors(self) -> None:
        """Few enough to keep in mind."""
        built = house("harness")
        assert max(map(built.floor, built.sizes)) <= 8

    @pytest.mark.parametrize("package", PACKAGES)
    def test_private_modules_stay_in_their_room(self, package: str) -> None:
        assert house(package).strangers == []


class TestImports:
    def test_nothing_happens_at_import(self) -> None:
        """No process group, no device query, no file written by importing everything."""
        modules = [
            relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for package in PACKAGES
            for path in sources(package)
            if path.name != "__main__.py"
        ]
        code = (
            f"import importlib, os, sys\n"
            f"for name in {modules!r}: importlib.import_module(name)\n"
            "import torch, torch.distributed as dist\n"
            "print(torch.cuda.is_initialized(), dist.is_initialized())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == "False False\n"


def registered() -> list[tuple[Registry[Any], str]]:
    return [(registry, name) for registry in REGISTRIES for name in registry.names()]


def strings(path: Path) -> Iterator[str]:
    """String constants of a file, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def telling_strings(path: Path) -> Iterator[str]:
    """Strings that a file compares with, or holds in dicts, tuples, lists and sets."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            parts = list(ast.walk(node))
        elif isinstance(node, ast.Dict):
            parts = [*node.keys, *node.values]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            parts = list(node.elts)
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        for part in parts:
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value


def other_words() -> set[str]:
    """Groups, options, columns, phases and modes, which choices may be named like."""
    found = {registry.group for registry in CHOSEN} | set(CASE_COLUMNS)
    for registry in CHOSEN:
        for entry in registry:
            found |= {option.name for option in fields(entry.target)}
            found |= {column.name for column in getattr(entry.target, "columns", ())}
    for entry in TASKS:
        task = entry.target
        found |= {*task.phases, *task.compared_phases, *task.profiled_phases, *task.modes}
    return found


def owners() -> dict[str, set[str]]:
    """The files that may name each choice: where choices of this name are registered."""
    found: dict[str, set[str]] = {}
    for registry in REGISTRIES:
        for name, module in registry.modules().items():
            # Tables and figures go by plain words, such as cases, unless there are two of them.
            if registry in CHOSEN or "_" in name:
                found.setdefault(name, set()).add(module.replace(".", "/") + ".py")
    return found


class TestOneFileOneChoice:
    @pytest.mark.parametrize(
        ("registry", "name"),
        registered(),
        ids=[f"{registry.group}-{name}" for registry, name in registered()],
    )
    def test_found_where_it_is_registered(self, registry: Registry[Any], name: str) -> None:
        """Names are read from sources; what a file registers when it runs must be the same."""
        assert registry[name].target.__module__ == registry.modules()[name]

    def test_nobody_else_knows_its_name(self) -> None:
        """Else adding a choice, or renaming one, would mean editing a second file."""
        homes = owners()
        names = set(homes) - SAME_WORD - other_words()
        assert len(names) > 60
        naming = set()
        for package in PACKAGES:
            for path in sources(package):
                held = names & set(telling_strings(path))
                if known := {name for name in held if relative(path) not in homes[name]}:
                    naming.add(relative(path))
                    assert relative(path) in MAY_NAME, f"{relative(path)} knows {sorted(known)}"
        assert naming == set(MAY_NAME), "an exception that is none any more"


class TestText:
    def test_no_file_knows_where_it_was_written(self) -> None:
        """Sources hold no absolute path of somebody's machine."""
        pattern = re.compile(r"[\"' =(](/home/|/Users/|/work/|/root/)")
        for folder in (*PACKAGES, "conf", "sweeps", "tests", "benchmarks"):
            for path in (ROOT / folder).rglob("*"):
                if path.suffix in (".py", ".yaml", ".j2", ".md") and path != Path(__file__):
                    assert not pattern.search(path.read_text(encoding="utf-8")), relative(path)

    @pytest.mark.parametrize("package", PACKAGES)
    def test_every_module_says_what_lives_there(self, package: str) -> None:
        for path in sources(package):
            text = path.read_text(encoding="utf-8")
            if text.strip() and path.name != "__main__.py":
                assert ast.get_docstring(ast.parse(text)), relative(path)
