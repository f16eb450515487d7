"""Terms of the time of each kind of kernel but products; see :mod:`harness.forecast.law`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forecast.law import Shape


def attention(shape: Shape) -> Sequence[float]:
    """An attention pass of any backend: (batch, query heads, key heads, length, head_dim), causal.

    Launch, longest walk along the keys (blocks of queries run in parallel, and few blocks wait for
    it), FLOPs, scores, elements of queries, and of keys.
    """
    batch, heads, kv_heads, length, head_dim = shape
    rows = batch * heads * length
    scores = rows * length / 2
    return (
        1.0,
        length / 1e3,
        scores * head_dim / 1e9,
        scores / 1e6,
        rows * head_dim / 1e6,
        batch * kv_heads * length * head_dim / 1e6,
    )


def bandwidth(shape: Shape) -> Sequence[float]:
    """Kernels that are bound by memory, (launches, bytes): launches and MB."""
    launches, size = shape
    return launches, size / 1e6


def collective(shape: Shape) -> Sequence[float]:
    """A collective operation, (bytes on each rank's link,): latency and MB."""
    (sent,) = shape
    return 1.0, sent / 1e6
