"""A rank's part of a packed batch, whether each sequence is split or the batch is placed whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel.context.blocks.layouts import Layout
from parallel.context.documents.layout import Documents
from parallel.context.documents.placement import place

NO_LOCAL_OFFSETS = (
    "each rank holds parts of other documents, so that offsets of its parts do not tell the batch: "
    "give cu_seqlens= of whole documents"
)


def packed_len(layout: Layout, lengths: Sequence[int]) -> int:
    """Tokens of a rank's part, padding included."""
    if isinstance(layout, Documents):
        return layout.packed_len(lengths)
    return sum(map(layout.local_len, lengths))


def why_padded(layout: Layout, lengths: Sequence[int]) -> str | None:
    """Which tokens do not divide by what, if a rank's part has padding."""
    if isinstance(layout, Documents):
        multiple, tokens = layout.num_ranks, [sum(lengths)]
    else:
        multiple, tokens = layout.multiple, list(lengths)
    for length in tokens:
        if length % multiple:
            return f"{length} tokens do not divide by {multiple}"
    return None


def packed_positions(layout: Layout, rank: int, lengths: Sequence[int]) -> Tensor:
    """Positions of a rank's tokens in their sequences, int64."""
    if isinstance(layout, Documents):
        return layout.packed_positions(lengths, rank)
    return torch.cat([torch.arange(0), *(layout.positions(rank, length) for length in lengths)])


def real_rows(layout: Layout, rank: int, lengths: Sequence[int]) -> Tensor:
    """Which of a rank's tokens are not padding, bool [tokens]."""
    if isinstance(layout, Documents):
        real = place(tuple(lengths), layout.num_ranks).tokens(rank)
        return torch.arange(layout.packed_len(lengths)) < real
    return torch.cat([layout.positions(rank, length) < length for length in lengths])


def check_local_offsets(layout: Layout) -> None:
    """Raise ValueError where offsets of a rank's parts say nothing of the batch."""
    if isinstance(layout, Documents):
        raise ValueError(f"{layout.name}: {NO_LOCAL_OFFSETS}")
