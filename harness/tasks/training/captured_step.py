"""The step of ``task=train_step`` as CUDA graphs: forward, backward and optimizer, one each.

Three graphs, and not one, so that phases are timed apart. They share their memory, and are
replayed in the order in which they were captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch

from harness.bench.phase_timer import PhaseTimer
from harness.tasks.training.step import MeasuredStep
from kernels.launching.graphs import capture


class CapturedStep(MeasuredStep):
    """Captures at its first call, after steps launched one by one, and replays from then on.

    Ranks capture together, and replays meet as launched kernels would.
    """

    captured: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        """By phase, in the order of a step."""

    def __call__(self, timer: PhaseTimer) -> None:
        if not self._graphs:
            self._graphs = self._capture(_Untimed(self._batch.tokens.device))
        for phase, graph in self._graphs.items():
            with timer.phase(phase):
                graph.replay()

    def _capture(self, untimed: PhaseTimer) -> dict[str, torch.cuda.CUDAGraph]:
        losses: list[torch.Tensor] = []
        phases: dict[str, Callable[[], Any]] = {"forward": lambda: losses.append(self._forward())}
        if self._trains:
            phases["backward"] = lambda: self._backward(losses.pop(), untimed)
        if self.optimizer is not None:
            phases["optimizer"] = partial(self._update, self.optimizer)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        warm_up: Callable[[], Any] = partial(self.launch, untimed)
        for phase, step in phases.items():
            pool = graphs["forward"].pool() if graphs else None
            graphs[phase], _ = capture(step, warm_up=warm_up, pool=pool)
            # Whole steps have run. Another one would take the loss that was captured last.
            warm_up = _nothing
        # The graphs know where gradients lie.
        self.model.zero_grad(set_to_none=True)
        return graphs


class _Untimed(PhaseTimer):
    """A timer for steps that nobody times: an event that is captured has no time."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield


def _nothing() -> None:
    """The warm-up of what has been warmed up."""
