"""A packed batch by one call per sequence: right for any backend with an lse, and slow."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.backend import AttentionBackend, Packing


def forward_each(
    backend: AttentionBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Shapes as in :meth:`AttentionBackend.forward_packed`."""
    o = torch.zeros_like(q)
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
    for queries, keys in packing.slices():
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        part, part_lse = backend.forward(
            _dense(q[queries]), _dense(k[keys]), _dense(v[keys]), causal=causal, scale=scale
        )
        o[queries] = part.squeeze(0).transpose(0, 1)
        lse[:, queries] = part_lse.squeeze(0)
    return o, lse


def backward_each(
    backend: AttentionBackend,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    packing: Packing,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes as in :meth:`AttentionBackend.backward_packed`."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for queries, keys in packing.slices():
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        parts = backend.backward(
            _dense(do[queries]),
            _dense(q[queries]),
            _dense(k[keys]),
            _dense(v[keys]),
            _dense(o[queries]),
            lse[:, queries].unsqueeze(0),
            causal=causal,
            scale=scale,
        )
        for whole, tokens, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            whole[tokens] = part.squeeze(0).transpose(0, 1)
    return dq, dk, dv


def _dense(x_THD: Tensor) -> Tensor:
    """One sequence [T, H, D] as a batch of one, [1, H, T, D]."""
    return x_THD.transpose(0, 1).unsqueeze(0)
