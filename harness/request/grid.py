"""Typed cases from the grids of a sweep and the keys of a command line.

Hydra would compose each point anew, at about 50 ms a point. Here each choice of each group is
composed once, values are set on the typed result, and points are combined from those parts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cases.case import Case
from harness.cases.requirements import require_at_most
from harness.cases.task import TASKS
from harness.did_you_mean import closest
from harness.paths import config_files
from harness.request.choices import (
    REGISTRIES,
    default_choice,
    is_file,
    options,
    require_choice_of_group,
)
from harness.request.command_line import Axes
from harness.request.config import (
    CASE_VALUES,
    GROUPS,
    OPTIONAL_GROUPS,
    RUN_KEYS,
    Config,
    group_of,
)
from harness.request.config_store import compose_config

LARGEST = 2**62
"""Beyond this an integer fits neither a record nor the seed of a generator."""

MOST_SEQUENCES = 2**20
"""Of a batch: plans list the length of each of them."""


def expand(grids: list[dict[str, Any]], typed: Axes, device: str) -> dict[str, Case]:
    """Every case of every grid, once, by its id; the keys that the user typed replace the grid's.

    Raises ValueError in one line that names the key for anything that cannot be.
    """
    parts = Parts()
    cases: dict[str, Case] = {}
    unused = set(typed)
    for grid in grids:
        axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
        for key in axes:
            require_key(key)
        axes |= _applicable(typed, axes)
        unused -= set(axes)
        for combination in itertools.product(*axes.values()):
            point = dict(zip(axes, combination, strict=True))
            case = parts.case(point, device)
            cases.setdefault(case.id, case)
    if unused:
        key = sorted(unused)[0]
        raise ValueError(f"{key}: the chosen task has no use for it; leave it out")
    if not cases:
        raise ValueError("no case is left: a key has an empty list of values")
    return cases


def _applicable(typed: Axes, axes: Axes) -> Axes:
    """The typed keys that a grid's tasks use: a grid of attention calls has no model to change."""
    tasks = typed.get("task") or axes.get("task") or [default_choice("task")]
    for name in tasks:
        require_choice_of_group("task", str(name))
    uses = frozenset().union(*(TASKS[str(name)].target.uses for name in tasks))
    return {
        key: values
        for key, values in typed.items()
        if group_of(key) not in OPTIONAL_GROUPS or group_of(key) in uses
    }


class Parts:
    """The parts of cases (task, model, attention, ...), each made once and shared."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def case(self, point: dict[str, Any], device: str) -> Case:
        """The case of one point of a grid."""
        parts = {group: self.choice(group, point) for group in GROUPS if group != "launcher"}
        return Case(**parts, **self._case_values(point), device=device)

    def choice(self, group: str, point: dict[str, Any]) -> Any:
        """The object of one group: its choice, with the point's values of its keys."""
        name = str(point.get(group, default_choice(group)))
        changes = {key: value for key, value in point.items() if key.startswith(f"{group}.")}
        made = (group, name, *sorted((key, repr(value)) for key, value in changes.items()))
        if made not in self._made:
            node = _group_node(group, name).copy()
            for key, value in changes.items():
                if key == f"{group}.name" and group in REGISTRIES:
                    raise ValueError(f"{key}: chosen with {group}={value}")
                set_value(node, key.removeprefix(f"{group}."), value, key)
            self._made[made] = _to_object(node, f"{group}={name}")
        return self._made[made]

    def _case_values(self, point: dict[str, Any]) -> dict[str, Any]:
        changes = {key: point[key] for key in CASE_VALUES if key in point}
        made = ("values", *((key, repr(value)) for key, value in changes.items()))
        if made not in self._made:
            config = default_config().copy()
            for key, value in changes.items():
                set_value(config, key, value, key)
            require_at_most("batch_size", config["batch_size"], MOST_SEQUENCES)
            self._made[made] = {key: config[key] for key in CASE_VALUES}
        return cast(dict[str, Any], self._made[made])


@cache
def default_config() -> DictConfig:
    """The configuration of an empty command line."""
    return compose_config()


@cache
def _group_node(group: str, name: str) -> DictConfig:
    """A choice as Hydra composes it; Hydra is asked only where it reads a file."""
    require_choice_of_group(group, name)
    if name == default_choice(group):
        return cast(DictConfig, default_config()[group])
    if is_file(group, name):
        found = cast(DictConfig, compose_config([f"{group}={name}"])[group])
        if group not in REGISTRIES and found.get("name", name) != name:
            path = config_files(group)[name]
            raise ValueError(
                f"{path}: name: {found['name']}: must be {name}, as the file is called"
            )
        return found
    return cast(DictConfig, OmegaConf.structured(options(group, name)))


def set_value(config: DictConfig, key: str, value: Any, full_key: str) -> None:
    """Set a typed value; ValueError names the full key, and the closest one for a typo."""
    if key not in config:
        raise ValueError(_no_such_key(full_key, [str(name) for name in config]))
    try:
        OmegaConf.update(config, key, value, merge=False)
        found = config[key]
    except OmegaConfBaseException as error:
        raise ValueError(f"{full_key}={value}: {_first_line(error)}") from error
    _require_number(full_key, found)


def _require_number(key: str, value: object) -> None:
    """Raise ValueError for a number that no size, time or seed can be."""
    if isinstance(value, int):
        require_at_most(key, abs(value), LARGEST)
    # Without a limit is a time of its own; a size is not.
    if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and "." in key)):
        raise ValueError(f"{key}={value:g}: must be a finite number")


def require_key(key: str) -> None:
    """Raise ValueError unless cases have the key (a group's own keys are checked later)."""
    if group_of(key) in GROUPS or key in CASE_VALUES:
        return
    if key in RUN_KEYS:
        raise ValueError(f"{key}: says how to run; give it on the command line, not in a grid")
    raise ValueError(_no_such_key(key, [item.name for item in fields(Config)] + ["sweeps"]))


def _no_such_key(key: str, known: list[str]) -> str:
    prefix, _, last = key.rpartition(".")
    close = closest(last, known)
    if close is not None:
        suggestion = f"did you mean {prefix + '.' if prefix else ''}{close}?"
    else:
        suggestion = f"known are {', '.join(name for name in known if name != 'name')}"
    return f"{key}: no such key; {suggestion}"


def _to_object(node: DictConfig, where: str) -> Any:
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
