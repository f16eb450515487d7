"""A packed batch by one dense call for each sequence: right for any kernel, and slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.problem import AttentionSpec, Packing


def forward_each(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [T_k, H_kv, D], v [T_k, H_kv, D_v] -> o [T, H, D_v] and lse [H, T] float32.

    Args:
        forward: of a dense batch, ``forward(q, k, v, spec) -> (o, lse)``.
        spec: of a packed batch.
    """
    o = torch.zeros_like(q[..., : v.shape[-1]])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=torch.float32)
    dense = replace(spec, packing=None)
    for queries, keys in _sequences(spec.packing):
        part, part_lse = forward(_dense(q[queries]), _dense(k[keys]), _dense(v[keys]), dense)
        o[queries] = part.squeeze(0).transpose(0, 1)
        lse[:, queries] = part_lse.squeeze(0)
    return o, lse


def backward_each(
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward_each`, (dq, dk, dv), by the backward pass of a dense batch."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dense = replace(spec, packing=None)
    for queries, keys in _sequences(spec.packing):
        parts = backward(
            _dense(do[queries]),
            _dense(q[queries]),
            _dense(k[keys]),
            _dense(v[keys]),
            _dense(o[queries]),
            lse[:, queries].unsqueeze(0),
            dense,
        )
        for whole, tokens, part in zip((dq, dk, dv), (queries, keys, keys), parts, strict=True):
            whole[tokens] = part.squeeze(0).transpose(0, 1)
    return dq, dk, dv


def _sequences(packing: Packing | None) -> list[tuple[slice, slice]]:
    """Query and key tokens of each sequence that has both."""
    assert packing is not None, "the batch is packed"
    return [
        (queries, keys)
        for queries, keys in packing.slices()
        if queries.start < queries.stop and keys.start < keys.stop
    ]


def _dense(x_THD: Tensor) -> Tensor:
    """One sequence [T, H, D] as a batch of one, [1, H, T, D]."""
    return x_THD.transpose(0, 1).unsqueeze(0)
