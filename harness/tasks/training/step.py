"""The step of ``task=train_step``: a model on this rank, its loss, an update of its weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.measure.passes import autocast
from harness.tasks.batch import Batch
from harness.tasks.training.clipping import unscale_and_clip
from kernels.ranges import named_range
from models.checkpointing import checkpoint_blocks
from models.layers import CoreAttention
from models.transformer import Transformer, cross_entropy
from parallel.tensor import split_transformer, vocab_parallel_cross_entropy

CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs."""


class MeasuredStep:
    """A model with all that a step needs; calling it takes the step.

    Attributes:
        captured: whether calls replay CUDA graphs.

    Args:
        attention: the case's attention, bound to ranks where they share sequences.
        make_batch: makes this rank's batch; called once, after the model is made.
        mode: forward, forward_backward or train_step.
        max_norm: gradients are clipped to this norm before the optimizer's step; None leaves them.
    """

    captured: ClassVar[bool] = False

    def __init__(
        self,
        case: Case,
        bench: Bench,
        attention: CoreAttention,
        make_batch: Callable[[], Batch],
        *,
        mode: str,
        max_norm: float | None = None,
    ) -> None:
        self._case, self._max_norm = case, max_norm
        self._trains = mode != "forward"
        torch.manual_seed(case.seed)
        self.module = build_model(case, attention, bench.device)
        bench.vote()
        self.model = case.parallel.wrap(self.module)
        self._loss_of = loss_function(case)
        self.optimizer: torch.optim.Optimizer | None = None
        if mode == "train_step":
            # A captured optimizer counts its steps on the device.
            options = {"capturable": True} if self.captured else {}
            self.optimizer = case.parallel.optimizer(
                self.model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True, **options
            )
        self._scaler = case.parallel.grad_scaler(case.device, enabled=case.precision.grad_scaler)
        self._batch = make_batch()
        self._uses_cuda_graphs = case.compile is not None and case.compile.mode in CUDA_GRAPH_MODES
        self._last_loss: torch.Tensor | None = None
        self._last_norm: torch.Tensor | None = None

    def __call__(self, timer: PhaseTimer) -> None:
        self.launch(timer)

    def launch(self, timer: PhaseTimer) -> None:
        """Take the step with each of its kernels launched from here."""
        if self._uses_cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with timer.phase("forward"):
            loss = self._forward()
        if self._trains:
            self._backward(loss, timer)
        if self.optimizer is not None:
            with timer.phase("optimizer"):
                self._update(self.optimizer)
        self.model.zero_grad(set_to_none=True)

    def _forward(self) -> torch.Tensor:
        batch = self._batch
        with torch.set_grad_enabled(self._trains), autocast(self._case):
            logits = self.model(batch.tokens, batch.positions)
            # Logits end with this function: the backward pass does not need them.
            with named_range("loss"):
                loss = self._loss_of(logits, batch.targets, batch.num_targets)
        self._last_loss = loss.detach()
        return loss

    def _backward(self, loss: torch.Tensor, timer: PhaseTimer) -> None:
        parallel = self._case.parallel
        synchronizes = parallel.synchronizes_after_backward
        with timer.phase("backward"):
            self._scaler.scale(loss).backward()
            with timer.phase("communication") if synchronizes else nullcontext():
                parallel.after_backward(self.model)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        if self._max_norm is not None:
            self._last_norm = unscale_and_clip(
                self._scaler, optimizer, self.model, self._max_norm, self._case.parallel
            )
        self._scaler.step(optimizer)
        self._scaler.update()

    def finish(self) -> None:
        """Wait for communication that the last step left to a next one."""
        self._case.parallel.finish(self.model)

    def loss(self) -> float:
        """This rank's loss in the last step."""
        assert self._last_loss is not None, "a loss needs a step"
        return float(self._last_loss)

    def gradient_norm(self) -> float | None:
        """The norm that the last step's gradients had before they were clipped, if they were."""
        return None if self._last_norm is None else float(self._last_norm)


def build_model(case: Case, attention: CoreAttention, device: torch.device) -> Transformer:
    """The case's transformer or this rank's part of it, compiled as the case says."""
    assert case.model is not None, "train_step uses a model"
    dtype = getattr(torch, case.precision.parameters)
    splits = case.parallel.tp > 1
    # A model to be split is made without memory: the whole may not fit on one device.
    model = Transformer(
        case.model,
        attention,
        variant=case.attention_variant,
        device="meta" if splits else device,
        dtype=dtype,
    )
    if splits:
        split_transformer(model, case.parallel.tp_mesh(), device)
    if case.checkpoint is not None:
        selective = case.checkpoint.scope == "selective"
        checkpoint_blocks(model, every=case.checkpoint.blocks, selective=selective)
    assert case.compile is not None, "train_step uses compile"
    mode = None if case.compile.mode == "default" else case.compile.mode
    if case.compile.scope == "model":
        model.compile(mode=mode, dynamic=False)
    elif case.compile.scope == "block":
        for block in model.blocks:
            block.compile(mode=mode, dynamic=False)
    return model


def loss_function(
    case: Case,
) -> Callable[[torch.Tensor, torch.Tensor, float | None], torch.Tensor]:
    """Loss from logits, targets and their number; with tp logits are split over the vocabulary."""
    if case.parallel.tp == 1:
        return cross_entropy
    return partial(vocab_parallel_cross_entropy, mesh=case.parallel.tp_mesh())
