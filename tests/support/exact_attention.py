"""Inputs and float64 attention with which the FlashAttention kernels are compared."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from triton_device import DEVICE, randn

from kernels import BACKENDS, Packing
from kernels.flash import flash_attention


def backend(**options: object) -> Any:
    return BACKENDS["flash_triton"].target(name="flash_triton", **options)  # type: ignore[call-arg]


def inputs(
    batch: int = 1,
    heads: int = 2,
    kv_heads: int = 2,
    q_len: int = 37,
    kv_len: int = 37,
    head_dim: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, do."""
    return (
        randn(batch, heads, q_len, head_dim, dtype=dtype, seed=1),
        randn(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=2),
        randn(batch, kv_heads, kv_len, head_dim, dtype=dtype, seed=3),
        randn(batch, heads, q_len, head_dim, dtype=dtype, seed=4),
    )


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse in float64, differentiable; zero and minus infinity where no key is seen."""
    q, k, v = (x.double() for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    q_len, kv_len = q.shape[2], k.shape[2]
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(kv_len - q_len)
    empty = ~visible.any(-1)
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    # A row of zeros has a gradient where a row of minus infinities has none.
    p = scores.masked_fill(empty[:, None], 0.0).softmax(-1).masked_fill(empty[:, None], 0.0)
    lse = scores.masked_fill(empty[:, None], 0.0).logsumexp(-1) if kv_len else scores.sum(-1)
    return p @ v, lse.masked_fill(empty, -torch.inf)


def exact_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float
) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o, _ = exact(*leaves, causal, scale)
    found = torch.autograd.grad(o, leaves, do.double(), allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found, strict=True)]


def assert_close(
    got: Tensor, expected: Tensor, what: str, limit: float, floor: float = 0.5
) -> None:  # fmt: skip
    """Off by at most ``limit`` times the largest entry, or times ``floor`` if that is more.

    Inputs are standard normal; a gradient may be zero but for rounding of terms of that size.
    """
    assert got.shape == expected.shape, what
    if got.numel() == 0:
        return
    if not expected.isfinite().all():
        assert torch.equal(got.isfinite(), expected.isfinite()), what
        assert (got[~got.isfinite()] == -torch.inf).all(), what
        got, expected = (x.nan_to_num(neginf=0.0) for x in (got, expected))
    error = float((got.detach().double() - expected.detach()).abs().max())
    allowed = limit * max(floor, float(expected.detach().abs().max()))
    assert error <= allowed, f"{what} is off by {error:.3g}, more than {allowed:.3g}"


def gives_equal_bits(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> bool:
    """Whether two calls agree in o and all gradients, bit for bit; causal."""
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = flash_attention(*leaves, causal=True)
        runs.append([o, *torch.autograd.grad(o, leaves, do)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def packed(
    lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Packing]:
    q_len, kv_len = (sum(pair[i] for pair in lengths) for i in (0, 1))
    ends = [
        torch.tensor([0, *itertools.accumulate(pair[i] for pair in lengths)], dtype=torch.int32)
        for i in (0, 1)
    ]
    packing = Packing(
        cu_seqlens_q=ends[0].to(DEVICE),
        cu_seqlens_k=ends[1].to(DEVICE),
        max_q_len=max(pair[0] for pair in lengths),
        max_kv_len=max(pair[1] for pair in lengths),
    )
    return (
        randn(q_len, 4, 24, dtype=dtype, seed=1),
        randn(kv_len, 2, 24, dtype=dtype, seed=2),
        randn(kv_len, 2, 24, dtype=dtype, seed=3),
        randn(q_len, 4, 24, dtype=dtype, seed=4),
        packing,
    )
