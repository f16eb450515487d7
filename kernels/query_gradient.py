"""dq of some queries over several blocks of keys, which come one after another.

A backward call gives its dq rounded to the dtype of q, and whoever has several blocks of keys adds
these up in float32. A kernel that sums dq in float32 itself can go on with its sums from block to
block instead: each number of dq is then rounded once, and 20 bytes of memory traffic for each are
saved at every block after the first (o and do read for rowsum(o * do), the sums read, and the part
written, read and added to a float32 total).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from kernels.problem import AttentionSpec


class QueryBlock(NamedTuple):
    """Consecutive queries of a dense batch, and how many keys they attend to under which mask."""

    start: int
    stop: int
    num_keys: int
    spec: AttentionSpec


class QueryGradient(Protocol):
    """One backward pass of queries whose keys come in blocks, all of them announced before."""

    def add(
        self, block: QueryBlock, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dk and dv of a block's keys, in the shapes of k and v [B, H_kv, num_keys, D]."""
        ...

    def result(self) -> torch.Tensor:
        """dq [B, H, S, D] over all blocks, in the dtype of q; asked for once, at the end."""
        ...


class QueryGradientMemory(NamedTuple):
    """Predicted bytes of a :class:`QueryGradient` beside its arguments and its results."""

    kept: float
    """From the first block to the end."""
    of_blocks: tuple[float, ...]
    """While each of them is added."""
