"""One training step in a precision and in float64, compared tensor by tensor.

Compared are the output of each layer and its gradient, the logits and the gradients of the
parameters; the dtypes of parameters, loss and optimizer state are noted. The reference is the
same model in float64 from the same float32 parameters, so that the errors of a precision that
rounds its parameters include that rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.measure.passes import autocast
from kernels.problem import AttentionSpec
from models.transformer import Block, SelfAttention

LOGITS = "logits"

_MOST_SKIPPED_STEPS = 40
"""Ends a search that cannot succeed: GradScaler's first scale, 65,536, is 2**16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AuditedModel:
    """A model to train for one step, and its loss on one batch."""

    model: nn.Module
    head: str
    """Name of the layer that gives the logits."""
    loss: Callable[[], Tensor]
    """Calls the model once on the batch; a scalar in nats."""


@dataclass(slots=True)
class _SeenTensors:
    """Outputs and their gradients by name, in the order of computation."""

    outputs: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def note(self, name: str, output: Tensor) -> None:
        self.outputs[name] = output.detach()
        if output.requires_grad:

            def keep(gradient: Tensor) -> None:
                self.gradients[name] = gradient

            output.register_hook(keep)


@dataclass(kw_only=True, slots=True, frozen=True)
class _WatchedAttention:
    """An attention call that notes its inputs and its output."""

    attention: Any
    name: str
    note: Callable[[str, Tensor], None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, /) -> Tensor:
        for letter, x in zip("qkv", (q, k, v), strict=True):
            self.note(f"{self.name}.{letter}", x)
        o = self.attention.attend(q, k, v, spec)
        self.note(f"{self.name}.attend", o)
        return o


@contextlib.contextmanager
def _watching(program: AuditedModel) -> Iterator[_SeenTensors]:
    """While inside, note the output of every layer, block and attention call of the model."""
    seen = _SeenTensors()
    undo: list[Callable[[], None]] = []

    def watch(name: str, module: nn.Module) -> None:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            seen.note(name, output)

        undo.append(module.register_forward_hook(note).remove)

    def watch_attention(name: str, module: SelfAttention) -> None:
        own = module.attention
        module.attention = _WatchedAttention(attention=own, name=name, note=seen.note)
        undo.append(lambda: setattr(module, "attention", own))

    for name, module in program.model.named_modules():
        if isinstance(module, SelfAttention):
            watch_attention(name, module)
        elif isinstance(module, Block) or not any(module.children()):
            watch(LOGITS if name == program.head else name, module)
    try:
        yield seen
    finally:
        for action in undo:
            action()


def audit(
    case: Case, bench: Bench, program: AuditedModel, reference: AuditedModel
) -> dict[str, Any]:
    """Train one step of ``program`` in the case's precision and compare it with ``reference``.

    Args:
        program: on the case's device, with parameters in the precision's dtype.
        reference: the same in float64, from the same float32 parameters.

    Returns:
        The note of a record: ``loss`` and ``loss_float64`` (nats, None where not finite),
        ``loss_scale``, ``skipped_steps`` and ``tensors``, each with ``kind``, ``name``,
        ``dtype``, and where there is a reference the fields of :func:`compare`.
    """
    bench.stage("float64")
    with _watching(reference) as expected:
        loss_float64 = reference.loss()
        loss_float64.backward()
    bench.stage("auditing")
    optimizer = torch.optim.AdamW(program.model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(case.device, enabled=case.precision.grad_scaler)
    parameters = [_plain("parameter", *item) for item in program.model.named_parameters()]
    skipped_steps = 0
    while True:
        scale = float(scaler.get_scale())
        with _watching(program) as seen:
            with autocast(case):
                loss = program.loss()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = [x.grad for x in program.model.parameters() if x.grad is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if finite or not scaler.is_enabled() or skipped_steps == _MOST_SKIPPED_STEPS:
            break
        # As in training: skip the step and try again with half the scale.
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        skipped_steps += 1

    compute = getattr(torch, case.precision.compute)

    def compared(
        kind: str, got: dict[str, Tensor], expected: dict[str, Tensor], scale: float = 1.0
    ) -> list[dict[str, Any]]:
        return [
            _plain(kind, name, x) | compare(x, expected[name], compute=compute, scale=scale)
            for name, x in got.items()
        ]

    tensors = parameters
    tensors += compared("output", seen.outputs, expected.outputs)
    tensors += [_plain("loss", "loss", loss)]
    tensors += compared("output_gradient", seen.gradients, expected.gradients, scale)
    tensors += compared("gradient", _gradients(program.model), _gradients(reference.model))
    scaler.step(optimizer)
    tensors += _optimizer_state(optimizer)
    return {
        "loss": _finite(loss.item()),
        "loss_float64": loss_float64.item(),
        "loss_scale": scale,
        "skipped_steps": skipped_steps,
        "tensors": tensors,
    }


def compare(
    got: Tensor, expected: Tensor, *, compute: torch.dtype, scale: float = 1.0
) -> dict[str, Any]:
    """Compare a tensor with ``scale`` times its float64 reference of the same shape.

    Args:
        compute: the dtype of the matmuls behind it, which may differ from its own.

    Returns:
        Counts of ``elements``; ``overflowed``: infinite or NaN; ``underflowed``: zero where the
        reference is not zero but below the smallest normal number of ``compute`` (a larger
        reference became zero by rounding, as a difference does); ``subnormal``: not zero but
        below the smallest normal number of the tensor's own dtype, so of less accuracy. And
        ``error_norm`` and ``reference_norm``: Euclidean norms of the difference and of the
        reference, divided by ``scale``, None where not finite.
    """
    expected = expected * scale
    wide = got.double()
    small = (expected != 0) & (expected.abs() < torch.finfo(compute).tiny)
    short = (wide != 0) & (wide.abs() < torch.finfo(got.dtype).tiny)
    return {
        "elements": got.numel(),
        "overflowed": int((~got.isfinite()).sum()),
        "underflowed": int(((got == 0) & small).sum()),
        "subnormal": int(short.sum()),
        "error_norm": _finite(float((wide - expected).norm()) / scale),
        "reference_norm": float(expected.norm()) / scale,
    }


def _plain(kind: str, name: str, tensor: Tensor) -> dict[str, Any]:
    return {"kind": kind, "name": name, "dtype": str(tensor.dtype).removeprefix("torch.")}


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def _optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """One entry per kind of state and dtype; none where no step was taken."""
    found: dict[tuple[str, torch.dtype], dict[str, Any]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            found.setdefault((name, value.dtype), _plain("optimizer_state", name, value))
    return list(found.values())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
