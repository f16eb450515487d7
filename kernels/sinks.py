"""Attention sinks: a logit for each query head that takes part in the softmax and has no value.

From the results over the keys alone follow those with sinks, so that a kernel need not know them:
with L' = log(exp L + exp sink), o' = o exp(L - L'). The backward pass of the keys needs no change
at all, since probabilities are exp(score - L') and rowsum(do * o') is what it subtracts. The sink
is one more score s with dP = do . 0, hence ds = exp(sink - L') (0 - rowsum(do * o')).

Source of the idea: gpt-oss (OpenAI 2025, its model card, section 2.2), after "off by one"
attention and StreamingLLM (arXiv:2309.17453).
"""

from __future__ import annotations

import torch
from torch import Tensor


def add(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) over the keys -> (o, lse) over the keys and the sinks; differentiable.

    Args:
        o: [B, H, S, D] with lse [B, H, S], or packed [T, H, D] with lse [H, T].
        sinks: [H].
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    # Without any key and with a sink of minus infinity the total is that too; -inf - -inf is not
    # a number.
    weight = (lse - total.masked_fill(total == float("-inf"), 0.0)).exp()
    return (o * _by_row(weight, o)).to(o.dtype), total


def gradient(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d sinks, like ``sinks``, of o and lse as :func:`add` gives them."""
    weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    dots = (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)
    if o.dim() == 3:
        dots = dots.transpose(0, 1)
    rows = -weight * dots
    return rows.sum(-1 if rows.dim() == 2 else (0, 2)).to(sinks.dtype)


def _by_row(x: Tensor, o: Tensor) -> Tensor:
    """[B, H, S] or packed [H, T], to stand beside o."""
    return (x if o.dim() == 4 else x.transpose(0, 1)).unsqueeze(-1)
