"""Which rows of a result are compared: some of every tile, others at each draw.

Kernels compute tiles of 64 rows or more, and what goes wrong goes wrong by the tile: a boundary, a
mask, a stale buffer. A draw takes rows of every 64 of every head.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 64
"""Rows of the smallest tile that kernels on GPUs use."""

LEAST = 64
"""Rows of a sequence that are compared at least, where it has so many."""


def draw_rows(num_heads: int, num_rows: int, generator: torch.Generator) -> Tensor:
    """Ascending row indices [num_heads, R]; each head has its own, some in every tile."""
    if num_rows <= LEAST:
        return torch.arange(num_rows).expand(num_heads, num_rows)
    starts = torch.arange(0, num_rows, TILE)
    lengths = (num_rows - starts).clamp(max=TILE)
    per_tile = -(-LEAST // len(starts))
    # One in each of as many equal strata of the tile.
    within = torch.rand(num_heads, len(starts), per_tile, generator=generator)
    within = (within + torch.arange(per_tile)) / per_tile * lengths[:, None]
    return (starts[:, None] + within.long().clamp(max=lengths[:, None] - 1)).flatten(1)
