"""Training one step in a precision and in float64, and comparing every tensor on the way.

What is looked at: parameters, the output of each layer and the gradient that arrives at it, the
logits, the loss, the gradients of the parameters, and the optimizer's state. The reference is the
same model in float64, from the same float32 parameters, so that the error of a precision
includes that of rounding the parameters where it does so.
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
"""More than enough to halve GradScaler's first scale, 65,536, until nothing can overflow."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """What is trained for one step: a model, and its loss on one batch."""

    model: nn.Module
    head: str
    """Name of the layer that gives the logits."""
    loss: Callable[[], Tensor]
    """Calls the model once on the batch; a scalar in nats."""


@dataclass(slots=True)
class _Seen:
    """Tensors of one pass by name, in the order in which they came to be."""

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
    """An attention call that shows what it is given and what it gives."""

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
def _watching(program: Program) -> Iterator[_Seen]:
    """Notes what every layer, block and attention call of the model gives, while inside."""
    seen = _Seen()
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


def audit(case: Case, bench: Bench, program: Program, reference: Program) -> dict[str, Any]:
    """One training step of ``program`` in the case's precision, compared with ``reference``.

    Args:
        program: on the case's device, with parameters in the precision's dtype.
        reference: the same in float64, from the same float32 parameters.

    Returns:
        What a record keeps: ``loss`` and ``loss_float64`` (nats, None where not finite),
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
        # As in training: the step is skipped, the scale is halved, and the next one is tried.
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
    """A tensor against ``scale`` times its float64 reference of the same shape.

    Args:
        compute: the dtype of the matmuls that it came from, whatever it is kept in.

    Returns:
        ``elements``; ``overflowed``, infinite or NaN; ``underflowed``, zero where float64 has
        something between zero and the smallest normal number of ``compute``, which leaves
        out differences that rounding alone made zero; ``subnormal``, not zero and below the
        smallest normal number of its own dtype, and so short of digits; ``error_norm`` and
        ``reference_norm``, Euclidean norms of the difference and of the reference, both over
        ``scale``, None where not finite.
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
