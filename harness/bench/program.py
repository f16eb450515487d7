"""The program that a task gives to a profiler: a step to repeat, its model and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.bench.phase_timer import PhaseTimer


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """A step as it was measured, with its model and optimizer if it has them."""

    step: Callable[[PhaseTimer], None]
    model: torch.nn.Module | None = None
    """The model without the strategy's wrapper."""
    wrapped: torch.nn.Module | None = None
    """The model in its wrapper, whose trained parameters may be shards of the model's."""
    optimizer: torch.optim.Optimizer | None = None
