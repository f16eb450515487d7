"""The choices of each group: those that code registers, and those that are files in ``conf/``."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import yaml

from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS
from harness.did_you_mean import did_you_mean
from harness.paths import CONF, config_files
from harness.run.launcher import LAUNCHERS
from kernels.backends.auto import CHAINS
from kernels.caches import CACHES
from kernels.registry import Registry
from parallel import BACKENDS, STRATEGIES
from parallel.strategies.strategy import AXES_BY_NAME

REGISTRIES: dict[str, Registry[Any]] = {
    registry.group: registry
    for registry in (TASKS, BACKENDS, PROFILERS, CACHES, STRATEGIES, LAUNCHERS)
}
"""The registry of each group. Names are known without importing the files that register them."""


def choices(group: str) -> list[str]:
    """Names that can be chosen for a group, sorted."""
    registered = REGISTRIES[group].names() if group in REGISTRIES else []
    return sorted({*registered, *config_files(group)})


def is_file(group: str, name: str) -> bool:
    """Whether a choice is a YAML file."""
    return name in config_files(group)


def options(group: str, name: str) -> Any:
    """A registered choice with the options that its registration presets.

    Raises ValueError in one line for a plugin's choice that is no dataclass of this kind.
    """
    entry = REGISTRIES[group][name]
    try:
        return entry.target(name=name, **entry.preset)
    except TypeError as error:
        home = REGISTRIES[group].home(name)
        raise ValueError(
            f"{group}={name}: {home} registers what cannot be made with a name ({error}); "
            "it must be a class that inherits its role, as docs/extending.md shows"
        ) from error


def default_choice(group: str) -> str:
    """The choice of a group that is not given, from ``conf/config.yaml``."""
    return _defaults()[group]


@cache
def _defaults() -> dict[str, str]:
    values = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    entries = [entry for entry in values["defaults"] if isinstance(entry, dict)]
    return {group: str(name) for entry in entries for group, name in entry.items()}


def require_choice_of_group(group: str, name: str) -> None:
    """Raise ValueError that lists a group's choices unless ``name`` is one."""
    known = choices(group)
    if name in known:
        return
    if group == STRATEGIES.group and name in AXES_BY_NAME:
        axis = AXES_BY_NAME[name]
        raise ValueError(f"parallel={name}: a mesh axis of every choice; write parallel.{axis}=2")
    liked = _by_preference(known) if group == BACKENDS.group else known
    raise ValueError(
        f"{group}={name}: no such choice{did_you_mean(name, liked)}; there are {', '.join(known)}"
    )


def _by_preference(names: list[str]) -> list[str]:
    """Attention backends: those that are installed first, and among them auto's order for a GPU."""
    order = [*itertools.chain.from_iterable(CHAINS.values()), *names]

    def preference(name: str) -> tuple[bool, int]:
        version = options(BACKENDS.group, name).version() if name in BACKENDS else None
        return version is None, order.index(name)

    return sorted(names, key=preference)
