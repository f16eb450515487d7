"""A table of named choices, filled by a decorator.

Everything a user can choose by name (an attention backend, a task, a strategy, a
launcher, a table, a figure) is registered here by the file that implements it; the
command line, its help, its error messages and the tests' parametrisation read the table.

Registered files are imported to build the command line, where a second spent on importing
torch would be felt at every ``--help``. So they import torch inside the functions that
compute, and keep code that needs it at module level in a file whose name starts with an
underscore, which :meth:`Registry.discover` leaves alone. A test holds them to it.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
class Entry(Generic[T]):
    """One registered choice: its name, what implements it, and the options it presets."""

    name: str
    target: T
    preset: dict[str, Any]


class Registry(Generic[T]):
    """Named choices of one kind, in the order of their names.

    Args:
        group: the key a user types to choose (``attention``), used in error messages.
        packages: packages whose public modules register choices when imported.
    """

    def __init__(self, group: str, packages: tuple[str, ...]) -> None:
        self.group = group
        self.packages = packages
        self._entries: dict[str, Entry[T]] = {}
        self._discovered = False

    def register(self, name: str, **preset: Any) -> Callable[[T], T]:
        """Decorator: make the decorated object the choice ``name``, with ``preset`` options."""

        def decorate(target: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.group}={name} is registered twice")
            self._entries[name] = Entry(name=name, target=target, preset=preset)
            return target

        return decorate

    def extend(self, package: str) -> None:
        """Look for choices in a further package: one that builds on the registry's own."""
        self.packages += (package,)
        self._discovered = False

    def discover(self) -> None:
        """Import every public module of the packages, and of the user's plugins, once."""
        if self._discovered:
            return
        self._discovered = True
        plugins = [name for name in os.environ.get(PLUGINS_VARIABLE, "").split(",") if name]
        for plugin in plugins:
            importlib.import_module(plugin)
        for package_name in self.packages:
            package = importlib.import_module(package_name)
            for module in pkgutil.iter_modules(package.__path__):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{package_name}.{module.name}")

    def names(self) -> list[str]:
        self.discover()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter([self._entries[name] for name in self.names()])

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> Entry[T]:
        self.discover()
        if name not in self._entries:
            choices = ", ".join(self.names())
            raise ValueError(f"{self.group}={name}: no such choice; one of {choices}")
        return self._entries[name]
