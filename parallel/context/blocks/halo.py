"""The keys of other ranks that a window or a prefix shows a rank, and no others.

Under a causal mask alone a ring passes every rank's keys to nearly all. A window reaches into a
few keys at the end of neighbouring runs, a prefix into the first ones: so each rank gets the rows
that its blocks of scores read, from their owner, and sends home gradients of these rows alone.
Both sides compute the rows from the layout and the mask, without asking each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.context.blocks.rows import DenseRows, PackedRows, Rows
from parallel.context.blocks.score_blocks import ScoreBlock, keys_of


@dataclass(kw_only=True, slots=True, frozen=True)
class Halo:
    """What one rank exchanges with each of the others; None where that is nothing."""

    needed: Sequence[Rows | None]
    """Rows of each source's keys, in the order in which :attr:`Reach.place` counts them."""
    asked: Sequence[Rows | None]
    """Rows of this rank's keys that each of the others needs."""
    asked_once: bool
    """Of a dense batch, whether no two of the others need the same key of this rank."""
    counts: Sequence[int] | None
    """Of a dense batch, for distances t = 1, 2, ..., the most rows that any rank needs of the rank
    t before it; None if these are half of a rank's rows or more, and in a packed batch. If they are
    few, keys of other ranks are kept from a forward pass to its backward pass, which brings none.
    """


def room_for(rows: Rows | None, x: Tensor) -> Tensor:
    """An empty, contiguous tensor for some rows of k or v; of no tokens for None."""
    count = 0 if rows is None else rows.count
    return x.new_empty((count, *x.shape[1:]) if x.dim() == 3 else (*x.shape[:2], count, x.shape[3]))


def keeps(halo: Halo | None) -> bool:
    """Whether a backward pass is given the visits of other ranks' keys in the forward pass."""
    return halo is not None and halo.counts is not None


class Reach:
    """The keys of one source that a rank's blocks read, each once.

    Args:
        by_sequence: the blocks of each sequence, with keys as indices into the source's part.
        starts: where each sequence begins among the source's rows.
    """

    def __init__(self, by_sequence: Sequence[Sequence[ScoreBlock]], starts: Sequence[int]) -> None:
        self._parts = [keys_of(blocks) for blocks in by_sequence]
        self._starts = starts
        lengths = [part.stop - part.start for parts in self._parts for part in parts]
        self._bounds = [0, *itertools.accumulate(lengths)]
        self.num_rows = self._bounds[-1]

    def place(self, sequence: int, keys: slice) -> slice:
        """Where keys of a block are among the rows that arrive."""
        number = sum(map(len, self._parts[:sequence]))
        for part in self._parts[sequence]:
            if part.start <= keys.start and keys.stop <= part.stop:
                start = self._bounds[number] + keys.start - part.start
                return slice(start, start + keys.stop - keys.start)
            number += 1
        assert keys.start == keys.stop, "a block's keys are in one part"
        return slice(0, 0)

    def spans(self) -> list[slice]:
        """The rows of the source, in the order in which they arrive."""
        return [
            slice(start + part.start, start + part.stop)
            for start, parts in zip(self._starts, self._parts, strict=False)
            for part in parts
        ]

    def dense_rows(self, num_rows: int) -> Rows | None:
        """The rows of a source that has so many; None if there are none."""
        spans = self.spans()
        if len(spans) > 1:
            return DenseParts(tuple(spans))
        return DenseRows(spans[0], spans[0] == slice(0, num_rows)) if spans else None

    def packed_rows(self, num_rows: int, device: torch.device) -> Rows | None:
        """:meth:`dense_rows` of a packed batch."""
        if not self.num_rows:
            return None
        index = torch.cat([torch.arange(span.start, span.stop) for span in self.spans()])
        return PackedRows((index.to(device),), torch.equal(index, torch.arange(num_rows)))


@dataclass(slots=True, frozen=True)
class DenseParts:
    """Several slices along S of [B, H, S, D] and of a log-sum-exp [B, H, S], end to end."""

    parts: tuple[slice, ...]
    whole: bool = False

    @property
    def count(self) -> int:
        return sum(self._sizes)

    @property
    def slices(self) -> Sequence[slice] | None:
        return self.parts

    def take(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :, part] for part in self.parts], dim=2)

    def put(self, x: Tensor, part: Tensor) -> None:
        for span, rows in zip(self.parts, part.split(self._sizes, dim=2), strict=True):
            x[:, :, span] = rows

    def add(self, x: Tensor, part: Tensor) -> None:
        for span, rows in zip(self.parts, part.split(self._sizes, dim=2), strict=True):
            x[:, :, span].add_(rows)

    def take_lse(self, lse: Tensor) -> Tensor:
        return self.take(lse)

    def put_lse(self, lse: Tensor, part: Tensor) -> None:
        self.put(lse, part)

    @property
    def _sizes(self) -> list[int]:
        return [part.stop - part.start for part in self.parts]
