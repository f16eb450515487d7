"""The plugins that cases need: recorded in plans, and named where one is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS
from kernels.caches import CACHES
from kernels.registry import PLUGINS_VARIABLE, Registry
from parallel import BACKENDS, STRATEGIES

Choice = tuple[Registry[Any], str]
"""A registry, and the name of one of its choices."""

_REGISTRIES: dict[str, Registry[Any]] = {
    "task": TASKS,
    "attention": BACKENDS,
    "parallel": STRATEGIES,
    "profile": PROFILERS,
    "cache": CACHES,
}


class MissingPlugin(ValueError):
    """Cases need a plugin that is not loaded; the message is one line with the remedy."""


def choices_of(cases: Iterable[Mapping[str, Any]]) -> list[Choice]:
    """The registered choices that cases made, each once. Cases are as in records."""
    found: dict[tuple[str, str], None] = {}
    for case in cases:
        for part in _REGISTRIES:
            if name := (case.get(part) or {}).get("name"):
                found[part, str(name)] = None
    return [(_REGISTRIES[part], name) for part, name in found]


def plugins_of(choices: Iterable[Choice]) -> dict[str, list[str]]:
    """Module and file of every choice that a plugin registered: ``attention=mine``."""
    found = {}
    for registry, name in choices:
        if plugin := registry.plugin(name):
            found[f"{registry.group}={name}"] = list(plugin)
    return found


def why_missing(choices: Iterable[Choice], plugins: Mapping[str, list[str]]) -> str | None:
    """The first choice that a missing plugin registers, and where that came from; None if none.

    A choice that nobody knows, and no plugin is on record for, is one of an older version.

    Args:
        plugins: from :func:`plugins_of` when the cases were planned; or the names and files of all
            plugins that were loaded, as lists under the empty name.
    """
    for registry, name in choices:
        if registry.home(name) is not None:
            continue
        choice = f"{registry.group}={name}"
        if choice in plugins:
            return _one(choice, *plugins[choice])
        loaded = plugins.get("") or []
        if len(loaded) == 1:
            return f"{choice}: comes from the plugin {loaded[0]}; {_REMEDY}"
        if loaded:
            return f"{choice}: comes from one of the plugins {', '.join(loaded)}; {_REMEDY}"
    return None


_REMEDY = f"name it in {PLUGINS_VARIABLE}"


def _one(choice: str, module: str, file: str) -> str:
    where = f" (loaded from {file})" if file else ""
    return f"{choice}: comes from the plugin {module}{where}; {_REMEDY}"


def loaded_of(environments: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """All plugins that environments of records name, for :func:`why_missing`."""
    found = {
        f"{name} (loaded from {file})" if file else name: None
        for environment in environments
        for name, file in (environment.get("plugins") or {}).items()
    }
    return {"": list(found)}
