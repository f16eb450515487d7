"""The schema of the command line: the type of every key, checked by Hydra and OmegaConf."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from harness.cases.case import Checkpoint, Compile, Precision
from harness.paths import CONF
from models.config import ModelConfig

GROUPS = (
    *("task", "model", "attention", "precision", "compile", "checkpoint", "profile"),
    *("cache", "parallel", "launcher"),
)
"""Keys that choose an implementation or a file; every other key is a value."""

OPTIONAL_GROUPS = ("model", "compile", "checkpoint", "profile", "cache")
"""Those that a task may have no use for."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Every key that can be typed. Groups filled by registries are typed by what is chosen."""

    task: Any
    model: ModelConfig
    attention: Any
    precision: Precision
    compile: Compile
    checkpoint: Checkpoint
    profile: Any
    cache: Any
    parallel: Any
    launcher: Any
    seq_len: int = 256
    batch_size: int = 4
    seed: int = 0
    device: str = "auto"
    results: str = "results/local"
    timeout_s: float = 600.0
    isolate: bool = False
    retry: bool = False
    plan: bool = False
    interleave: int = 1
    """Rounds that the measured passes of each case are split into; not a number of cases."""
    scale: str = "auto"
    wait: bool = False


CASE_VALUES = ("seq_len", "batch_size", "seed")
RUN_KEYS = (
    "device",
    "results",
    "timeout_s",
    "isolate",
    "retry",
    "plan",
    "interleave",
    "scale",
    "wait",
)
"""Keys that say how to run and not what to measure; they take one value, not a sweep."""


@cache
def registered_choices() -> dict[str, dict[str, Any]]:
    """The choices that code registers: by group and name, a structured config of each."""
    from harness.cases.profiler import PROFILERS
    from harness.cases.task import TASKS
    from harness.run.launcher import LAUNCHERS
    from kernels import BACKENDS
    from kernels.caches import CACHES
    from parallel import STRATEGIES

    registries: list[Any] = [TASKS, BACKENDS, PROFILERS, CACHES, STRATEGIES, LAUNCHERS]
    return {
        registry.group: {
            entry.name: entry.target(name=entry.name, **entry.preset) for entry in registry
        }
        for registry in registries
    }


def choices(group: str) -> list[str]:
    """Names that can be chosen for a group, from its registry and from its folder of YAML."""
    files = {path.stem for path in (CONF / group).glob("*.yaml")}
    return sorted(files | set(registered_choices().get(group, ())))
