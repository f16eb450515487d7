"""What some optimizer steps did to a model, beside what they do in one process in float64.

Weights are compared by how far they moved from where all began, which is little beside the
weights themselves. A second training in one process, in the case's own number formats, shows how
exact that can be; both trainings take the same steps on the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.gate.findings import Finding, number
from harness.gate.tolerances import ROUNDOFF, Format

ELEMENT = 4.0
"""A single element may be so many times as wrong as one of them is in the careful training."""

FEW_ELEMENTS = 16
"""A parameter with fewer, such as the sinks of a layer's heads, errs by chance in either training.
Sinks' gradients are sums besides whose terms cancel: sound kernels in float16 reached 1.4 times
what holds for large parameters."""

OF_FEW = 2.0
"""Such a parameter may be so many times as wrong. In 20 draws each of bf16 and fp16 sound sinks
reached 0.5 of that; with three, 0.6 of their gradient passed where weights are in bfloat16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Training:
    """The end of a short training."""

    losses: Sequence[float]
    """Of each step, the mean over all batches."""
    weights: dict[str, Tensor]
    """Whole parameters by name."""


def check_training(
    got: Training,
    exact: Training,
    careful: Training,
    start: dict[str, Tensor],
    number_format: Format,
) -> Iterator[Finding]:
    """Losses of all steps, and how far every element of every parameter moved.

    Args:
        exact: in float64; careful: in the case's number formats; both in one process.
        start: the weights that all began with.
    """
    yield _losses(got, exact, careful, number_format)
    reached = {name: _Moves.of(name, careful, exact, start) for name in exact.weights}
    # A parameter whose roundings cancel by chance is held to what most of the others reach.
    usual = float(torch.tensor([moves.by_norm for moves in reached.values()]).median())
    for name, best in reached.items():
        moves = _Moves.of(name, got, exact, start)
        least = max(usual, best.least, number_format.least)
        factor = number_format.factor
        few = exact.weights[name].numel() < FEW_ELEMENTS and number_format.name != "float32"
        factor *= OF_FEW if few else 1.0
        steps = len(exact.losses)
        yield Finding(
            name="training update",
            error=moves.by_norm,
            tolerance=factor * max(best.by_norm, least),
            said=f"relative error of the updates of {name} against one process is "
            f"{moves.by_norm:.2g} after {steps} steps",
        )
        yield Finding(
            name="training update element",
            error=moves.by_element,
            tolerance=ELEMENT * factor * max(best.by_element, best.by_norm, least),
            said=f"the update of an element of {name} differs from that of one process by "
            f"{moves.by_element:.2g} of their root mean square after {steps} steps",
        )
        if few:
            # Roundings of few elements do not cancel: a common factor is in the relative error.
            continue
        scaled = abs(moves.factor)
        yield Finding(
            name="training update factor",
            error=scaled,
            tolerance=factor * max(abs(best.factor), least / 4),
            said=f"updates of {name} are too large or too small by a factor of {scaled:.2g} "
            f"after {steps} steps",
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Moves:
    """Errors of one parameter's update, relative to the exact update."""

    by_norm: float
    by_element: float
    """The largest of an element, relative to the root mean square of all exact ones."""
    factor: float
    """<error, exact> / <exact, exact>."""
    least: float
    """What rounding the parameter once to its dtype gives."""

    @classmethod
    def of(cls, name: str, found: Training, exact: Training, start: dict[str, Tensor]) -> _Moves:
        before, weights = start[name].double(), found.weights[name]
        right = exact.weights[name].double() - before
        off = weights.double() - before - right
        size = max(float(right.norm()), torch.finfo(torch.float64).tiny)
        roundoff = ROUNDOFF[str(weights.dtype).removeprefix("torch.")]
        return cls(
            by_norm=number(float(off.norm()) / size),
            by_element=number(float(off.abs().max()) / size * off.numel() ** 0.5),
            factor=number(float((off * right).sum()) / size**2),
            least=0.5 * roundoff * float(before.norm()) / size,
        )


def _losses(got: Training, exact: Training, careful: Training, number_format: Format) -> Finding:
    def errors(found: Training) -> list[float]:
        pairs = zip(found.losses, exact.losses, strict=True)
        return [number(abs(loss - right) / abs(right)) for loss, right in pairs]

    found = errors(got)
    worst = max(range(len(found)), key=found.__getitem__)
    # A mean over many tokens, in which roundings cancel.
    least = number_format.least / 4
    return Finding(
        name="training loss",
        error=found[worst],
        tolerance=number_format.factor * max(*errors(careful), least),
        said=f"the loss of step {worst + 1} differs from one process by {found[worst]:.2g} of it",
    )
