"""Loops that users write around a container, each as a function of who trains."""

from __future__ import annotations

import torch.distributed as dist

from training_loops import gradients, optimizers, passes, saving, weights
from training_loops.trainer import CONTAINERS, LOOPS, Trainer, Weights

SUBJECTS = (gradients, passes, optimizers, weights, saving)
"""The modules that fill ``LOOPS`` when they are imported."""


def outcome(group: dist.ProcessGroup, container: str, name: str) -> Weights | str:
    """The weights that a loop ends with, or the first line of the error that refuses it."""
    try:
        return LOOPS[name](Trainer(wrap=CONTAINERS[container], group=group))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
