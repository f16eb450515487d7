"""Attention under a window, a prefix, a cap and sinks, by its definition in float64.

Which key a query sees is asked pair by pair, as the documentation words it, and gradients are
autograd's: nothing here is shared with what it judges.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels import AttentionProblem, AttentionSpec


@dataclass(kw_only=True, slots=True)
class Masked:
    """Tensors of a call, and its results in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    sinks: Tensor | None
    o: Tensor
    lse: Tensor
    """Over the keys and the sinks."""
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    spec: AttentionSpec


def is_seen(problem: AttentionProblem, query: int, key: int) -> bool:
    """Whether a query sees a key."""
    position = query + problem.kv_len - problem.q_len + problem.shift
    if key < problem.prefix_len:
        return True
    if problem.causal and key > position:
        return False
    return problem.window is None or abs(position - key) < problem.window


@cache
def masked_attention(problem: AttentionProblem) -> Masked:
    """A call of a problem on random tensors, with a scale that is not the usual one."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(problem.device, getattr(torch, problem.dtype))

    batch, heads, kv_heads = problem.batch_size, problem.num_heads, problem.num_kv_heads
    q = randn(batch, heads, problem.q_len, problem.head_dim)
    k, v = (randn(batch, kv_heads, problem.kv_len, problem.head_dim) for _ in "kv")
    do = randn(*q.shape)
    sinks = randn(heads).float() if problem.sinks else None
    scale = 0.7 * problem.head_dim**-0.5
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    logits = None if sinks is None else sinks.double().cpu().requires_grad_()
    group = heads // kv_heads
    scores = leaves[0] @ leaves[1].repeat_interleave(group, 1).mT * scale
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    seen = [[is_seen(problem, i, j) for j in range(problem.kv_len)] for i in range(problem.q_len)]
    scores = scores.masked_fill(~torch.tensor(seen), -torch.inf)
    columns = scores
    if logits is not None:
        columns = torch.cat([scores, logits[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    lse = columns.logsumexp(-1)
    empty = lse.detach() == -torch.inf
    p = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp().masked_fill(empty[..., None], 0.0)
    o = p @ leaves[2].repeat_interleave(group, 1)
    inputs = leaves if logits is None else [*leaves, logits]
    gradients = torch.autograd.grad(o, inputs, do.double().cpu())
    gradients = tuple(x.nan_to_num() for x in gradients) if bool(empty.any()) else gradients
    return Masked(
        q=q,
        k=k,
        v=v,
        do=do,
        sinks=sinks,
        o=o.detach(),
        lse=lse.detach(),
        dq=gradients[0],
        dk=gradients[1],
        dv=gradients[2],
        dsinks=None if logits is None else gradients[3],
        spec=AttentionSpec(
            causal=problem.causal,
            scale=scale,
            window=problem.window,
            prefix_len=problem.prefix_len,
            shift=problem.shift,
            softcap=problem.softcap,
            sinks=sinks,
        ),
    )
