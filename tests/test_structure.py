"""What keeps the design true: the arrows of imports, what importing does, who names whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from setuptools import find_namespace_packages

from harness.cases.task import TASKS
from harness.render.figure import FIGURES
from harness.render.table import TABLES
from harness.run.launcher import LAUNCHERS
from kernels import BACKENDS
from kernels.registry import Registry
from parallel import STRATEGIES

PACKAGES = ("harness", "kernels", "models", "parallel")

MAY_IMPORT = {
    "kernels": {"kernels"},
    "models": {"models", "kernels"},
    "parallel": {"parallel", "kernels"},
    "harness": {"harness", "parallel", "kernels", "models"},
}

REGISTRIES: tuple[Registry[Any], ...] = (BACKENDS, STRATEGIES, TASKS, LAUNCHERS, TABLES, FIGURES)


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
        """A folder with code or data that pyproject.toml forgets is missing after installing."""
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        wanted = settings["tool"]["setuptools"]["packages"]["find"]["include"]
        listed = set(find_namespace_packages(str(ROOT), include=wanted))
        kinds = {
            path.removeprefix("*") for path in settings["tool"]["setuptools"]["package-data"]["*"]
        }
        for folder in (*PACKAGES, "conf", "sweeps"):
            for path in (ROOT / folder).rglob("*"):
                if path.is_dir() or "__pycache__" in path.parts:
                    continue
                assert relative(path.parent).replace("/", ".") in listed, relative(path)
                assert path.suffix in {".py", *kinds}, relative(path)


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


def compared_names(path: Path) -> Iterator[str]:
    """Strings that a file compares with: what a dispatch by name would look like."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


class TestOneFileOneChoice:
    @pytest.mark.parametrize(
        ("registry", "name"),
        registered(),
        ids=[f"{registry.group}-{name}" for registry, name in registered()],
    )
    def test_found_where_it_is_registered(self, registry: Registry[Any], name: str) -> None:
        """Names are read from sources; what a file registers when it runs must be the same."""
        assert registry[name].target.__module__ == registry.modules()[name]

    @pytest.mark.parametrize("registry", [BACKENDS, STRATEGIES], ids=["attention", "parallel"])
    def test_nobody_else_decides_by_its_name(self, registry: Registry[Any]) -> None:
        """Else adding a choice, or renaming one, would mean editing a second file."""
        # none and auto are choices of other keys too; naive is the baseline of every speed-up.
        names = set(registry.names()) - {"none", "auto", "naive"}
        homes = {name.replace(".", "/") + ".py" for name in registry.modules().values()}
        for package in PACKAGES:
            for path in sources(package):
                if relative(path) not in homes:
                    found = names & set(compared_names(path))
                    assert not found, f"{relative(path)} decides by {sorted(found)}"


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
