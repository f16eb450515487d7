"""Terms of the time of each kind of kernel but products; see :mod:`harness.forecast.law`."""

from __future__ import annotations

from collections.abc import Sequence

from harness.forecast.law import Shape
from harness.forecast.masks import keys_of


def attention(shape: Shape) -> Sequence[float]:
    """An attention pass of any backend; shapes as in :mod:`harness.forecast.masks`.

    Launch, longest walk along the keys (blocks of queries run in parallel, and few blocks wait for
    it), FLOPs, scores, elements of queries, and of keys, and FLOPs of keys that a window hides,
    which a kernel that has no bound of its own computes all the same.
    """
    batch, heads, kv_heads, length, head_dim, reach, passes = (*shape, 1.0, 1.0)[:7]
    rows = batch * heads * length
    keys = keys_of(length, reach)
    scores = rows * keys.computed
    return (
        1.0,
        keys.longest / 1e3,
        scores * head_dim / 1e9,
        scores * passes / 1e6,
        rows * head_dim / 1e6,
        batch * kv_heads * length * head_dim / 1e6,
        rows * keys.hidden * head_dim / 1e9,
    )


def attention_with_scores(shape: Shape) -> Sequence[float]:
    """The same of a backend that keeps its scores in memory: with elements beyond the cache."""
    batch, heads, _, length = shape[:4]
    kept = batch * heads * length * length
    return (*attention(shape), max(0.0, kept - CACHED_SCORES) / 1e6)


CACHED_SCORES = 25e6
"""Scores in 16 bits that a cache of 50 MB holds from one kernel to the next: the L2 of the H100 and
the H200 (NVIDIA H100 architecture whitepaper, table 2)."""


def bandwidth(shape: Shape) -> Sequence[float]:
    """Kernels that are bound by memory, (launches, bytes): launches and MB."""
    launches, size = shape
    return launches, size / 1e6


def collective(shape: Shape) -> Sequence[float]:
    """A collective operation, (bytes on each rank's link,): latency and MB."""
    (sent,) = shape
    return 1.0, sent / 1e6
