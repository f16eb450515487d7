"""Columns of the frame: how they are read from records and how tables show them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.cases import format as fmt
from harness.store.record import Record
from kernels.registry import Look, Registry

if TYPE_CHECKING:
    # Every command reads the tasks, and few make tables.
    import pandas as pd


@dataclass(kw_only=True, slots=True, frozen=True)
class Point:
    """A column that names the measured point, which tables state or show in the same way."""

    header: str
    describe: Callable[[Any], str] = str
    """The value as a caption writes it; empty for the usual one."""
    format: fmt.Format = fmt.text
    choices: Registry[Any] | None = None
    """The registered choices that are its values; they declare their order and looks."""
    looks: Mapping[str, Look] = field(default_factory=dict)
    """Values that no registry knows, in the order of tables and before registered ones."""
    optional: bool = False
    """Unknown for cases that never started, which does not make it vary."""
    after: str = "profile"
    """The column behind which it stands."""

    def varies(self, values: pd.Series) -> bool:
        return values.nunique(dropna=self.optional) > 1

    def all_looks(self) -> dict[str, Look]:
        """The look of each value that declares one."""
        return {**self.looks, **(self.choices.given("look") if self.choices else {})}

    @property
    def baseline(self) -> str | None:
        """The value that others are compared with, if one is."""
        return next((name for name, look in self.all_looks().items() if look.baseline), None)

    @property
    def rank(self) -> Callable[[Any], Any]:
        """Sort key: the values' own order, unless they have looks.

        Then those with a place come first, each with its variants behind it, and others by name.
        """
        if not self.looks and self.choices is None:
            return _itself
        places = {name: (0, place) for place, name in enumerate(self.looks)}
        for name, look in (self.choices.given("look") if self.choices else {}).items():
            if look.place is not None:
                places[name] = (1, look.place)

        def rank(value: Any) -> tuple[tuple[int, int], list[tuple[float, str]]]:
            name = "" if fmt.is_missing(value) else str(value)
            return places.get(name.split("(")[0], (2, 0)), _natural(name)

        return rank


def in_order(*names: str) -> dict[str, Look]:
    """Looks that give values a place alone."""
    return {name: Look() for name in names}


@dataclass(kw_only=True, slots=True, frozen=True)
class CaseColumn:
    """A column of the frame: how it is read from a record, and how it is shown."""

    name: str
    read: Callable[[Record], Any]
    point: Point | None = None
    """How it names the measured point, if it does."""
    header: str = ""
    """Its header in the table of all cases, with the unit, if that shows it."""
    format: fmt.Format = fmt.number


def option(name: str, otherwise: Any = None) -> Callable[[Record], Any]:
    """Reads an option of the task."""
    return lambda record: record.case["task"].get(name, otherwise)


def note(name: str, otherwise: Any = None) -> Callable[[Record], Any]:
    """Reads a note that was left beside the measurement."""
    return lambda record: record.notes.get(name, otherwise)


def _natural(name: str) -> list[tuple[float, str]]:
    """A sort key by which numbers in names come in their own order: 25 before 100."""
    parts = re.split(r"(\d+(?:\.\d+)?)", name)
    return [(float(part), "") if place % 2 else (-1.0, part) for place, part in enumerate(parts)]


def _itself(value: Any) -> Any:
    return value


class Points(Mapping[str, Point]):
    """Columns that name the measured point, in the order of tables, captions and CSV files."""

    def __init__(self, points: Mapping[str, Point]) -> None:
        self._points = dict(points)

    def declare(self, name: str, point: Point) -> None:
        """Add a column behind the one that it names; ValueError if the name has another meaning."""
        known = self._points.get(name)
        if known is not None:
            if known is not point:
                raise ValueError(f"column {name!r} is declared twice, in different ways")
            return
        found: dict[str, Point] = {}
        for other, its in self._points.items():
            found[other] = its
            if other == point.after:
                found[name] = point
        self._points = {**found, name: point}

    def __getitem__(self, name: str) -> Point:
        return self._points[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)
