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

from kernels.problem import AttentionProblem

ELEMENTS_AT_ONCE = 2**24
"""Elements of a gradient that are widened to float32 at once."""


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
    weight = _by_row(weight, o)
    if torch.is_grad_enabled() and (o.requires_grad or weight.requires_grad):
        return (o * weight).to(o.dtype), total
    # Autograd takes no out=, which spares a float32 copy of o.
    return torch.mul(o, weight, out=torch.empty_like(o)), total


def gradient(do: Tensor, o: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d sinks, like ``sinks``, of o and lse as :func:`add` gives them."""
    weight = (sinks.to(lse.dtype).unsqueeze(-1) - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    tokens = 2 if o.dim() == 4 else 0
    at_once = max(1, ELEMENTS_AT_ONCE * o.shape[tokens] // max(1, o.numel()))
    parts = zip(do.split(at_once, tokens), o.split(at_once, tokens), strict=True)
    dots = torch.cat([(left.to(lse.dtype) * right).sum(-1) for left, right in parts], tokens)
    if o.dim() == 3:
        dots = dots.transpose(0, 1)
    rows = -weight * dots
    return rows.sum(-1 if rows.dim() == 2 else (0, 2)).to(sinks.dtype)


def gradient_workspace(problem: AttentionProblem) -> float:
    """Predicted bytes of :func:`gradient` beside its arguments: products, and do in float32.

    With three numbers of each row: its weight, its dot product, and the product of both.
    """
    rows = problem.batch_size * problem.num_heads * problem.q_len
    copies = 1 if problem.dtype == "float32" else 2
    return 4.0 * (copies * min(rows * problem.v_dim, ELEMENTS_AT_ONCE) + 3 * rows)


def _by_row(x: Tensor, o: Tensor) -> Tensor:
    """[B, H, S] or packed [H, T], to stand beside o."""
    return (x if o.dim() == 4 else x.transpose(0, 1)).unsqueeze(-1)
