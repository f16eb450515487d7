"""Hashes of the files that a module runs: its own, and those of this project that it imports.

A file counts by what runs of it (:mod:`harness.source.text`), so that an edit of a comment or a
docstring changes no hash, and an edit that :mod:`harness.source.unchanged` lists does not either.
Hashes depend on the text alone: not on the machine, not on Python's version, not on whether the
tree has a history.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from harness.paths import ROOT
from harness.source import unchanged
from harness.source.text import that_runs

BESIDE = (
    *("kernels/registry.py", "kernels/accounting.py", "models/accounting.py", "models/memory.py"),
    "kernels/reference.py",
    *("harness/bench/devices.py", "harness/bench/environment.py", "harness/bench/host_load.py"),
    "harness/measure/check.py",
)
"""Files that compute nothing that is timed: names, formulas, how results are checked, the truth
that they are held to, and notes on the circumstances."""

_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+)?import[ \t]+(.+)$", re.MULTILINE)
_DATA = re.compile(r"[\w-]+\.(?:json|cpp|cu|cuh|h)\b")
_DIGITS = 12


def files_of(modules: Iterable[str], folders: tuple[str, ...]) -> frozenset[str]:
    """The files that modules run, relative to the checkout, by imports at any depth.

    Args:
        folders: folders of the project to follow imports into, such as ``kernels``. A module from
            outside the project is followed into its own package as well.
    """
    found: frozenset[str] = frozenset()
    for module in modules:
        found |= _files_of(module, folders)
    return found


def hashes(files: frozenset[str], options: frozenset[str] = frozenset()) -> dict[str, str]:
    """A hash for each folder over those of its files that are among ``files``.

    Args:
        options: those of :func:`harness.source.unchanged.options_of` a case.
    """
    return dict(_hashes(files, options))


@cache
def _hashes(files: frozenset[str], options: frozenset[str]) -> dict[str, str]:
    digests: dict[str, hashlib._Hash] = {}
    for name in sorted(files):
        code = unchanged.counts_as(name, _code(name), options)
        if code == unchanged.ABSENT:
            continue
        folder, _, file = name.rpartition("/")
        digest = digests.setdefault(folder, hashlib.sha256())
        digest.update(f"{file}\0{code}\0".encode())
    return {folder: digest.hexdigest()[:_DIGITS] for folder, digest in digests.items()}


@cache
def _files_of(module: str, folders: tuple[str, ...]) -> frozenset[str]:
    own = (*folders, module.partition(".")[0]) if _is_outside(module) else folders
    allowed = tuple(f"{folder.replace('/', '.')}." for folder in own)
    found: set[str] = set()
    seen = {module}
    left = [module]
    while left:
        name = left.pop()
        path = _file(name)
        if path is None or _name(path) in BESIDE:
            continue
        found.add(_name(path))
        found.update(_data_files(path))
        for other in _imports(name):
            if other not in seen and f"{other}.".startswith(allowed):
                seen.add(other)
                left.append(other)
    return frozenset(found)


@cache
def _is_outside(module: str) -> bool:
    top = module.partition(".")[0]
    return not (ROOT / top).is_dir() and not (ROOT / f"{top}.py").exists()


@cache
def _file(module: str) -> Path | None:
    """The file of a module, found without importing the module itself."""
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    if not _is_outside(module):
        return None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    origin = Path(spec.origin) if spec and spec.origin else None
    return origin if origin is not None and origin.is_file() else None


def _name(path: Path) -> str:
    """A file's name in a record; of a file outside the project its folder and name alone."""
    if path.is_relative_to(ROOT):
        name = path.relative_to(ROOT).as_posix()
    else:
        name = f"outside/{path.parent.name}/{path.name}"
    _PATHS[name] = path
    return name


_PATHS: dict[str, Path] = {}
"""The file of each name that a hash was asked for."""


@cache
def _text(path: Path) -> str:
    return that_runs(path.read_text(encoding="utf-8", errors="replace"), path.suffix)


@cache
def _code(name: str) -> str:
    return unchanged.hash_of(_text(_PATHS[name]))


@cache
def _data_files(path: Path) -> tuple[str, ...]:
    """Tables and sources in other languages that a Python file names and that lie beside it."""
    beside = (path.parent / name for name in sorted(set(_DATA.findall(_text(path)))))
    return tuple(_name(file) for file in beside if path.suffix == ".py" and file.is_file())


@cache
def _imports(module: str) -> tuple[str, ...]:
    """The modules that a module's file imports, also inside functions; not all of them exist."""
    path = _file(module)
    assert path is not None
    is_package = path.name == "__init__.py"
    found: dict[str, None] = {}
    for match in _IMPORT.finditer(_text(path)):
        base, names = match.groups()
        listed = [
            name.split()[0] for name in names.strip("( )").split(",") if name.strip("( )").strip()
        ]
        if base is None:
            found |= dict.fromkeys(listed)
            continue
        base = _absolute(base, module, is_package=is_package)
        if _is_outside(base) and base.partition(".")[0] != module.partition(".")[0]:
            # Looking for a library's module may import the library.
            continue
        children = [f"{base}.{name}" for name in listed]
        found |= dict.fromkeys(child for child in children if _file(child) is not None)
        if any(_file(child) is None for child in children):
            found[base] = None
    return tuple(found)


def _absolute(base: str, module: str, *, is_package: bool) -> str:
    """The name that ``from ..base import`` stands for in a module."""
    name = base.lstrip(".")
    level = len(base) - len(name)
    if not level:
        return name
    parts = module.split(".")
    parts = parts[: len(parts) - level + is_package]
    return ".".join([*parts, *([name] if name else [])])
