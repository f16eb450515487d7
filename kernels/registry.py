"""Registries of named choices, filled by decorators that are read without importing their files.

Everything a user can choose by name (an attention backend, a task, a strategy, a launcher, a
table, a figure) is registered by a decorator in the file that implements it. The command line,
its help, its error messages and the tests' parametrisation read the table.

The names of all choices are read from the decorators in the source files, without importing
them; a file is imported when its choice is used. So a choice may import whatever it needs, and
costs a command that does not use it nothing.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

JOINED_LATER = "joined_later"
"""Metadata of an option that was added to a choice when records of it existed already."""


def joined_later(default: Any) -> Any:
    """A dataclass field that leaves the ids of older cases alone while it stands at its default."""
    return field(default=default, metadata={JOINED_LATER: True})


PLUGINS_VARIABLE = "ATTNBENCH_PLUGINS"
"""Modules outside this project that register choices too, separated by commas."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Look:
    """How tables and figures show a choice. What is left out follows from the choice's name."""

    colour: str = ""
    """``#RRGGBB``, the same in every figure."""
    marker: str = ""
    """A marker of matplotlib, the same in every figure."""
    place: int | None = None
    """Place in tables and legends; choices without one follow by name."""
    baseline: str = ""
    """Its name as a baseline of comparisons; empty if others are not compared with it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Entry(Generic[T]):
    """One registered choice: its name, what implements it, and the options it presets."""

    name: str
    target: T
    preset: dict[str, Any]
    look: Look | None = None


class Registry(Generic[T]):
    """Named choices of one kind, in the order of their names.

    Args:
        group: the key a user types to choose (``attention``), used in error messages.
        decorator: the name under which choices call :meth:`register`, as it stands in their files.
        packages: packages whose modules hold choices, at any depth.
    """

    def __init__(self, group: str, *, decorator: str, packages: tuple[str, ...]) -> None:
        self.group = group
        self.decorator = decorator
        self.packages = packages
        self._entries: dict[str, Entry[T]] = {}
        self._modules: dict[str, str] | None = None
        self._keywords: dict[str, dict[str, Any]] = {}

    def register(self, name: str, *, look: Look | None = None, **preset: Any) -> Callable[[T], T]:
        """Decorator: make the decorated object the choice ``name``, with ``preset`` options."""

        def decorate(target: T) -> T:
            home = (self._modules or {}).get(name)
            if name in self._entries or home not in (None, target.__module__):
                raise ValueError(f"{self.group}={name} is registered twice")
            self._entries[name] = Entry(name=name, target=target, preset=preset, look=look)
            return target

        return decorate

    def extend(self, package: str) -> None:
        """Look for choices in a further package: one that builds on the registry's own."""
        self.packages += (package,)
        self._modules = None

    def modules(self) -> dict[str, str]:
        """The module that registers each choice, by the choice's name. Imports only plugins."""
        if self._modules is None:
            self._modules, self._keywords = {}, {}
            for package in self.packages:
                for name, module, keywords in _decorated(package, self.decorator):
                    if name in self._modules:
                        raise ValueError(f"{self.group}={name} is registered twice")
                    self._modules[name] = module
                    self._keywords[name] = keywords
            # A plugin may register in ways that no source shows, so it is imported.
            for plugin in filter(None, os.environ.get(PLUGINS_VARIABLE, "").split(",")):
                importlib.import_module(plugin)
        return self._modules

    def names(self) -> list[str]:
        """The names of all choices, sorted."""
        return sorted({*self.modules(), *self._entries})

    def given(self, keyword: str) -> dict[str, Any]:
        """The value of a decorator's keyword, by choice, where one is given. Imports nothing."""
        names = self.names()
        entries = {
            name: {"look": entry.look, **entry.preset} for name, entry in self._entries.items()
        }
        found = {name: entries.get(name) or self._keywords.get(name, {}) for name in names}
        return {
            name: keywords[keyword]
            for name, keywords in found.items()
            if keywords.get(keyword) is not None
        }

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter([self[name] for name in self.names()])

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries and (module := self.modules().get(name)):
            # Where imports are lazy, listing what a module has is what loads it.
            dir(importlib.import_module(module))
        if name not in self._entries:
            choices = ", ".join(self.names())
            raise ValueError(f"{self.group}={name}: no such choice; one of {choices}")
        return self._entries[name]


def _decorated(package: str, decorator: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, module and literal keywords of every ``@decorator("name", ...)`` in a package."""
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package}: no such package")
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            # Parsing takes far longer than reading, and most files register nothing.
            if f"@{decorator}(" not in text:
                continue
            module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            for node in ast.parse(text).body:
                for call in getattr(node, "decorator_list", ()):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == decorator:
                        yield ast.literal_eval(call.args[0]), module, _literals(call)


def _literals(call: ast.Call) -> dict[str, Any]:
    """Keyword arguments whose values the source shows."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        value = keyword.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == Look.__name__:
            found[str(keyword.arg)] = Look(**_literals(value))
        else:
            with contextlib.suppress(ValueError):
                found[str(keyword.arg)] = ast.literal_eval(value)
    return found
