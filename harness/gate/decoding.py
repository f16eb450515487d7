"""Attention of a step's new tokens over all that a cache holds, in a chosen arithmetic.

Every head of a sequence at once, over its whole history; the last T of K keys are the new tokens'
own. In float64 it is what a decoder is compared with, and in a careful arithmetic it shows how
exact a result of the case's dtype can be: queries after their rotation, probabilities and results
are rounded to it. Shapes: H query heads, G key and value heads, T new tokens, K keys, D head_dim,
R kv_lora_rank, C = R + the width of the rotary part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from harness.gate.comparison import Place, compare, errors_of
from harness.gate.findings import Finding
from harness.gate.scoring import EXACT, Arithmetic
from harness.gate.tolerances import Format


def attended(
    q_HTD: Tensor, k_GKD: Tensor, v_GKD: Tensor, scale: float, arithmetic: Arithmetic
) -> Tensor:
    """o_HTD of heads that share keys by groups."""
    num_heads, num_new = q_HTD.shape[:2]
    num_keys = k_GKD.shape[1]
    q = arithmetic.round(arithmetic.wide(q_HTD)).unflatten(0, (k_GKD.shape[0], -1)).flatten(1, 2)
    k, v = (arithmetic.round(arithmetic.wide(x)) for x in (k_GKD, v_GKD))
    scores = arithmetic.scores(q, k, scale)
    tokens = torch.arange(num_new, device=q.device).repeat(num_heads // k_GKD.shape[0])[:, None]
    hidden = torch.arange(num_keys, device=q.device) > tokens + num_keys - num_new
    p = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    o = arithmetic.round(arithmetic.round(p) @ v)
    return o.flatten(0, 1).unflatten(0, (num_heads, num_new))


def attended_latents(
    q_HTD: Tensor,
    q_rope: Tensor,
    rows_KC: Tensor,
    up_k_HDR: Tensor,
    up_v_HDR: Tensor,
    scale: float,
    arithmetic: Arithmetic,
) -> Tensor:
    """o_HTD of latent attention; W_k is applied to the queries and W_v to the result.

    Args:
        q_rope: the rotated part of the queries, [H, T, C - R].
    """
    wide, rounded = arithmetic.wide, arithmetic.round
    rank = up_k_HDR.shape[-1]
    q_HTR = rounded(rounded(wide(q_HTD)) @ wide(up_k_HDR))
    rows = rows_KC[None]
    o_HTR = attended(
        torch.cat((q_HTR, wide(q_rope)), dim=-1), rows, rows[..., :rank], scale, arithmetic
    )
    return rounded(o_HTR @ wide(up_v_HDR).mT)


def check_rows(
    name: str,
    got: Tensor,
    compute: Callable[[Arithmetic], Tensor],
    careful: Arithmetic,
    number_format: Format,
    place: Place,
) -> Iterator[Finding]:
    """Findings on rows [heads, T, D]; ``compute`` gives them in an arithmetic."""
    if not bool(torch.isfinite(got).all()):
        head, row, column = (~torch.isfinite(got)).nonzero()[0].tolist()
        value = float(got[head, row, column])
        yield Finding(
            name=f"{name} finite",
            error=float("inf"),
            tolerance=0.0,
            said=f"{name} is {value} in {place((head,))}, row {row}",
        )
    exact = compute(EXACT)
    terms = exact.norm(dim=-1) / 2
    rows = torch.arange(got.shape[1]).expand(got.shape[:2])
    yield from compare(
        name,
        errors_of(got, exact, terms),
        errors_of(compute(careful), exact, terms),
        number_format,
        rows=rows,
        place=place,
    )
