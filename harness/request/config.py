"""The keys of the command line and their types, which Hydra and OmegaConf check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.cases.checkpoint import Checkpoint
from harness.cases.compilation import Compile
from harness.cases.precision import Precision
from models.config import ModelConfig

GROUPS = (
    *("task", "model", "attention", "precision", "compile", "checkpoint", "profile"),
    *("cache", "parallel", "launcher"),
)
"""Keys that choose an implementation or a file; every other key is a value."""

OPTIONAL_GROUPS = ("model", "compile", "checkpoint", "profile", "cache")
"""Groups that a task may have no use for."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Every key and its default. A group of registered choices has the type of its choice."""

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
    remeasure: str = "none"
    """Which recorded cases are measured again: none, stale or all."""
    plan: bool = False
    interleave: int | None = None
    """Number of rounds that the measured passes of each case are split into; None is the sweep's,
    and without one 5 where cases are compared, and 1 otherwise."""
    fresh_rounds: str = "auto"
    """Whether each round has worker processes of its own: auto, true or false."""
    until: str = "auto"
    """rounds, or decided: rounds are added to compared cases that are still UNCLEAR; auto is the
    sweep's, and without one decided where cases are compared in rounds of auto's number."""
    budget_s: float | None = None
    """Seconds for all added rounds; None is as many as the first rounds took, within limits."""
    max_rounds: int = 56
    scale: str = "auto"
    wait: bool = False
    machine: str | None = None
    """With plan=true: what runs and fits on it, ``here`` or hardware of ``conf/hardware``."""


CASE_VALUES = ("seq_len", "batch_size", "seed")
RUN_KEYS = (
    "device",
    "results",
    "timeout_s",
    "isolate",
    "retry",
    "remeasure",
    "plan",
    "interleave",
    "fresh_rounds",
    "until",
    "budget_s",
    "max_rounds",
    "scale",
    "wait",
    "machine",
)
"""Keys that say how to run rather than what to measure; each takes one value."""


def group_of(key: str) -> str:
    """The group of a key: ``attention`` for ``attention`` and for ``attention.kernel``."""
    return key.split(".", 1)[0]
