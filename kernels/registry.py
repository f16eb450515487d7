"""Registries of named choices, filled by decorators that are read without importing their files.

Everything a user can choose by name (an attention backend, a task, a strategy, a launcher, a
table, a figure) is registered by a decorator in the file that implements it. The command line,
its help, its error messages and the tests' parametrisation read the table.

The names of all choices are read from the decorators in the source files, without importing
them; a file is imported when its choice is used. So a choice may import whatever it needs, and
costs a command that does not use it nothing. A file or a plugin that is broken costs such a command
one line on standard error.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
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


class RegistryError(ValueError):
    """A choice that cannot be had; the message is one line that names it or its file."""


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
        self._has_plugins = False
        self._keywords: dict[str, dict[str, Any]] = {}

    def register(self, name: str, *, look: Look | None = None, **preset: Any) -> Callable[[T], T]:
        """Decorator: make the decorated object the choice ``name``, with ``preset`` options."""

        def decorate(target: T) -> T:
            ours = target.__module__.startswith(tuple(f"{package}." for package in self.packages))
            known = (self._modules or {}) if ours else self._read_sources()
            home = known.get(name, target.__module__)
            if name in self._entries or home != target.__module__:
                other = self._entries[name].target.__module__ if name in self._entries else home
                raise RegistryError(
                    f"{self.group}={name} is registered twice: {other}, {target.__module__}"
                )
            self._entries[name] = Entry(name=name, target=target, preset=preset, look=look)
            return target

        return decorate

    def extend(self, package: str) -> None:
        """Look for choices in a further package: one that builds on the registry's own."""
        self.packages += (package,)
        self._modules = None
        self._has_plugins = False

    def modules(self) -> dict[str, str]:
        """The module that registers each choice, by the choice's name. Imports only plugins."""
        found = self._read_sources()
        if not self._has_plugins:
            self._has_plugins = True
            # A plugin may register in ways that no source shows, so it is imported.
            for plugin in named_plugins():
                _import_plugin(plugin)
        return found

    def _read_sources(self) -> dict[str, str]:
        """The modules of the choices in the registry's packages, by name. Imports nothing."""
        if self._modules is None:
            modules: dict[str, str] = {}
            for package in self.packages:
                for name, module, keywords in _decorated(package, self.decorator):
                    if name in modules:
                        raise RegistryError(
                            f"{self.group}={name} is registered twice: {modules[name]}, {module}"
                        )
                    modules[name] = module
                    self._keywords[name] = keywords
            self._modules = modules
        return self._modules

    def names(self) -> list[str]:
        """The names of all choices, sorted."""
        return sorted({*self.modules(), *self._entries})

    def home(self, name: str) -> str | None:
        """The module that registers a choice; None if there is no such choice."""
        modules = self.modules()
        # Its plugins have registered theirs by now.
        if name in self._entries:
            return str(self._entries[name].target.__module__)
        return modules.get(name)

    def plugin(self, name: str) -> tuple[str, str] | None:
        """Module and file of a choice from outside the registry's packages; None for its own."""
        module = self.home(name)
        if module is None or module.startswith(tuple(f"{package}." for package in self.packages)):
            return None
        return module, getattr(sys.modules.get(module), "__file__", None) or ""

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
        for name in self.names():
            try:
                entry = self[name]
            except RegistryError as error:
                _complain(str(error))
            else:
                yield entry

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries and (module := self.modules().get(name)):
            try:
                # Where imports are lazy, listing what a module has is what loads it.
                dir(importlib.import_module(module))
            except Exception as error:
                self._entries.pop(name, None)
                raise RegistryError(
                    f"{self.group}={name}: {module} cannot be imported ({_in_a_line(error)})"
                ) from error
        if name not in self._entries:
            choices = ", ".join(self.names())
            close = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"{self.group}={name}: no such choice, one of {choices}{hint}")
        return self._entries[name]


def named_plugins() -> list[str]:
    """The modules that ATTNBENCH_PLUGINS names."""
    names = os.environ.get(PLUGINS_VARIABLE, "").split(",")
    return [name.strip() for name in names if name.strip()]


def loaded_plugins() -> dict[str, str]:
    """The file of every plugin that can be imported, by the plugin's name."""
    for name in named_plugins():
        _import_plugin(name)
    loaded = {name: sys.modules.get(name) for name in named_plugins()}
    return {
        name: getattr(module, "__file__", None) or "" for name, module in loaded.items() if module
    }


@cache
def _import_plugin(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        _complain(f"{PLUGINS_VARIABLE}: {name} cannot be imported ({_in_a_line(error)})")


@cache
def _complain(line: str) -> None:
    """Say once what is broken, and go on without it."""
    print(f"attnbench: {line}", file=sys.stderr)


def _in_a_line(error: Exception) -> str:
    if isinstance(error, RegistryError):
        return str(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _decorated(package: str, decorator: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, module and literal keywords of every ``@decorator("name", ...)`` in a package."""
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package}: no such package")
    # Parsing takes far longer than reading, and most files register nothing.
    may_register = re.compile(rf"@[\w.]*\b{decorator}\(|\b{decorator} as ")
    for folder in map(Path, spec.submodule_search_locations or ()):
        for path in sorted(folder.rglob("*.py")):
            if not path.stem.isidentifier():
                continue  # An editor's copy.
            try:
                text = path.read_text(encoding="utf-8")
                calls = _calls(text, decorator) if may_register.search(text) else []
                found = [(_name(call), _literals(call)) for call in calls]
            except (OSError, SyntaxError, TypeError, ValueError) as error:
                _complain(f"{path}: left out ({_in_a_line(error)})")
                continue
            module = ".".join((package, *path.relative_to(folder).with_suffix("").parts))
            for name, keywords in found:
                yield name, module, keywords


def _calls(text: str, decorator: str) -> list[ast.Call]:
    """The decorator's calls in a source, also under the name of an alias or in a module."""
    tree = ast.parse(text)
    names = {decorator}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            names |= {
                alias.asname for alias in node.names if alias.name == decorator and alias.asname
            }
    return [
        call
        for node in tree.body
        for call in getattr(node, "decorator_list", ())
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in names
    ]


def _name(call: ast.Call) -> str:
    """The choice's name, the first argument."""
    values = [*call.args[:1], *(item.value for item in call.keywords if item.arg == "name")]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    raise ValueError(f"line {call.lineno}: the name in {ast.unparse(call)} must be a literal")


def _literals(call: ast.Call) -> dict[str, Any]:
    """Keyword arguments whose values the source shows."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        value = keyword.value
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(Look.__name__):
            found[str(keyword.arg)] = Look(**_literals(value))
        else:
            with contextlib.suppress(ValueError):
                found[str(keyword.arg)] = ast.literal_eval(value)
    return found
