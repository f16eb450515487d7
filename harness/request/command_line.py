"""Parses a command line, in Hydra's grammar, into the values of each key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException

from harness.did_you_mean import closest
from harness.paths import config_files
from harness.request.choices import choices
from harness.request.config import GROUPS, group_of

PATH_KEY = "results="

Axes = dict[str, list[Any]]
"""The values of each key that a grid combines."""


def parse(arguments: Sequence[str]) -> Axes:
    """Values of each key, in Hydra's grammar: lists, ranges, quotes and globs included."""
    parser = OverridesParser.create()
    axes: Axes = {}
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            if argument.startswith(PATH_KEY):
                # A shell's quotes are gone by now, and a path may hold any sign.
                axes.setdefault(PATH_KEY[:-1], []).append(argument.removeprefix(PATH_KEY))
                continue
            raise ValueError(f"{argument}: {_instead_of(argument)}") from error
        if override.type != OverrideType.CHANGE:
            raise ValueError(f"{argument}: keys can be set, not added or removed; write KEY=VALUE")
        key = override.key_or_group
        if override.package is not None:
            raise ValueError(f"{key}@{override.package}: a choice has one place here; write {key}=")
        if group_of(key.replace("/", ".")) == "hydra":
            instead = "its own settings have no effect; leave it out"
            if key == "hydra.searchpath":
                instead = "add a folder of your own with --config-dir DIR"
            raise ValueError(f"{key}: Hydra only composes here; {instead}")
        if key in axes:
            raise ValueError(f"{key}: given twice; separate several values by commas")
        if argument.startswith(PATH_KEY) and override.is_sweep_override():
            raise ValueError(
                f"{key}: takes one value; quote a folder whose name holds a comma: "
                f"'{key}=\"{argument.removeprefix(PATH_KEY)}\"'"
            )
        axes[key] = list(_values(override, parser))
    return axes


def _instead_of(argument: str) -> str:
    """How to write what is not in Hydra's grammar."""
    key, equals, value = argument.partition("=")
    if not equals:
        sweeps = config_files("sweeps")
        if argument in sweeps:
            return f"a sweep; write sweeps={argument}"
        if (command := closest(argument, COMMANDS)) is not None:
            return f"write {COMMANDS[command]}"
        if (sweep := closest(argument, sweeps)) is not None:
            return f"did you mean sweeps={sweep}?"
        return "write KEY=VALUE or KEY=VALUE,VALUE"
    if key.isidentifier() and "" in [item.strip() for item in value.split(",")]:
        return "a comma without a value beside it; write KEY=VALUE or KEY=VALUE,VALUE"
    return (
        f"write KEY=VALUE or KEY=VALUE,VALUE; quote a value with other signs: '{key}=\"{value}\"'"
    )


COMMANDS = {
    "help": "attnbench --help",
    "version": "attnbench --version",
    "backends": "attnbench backends",
    "recommend": "attnbench recommend model=NAME",
    "fits": "attnbench fits model=NAME",
    "report": "attnbench-report RESULTS",
    "writeup": "attnbench-writeup RESULTS",
    "compare": "attnbench-compare A B",
    "pack": "attnbench-pack RESULTS",
    "status": "attnbench-status RESULTS",
    "cancel": "attnbench-cancel RESULTS",
}
"""How to write the commands that are no keys."""


def _values(override: Override, parser: OverridesParser) -> Iterator[Any]:
    key = override.key_or_group
    if not override.is_sweep_override():
        yield override.value()
        return
    if override.is_interval_sweep():
        raise ValueError(f"{key}: an interval has no list of values; give values or a range(...)")
    value = override.value()
    if isinstance(value, Glob):
        if key not in GROUPS:
            raise ValueError(f"{key}: glob(...) matches choices, and {key} is a value")
        matches = value.filter(choices(key))
        if not matches:
            raise ValueError(f"{key}: the glob matches none of {', '.join(choices(key))}")
        yield from matches
        return
    for text in override.sweep_string_iterator():
        yield parser.parse_override(f"{key}={text}").value()
