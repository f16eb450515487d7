"""Balance of a packed batch: tokens, pairs and received keys of each rank, from what runs.

Placed documents are counted on their placement; layouts that split every document over all ranks
on their blocks of scores, where the keys of all ranks come to all of them. Causal masks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.context.blocks.balance import attended
from parallel.context.blocks.layouts import Layout
from parallel.context.documents.layout import Documents
from parallel.context.documents.lower_bound import least_received
from parallel.context.documents.placement import place


@dataclass(kw_only=True, slots=True, frozen=True)
class DocumentCounts:
    """One forward pass; lists have an entry for each rank."""

    num_tokens: int
    """Tokens of the batch."""
    local_len: int
    """Tokens on each rank, padding included."""
    pairs: list[int]
    """Query-key pairs that the mask keeps, those of padding included."""
    received: list[int]
    """Keys of other ranks that come."""
    least_received: int
    """Keys that would come to all ranks together in any placement as balanced as that of
    :func:`~parallel.context.documents.placement.place`."""

    @property
    def padding(self) -> int:
        """Padding tokens on all ranks together."""
        return len(self.pairs) * self.local_len - self.num_tokens

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest rank over the mean."""
        total = sum(self.pairs)
        return max(self.pairs) * len(self.pairs) / total if total else 1.0


def count_documents(layout: Layout, lengths: Sequence[int]) -> DocumentCounts:
    """Count a packed batch of documents of these lengths."""
    placement = place(tuple(lengths), layout.num_ranks)
    ranks = range(layout.num_ranks)
    bound = least_received(placement)
    if isinstance(layout, Documents):
        return DocumentCounts(
            num_tokens=sum(lengths),
            local_len=placement.local_len,
            pairs=[placement.pairs(rank) for rank in ranks],
            received=[placement.received(rank) for rank in ranks],
            least_received=bound,
        )
    local = sum(map(layout.local_len, lengths))
    return DocumentCounts(
        num_tokens=sum(lengths),
        local_len=local,
        pairs=[sum(_pairs(layout, rank, length) for length in lengths) for rank in ranks],
        received=[(layout.num_ranks - 1) * local] * layout.num_ranks,
        least_received=bound,
    )


def _pairs(layout: Layout, rank: int, length: int) -> int:
    """Pairs that ``rank`` computes of one document that is split over all ranks."""
    local = layout.local_len(length)
    blocks = (layout.block(rank, source, local, True) for source in range(layout.num_ranks))
    return sum(attended(block) for block in blocks if block is not None)
