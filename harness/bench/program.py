"""What a task hands to a profiler: one step to repeat, and whose tensors are which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from harness.bench.bench import PhaseTimer


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """A step as it was measured, with what it works on where there is a model."""

    step: Callable[[PhaseTimer], None]
    model: nn.Module | None = None
    """Without what a strategy wraps around it."""
    wrapped: nn.Module | None = None
    """With that; its parameters are those that are trained, which may be parts of the model's."""
    optimizer: Optimizer | None = None
