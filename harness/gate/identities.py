"""Sums over whole heads that any attention keeps, at the cost of reading its tensors once.

With scores s_ij = scale q_i k_j, the gradient of the loss by a factor on all scores of a head is
sum(q dq), and sum(k dk) as well; the gradient by a factor on its values is sum(v dv), and sum(o do)
as well. Heads of queries that share keys and values are added. No row is left out, so a tile that
no draw has met shows here if it is wrong by more than the sum's noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from harness.gate.comparison import Place
from harness.gate.findings import Finding, number
from harness.gate.sampling import TILE
from harness.gate.tolerances import Format

DEVIATIONS = 8.0
"""Multiples of the noise of a sum: of so many independent sums none reaches it by chance."""

PAIRS = {"q dq = k dk": ("q", "dq", "k", "dk"), "o do = v dv": ("o", "do", "v", "dv")}

BLOCK_ELEMENTS = 2**22
"""Elements of a tensor that are widened at once."""


def check_identities(
    tensors: dict[str, Tensor],
    reached: dict[str, float],
    terms_of_dq: Tensor,
    number_format: Format,
    place: Place,
) -> Iterator[Finding]:
    """The two identities for every batch entry and key-value head.

    Args:
        tensors: q, o, do, dq [B, G, H, S, D] and k, v, dk, dv [B, G, K, D].
        reached: relative errors of tensors in a careful computation; by the error of each of its
            elements, a sum of independent ones is off by the root of their squares.
        terms_of_dq: norms [B, G, H, R] of the terms of some rows of dq. Where these cancel, what is
            left of dq and dk is noise, and so is the sum.
        number_format: of the results; it says how far errors may be shared by many elements.
        place: says where a batch entry and key-value head are.
    """
    deviations = DEVIATIONS * number_format.shared_factor
    length = tensors["q"].shape[-2]
    cancelled = terms_of_dq.double().square().mean(-1).sum(-1) * length * 4
    size_of_q = tensors["q"][..., :TILE, :].double().square().mean((-1, -2, -3))
    for name, (a, b, c, d) in PAIRS.items():
        left, left_squares = _sums(tensors[a], tensors[b])
        right, right_squares = _sums(tensors[c], tensors[d])
        squares = left_squares + right_squares
        if b == "dq":
            squares = torch.maximum(squares, cancelled * size_of_q)
        noise = squares.sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        off = ((left - right).abs() / noise).nan_to_num(nan=torch.inf)
        flat = int(off.argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), off.shape))
        error = number(float(off.flatten()[flat]))
        yield Finding(
            name=name,
            error=error,
            tolerance=deviations * max(reached[part] for part in (a, b, c, d) if part in reached),
            said=(
                f"sum({a} {b}) and sum({c} {d}) differ by {error:.2g} of their terms' norm in "
                f"{place(index)}"
            ),
        )


def _sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of x y and of its squares over all but batch and key-value heads, in float64 [B, G]."""
    batch, heads = x.shape[:2]
    rows = x.shape[-2]
    step = max(1, BLOCK_ELEMENTS * rows // max(1, x.numel()))
    total = torch.zeros(2, batch, heads, dtype=torch.float64, device=x.device)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        product = (x[..., part, :].double() * y[..., part, :].double()).flatten(2)
        total[0] += product.sum(-1)
        total[1] += product.square_().sum(-1)
    return total[0], total[1]
