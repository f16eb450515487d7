"""The gradient of sinks, one number for each query head: a sum over all rows of the call.

A sink is a score without a value, so that its gradient by a row is -exp(sink - lse) rowsum(do o)
(:mod:`kernels.sinks` has the derivation). Parts of a call each add their rows, in float64 and by
the careful computation; what the call gave is compared once all have.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.gate.findings import Finding, number
from harness.gate.scoring import EXACT, Arithmetic, Scoring
from harness.gate.tolerances import Format

ELEMENTS_AT_ONCE = 2**24
"""Elements of a tensor that are widened at once."""

ROUNDED_PROBABILITIES = 2.0
"""By how much more the gradient errs where matrices of probabilities and their gradients are
rounded, of whose products it is a sum: the careful computation has their sums by row instead. On
a CPU an explicit softmax in bfloat16 was off by up to 0.4%, where 0.7% would be tolerated else."""


class SinkGradient:
    """The exact gradient of a call's sinks, summed part by part, beside the one that it gave.

    Args:
        given: [H], in the order of query heads.
    """

    def __init__(self, given: Tensor) -> None:
        self._given = given.detach().double()
        self._exact = torch.zeros_like(self._given)
        self._careful = torch.zeros_like(self._given)
        self._squares = torch.zeros_like(self._given)
        self._rows = torch.zeros_like(self._given)
        self._rounds_to: torch.dtype | None = None

    def add(
        self,
        tensors: dict[str, Tensor],
        lse: Tensor,
        scoring: Scoring,
        careful: Arithmetic,
        first_head: int,
    ) -> None:
        """Add the rows of some heads.

        Args:
            tensors: o and do [B, G, H, S, D].
            lse: exact, over keys and sinks, [B, G, H, S].
            first_head: the place of their first in the call.
        """
        dots, norms = _dots(tensors["do"], tensors["o"])
        heads = slice(first_head, first_head + lse.shape[1] * lse.shape[2])
        exact = _weights(lse, scoring, EXACT)
        self._exact[heads] -= _by_head(exact * dots)
        self._careful[heads] -= _by_head(_weights(lse, scoring, careful) * dots.float())
        self._squares[heads] += _by_head((exact * torch.maximum(norms, dots.abs())).square())
        self._rows[heads] += lse.shape[0] * lse.shape[3]
        if careful.rounds_scores:
            self._rounds_to = careful.rounds_to

    def findings(self, number_format: Format) -> Iterator[Finding]:
        """How far the call's gradient is off, in the heads of which rows were added.

        An error is relative to the gradient, or to the root of the sum of its terms' squares where
        the terms cancel, since each of them is off for itself.
        """
        seen = self._rows > 0
        if not bool(seen.any()):
            return
        careful = self._careful
        if self._rounds_to is not None:
            careful = careful.to(self._rounds_to).double()
        size = torch.maximum(self._exact.abs(), 2 * self._squares.sqrt())
        size = size.clamp(min=torch.finfo(torch.float64).tiny)
        off = ((self._given - self._exact).abs() / size).nan_to_num(nan=torch.inf)
        reached = float(((careful - self._exact).abs() / size)[seen].max())
        head = int(off.masked_fill(~seen, -1.0).argmax())
        error = number(float(off[head]))
        least = number_format.least_of_sum(int(self._rows.max()))
        if self._rounds_to is not None:
            least *= ROUNDED_PROBABILITIES
        yield Finding(
            name="dsinks",
            error=error,
            tolerance=number_format.factor * max(reached, least),
            said=f"relative error of dsinks against float64 is {error:.2g} in head {head}",
        )


def _dots(do: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over D of do o, and roots of the sums of its squares, in float64 [B, G, H, S]."""
    step = max(1, ELEMENTS_AT_ONCE * do.shape[-2] // max(1, do.numel()))
    found = [
        (product.sum(-1), product.norm(dim=-1))
        for part_do, part_o in zip(do.split(step, dim=-2), o.split(step, dim=-2), strict=True)
        for product in [part_do.double() * part_o.double()]
    ]
    dots, norms = (torch.cat(parts, dim=-1) for parts in zip(*found, strict=True))
    return dots, norms


def _weights(lse: Tensor, scoring: Scoring, arithmetic: Arithmetic) -> Tensor:
    """The probabilities of the sinks, [B, G, H, S]."""
    sinks = scoring.rounded_sinks(arithmetic)[:, :, None].to(lse.device)
    return (sinks - arithmetic.wide(lse)).exp()


def _by_head(x: Tensor) -> Tensor:
    """The sum over batch and rows of [B, G, H, S], as [G H] in float64."""
    return x.double().sum((0, 3)).flatten()
