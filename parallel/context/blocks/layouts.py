"""Layouts: the tokens of a sequence that each rank holds, and the scores that it computes.

With P ranks and a sequence of N tokens, c = N / 2P:

    contiguous   rank r holds tokens [r N/P, (r+1) N/P): late ranks see far more keys
    zigzag       rank r holds chunks r and 2P-1-r of 2P chunks of c tokens (Llama 3 report,
                 Grattafiori et al. 2024, section 3.3.2)
    striped      rank r holds tokens r, r+P, r+2P, ... (Striped Attention, Brandon et al. 2023)

A layout defines positions, and the :class:`ScoreBlock` between one rank's queries and
another rank's keys. Attention runs exactly these blocks, and FLOPs are counted on them
(:mod:`parallel.context.blocks.balance`), so that the two cannot disagree. A local sequence keeps
the order of the positions, so that causal blocks are causal in local indices too.

Lengths that do not divide are padded at the end of each sequence. Under a causal mask no real
query sees that padding, so results are exact; callers give padded queries no output gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.problem import Mask
from parallel.context.blocks.score_blocks import EMPTY, ScoreBlock, hides_more, keys_of, visible

__all__ = [
    "LAYOUTS",
    "Contiguous",
    "Layout",
    "ScoreBlock",
    "Striped",
    "Zigzag",
    "permute_striped",
    "unpermute_striped",
]


@dataclass(kw_only=True, slots=True, frozen=True)
class Layout:
    """A way to split a sequence over ``num_ranks`` ranks, equally many tokens each."""

    num_ranks: int

    name: ClassVar[str]
    chunks_per_rank: ClassVar[int] = 1
    """Contiguous chunks that a rank's tokens consist of."""

    @property
    def multiple(self) -> int:
        """Sequences are padded to a multiple of this many tokens."""
        return self.num_ranks * self.chunks_per_rank

    def padded(self, length: int) -> int:
        """The least multiple of :attr:`multiple` that holds ``length`` tokens."""
        return -(-length // self.multiple) * self.multiple

    def local_len(self, length: int) -> int:
        """Tokens that each rank holds of a sequence of ``length``, padding included."""
        return self.padded(length) // self.num_ranks

    def runs(self, rank: int, length: int) -> list[range]:
        """Positions that ``rank`` holds, in local order, as ranges of the padded sequence."""
        raise NotImplementedError

    @property
    def is_in_order(self) -> bool:
        """Whether all ranks' parts, laid end to end, are the sequence."""
        return False

    def pieces(self, length: int) -> list[tuple[int, slice]]:
        """The runs of all ranks in the order of their positions: the rank, and its local tokens.

        Raises ValueError where runs have gaps.
        """
        found = []
        for rank in range(self.num_ranks):
            for start, run in _starts(self.runs(rank, length)):
                if run.step != 1:
                    raise ValueError(f"{self.name}: runs have gaps")
                found.append((run.start, rank, slice(start, start + len(run))))
        return [(rank, part) for _, rank, part in sorted(found, key=lambda piece: piece[0])]

    def block(self, rank: int, source: int, local_len: int, causal: bool) -> ScoreBlock | None:
        """The block of ``rank``'s queries and ``source``'s keys; None where the mask keeps no pair.

        Both slices are local: of the rank's ``local_len`` queries and of the source's keys.
        """
        raise NotImplementedError

    def blocks(self, rank: int, source: int, local_len: int, mask: Mask) -> list[ScoreBlock]:
        """All blocks of ``rank``'s queries and ``source``'s keys; none where no pair is kept.

        Under a causal mask alone, or none, that is :meth:`block`. Else there is a block for each
        pair of runs that see each other; of a rank's own keys those of a run with itself come
        first, in which each query sees at least one key.
        """
        length = local_len * self.num_ranks
        mask = hides_more(mask, length)
        if mask.is_plain:
            block = self.block(rank, source, local_len, mask.causal)
            return [] if block is None else [block]
        own, theirs = (_starts(self.runs(r, length)) for r in (rank, source))
        found = [
            (rank == source and q_start != k_start, block.moved(q_start, k_start))
            for q_start, queries in own
            for k_start, keys in theirs
            if (block := visible(queries, keys, mask)) is not None
        ]
        return [block for _, block in sorted(found, key=lambda pair: pair[0])]

    def num_needed(self, rank: int, source: int, local_len: int, mask: Mask) -> int:
        """How many keys of ``source`` any block of ``rank`` reads; of its own none are needed."""
        if rank == source:
            return 0
        parts = keys_of(self.blocks(rank, source, local_len, mask))
        return sum(part.stop - part.start for part in parts)

    def few_needed(self, local_len: int, mask: Mask) -> list[int] | None:
        """For distances t = 1, 2, ..., the most keys that any rank needs of the rank t before it.

        None if these are half of a rank's tokens or more, all together.
        """
        ranks = range(self.num_ranks)
        counts = [
            max(self.num_needed(to, (to - distance) % len(ranks), local_len, mask) for to in ranks)
            for distance in ranks[1:]
        ]
        return counts if 2 * sum(counts) < local_len else None

    def gathered_blocks(self, rank: int, local_len: int, mask: Mask) -> list[ScoreBlock]:
        """One block for each run of ``rank``, with the keys of all ranks that its queries see.

        Keys are in the order of their positions. Raises ValueError as :meth:`prefix_blocks` does.
        """
        length = local_len * self.num_ranks
        mask = hides_more(mask, length)
        blocks = self.prefix_blocks(rank, local_len, mask.causal)
        if mask.is_plain:
            return blocks
        found = []
        for start, run in _starts(self.runs(rank, length)):
            block = visible(run, range(length), mask)
            found.append(EMPTY if block is None else block.moved(start, 0))
        return found

    def prefix_blocks(self, rank: int, local_len: int, causal: bool) -> list[ScoreBlock]:
        """The blocks of ``rank``'s queries and all keys in the order of their positions.

        One for each run of its tokens: queries at positions [a, b) see keys [0, b), the causal
        mask aligned to the bottom right. Raises ValueError where runs have gaps.
        """
        blocks, start = [], 0
        for run in self.runs(rank, local_len * self.num_ranks):
            if run.step != 1:
                raise ValueError(f"{self.name}: keys up to a query are no prefix of a run")
            kv_len = run.stop if causal else local_len * self.num_ranks
            q = slice(start, start + len(run))
            blocks.append(ScoreBlock(q=q, kv=slice(0, kv_len), causal=causal))
            start += len(run)
        return blocks

    def positions(self, rank: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Positions of the local tokens, int64 [local_len]; those of padding are past the end."""
        runs = self.runs(rank, length)
        return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in runs])

    def shard(self, x: torch.Tensor, rank: int, dim: int, fill: float = 0) -> torch.Tensor:
        """The rank's part of ``x`` along ``dim``, [..., N, ...] -> [..., local_len, ...].

        Missing tokens of a length that does not divide are ``fill``. On x's device, and
        differentiable.
        """
        x = _pad(x, dim, self.padded(x.shape[dim]), fill)
        return torch.cat([_along(x, dim, run) for run in self.runs(rank, x.shape[dim])], dim)

    def unshard(
        self, shards: Sequence[torch.Tensor], dim: int, length: int | None = None
    ) -> torch.Tensor:
        """The whole sequence from all ranks' parts in rank order; the inverse of :meth:`shard`.

        Args:
            length: tokens without padding; None keeps the padding.
        """
        local_len = shards[0].shape[dim]
        shape = list(shards[0].shape)
        shape[dim] = padded = local_len * self.num_ranks
        whole = shards[0].new_empty(shape)
        for rank, part in enumerate(shards):
            start = 0
            for run in self.runs(rank, padded):
                _along(whole, dim, run).copy_(part.narrow(dim, start, len(run)))
                start += len(run)
        return whole if length is None else whole.narrow(dim, 0, length)

    def shard_packed(
        self, x: torch.Tensor, lengths: Sequence[int], rank: int, dim: int = 0, fill: float = 0
    ) -> torch.Tensor:
        """The rank's part of sequences that lie end to end along ``dim``, each split by itself."""
        parts = x.split(list(lengths), dim)
        return torch.cat([self.shard(part, rank, dim, fill) for part in parts], dim)

    def unshard_packed(
        self, shards: Sequence[torch.Tensor], lengths: Sequence[int], dim: int = 0
    ) -> torch.Tensor:
        """The inverse of :meth:`shard_packed`; padding is left out."""
        local = [self.local_len(length) for length in lengths]
        by_rank = [shard.split(local, dim) for shard in shards]
        wholes = [
            self.unshard([parts[index] for parts in by_rank], dim, length)
            for index, length in enumerate(lengths)
        ]
        return torch.cat(wholes, dim)


@dataclass(kw_only=True, slots=True, frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th of P equal parts."""

    name: ClassVar[str] = "contiguous"

    @property
    def is_in_order(self) -> bool:
        return True

    def runs(self, rank: int, length: int) -> list[range]:
        local = self.local_len(length)
        return [range(rank * local, (rank + 1) * local)]

    def block(self, rank: int, source: int, local_len: int, causal: bool) -> ScoreBlock | None:
        if causal and source > rank:
            return None
        everything = slice(0, local_len)
        return ScoreBlock(q=everything, kv=everything, causal=causal and source == rank)


@dataclass(kw_only=True, slots=True, frozen=True)
class Zigzag(Layout):
    """Rank r holds chunks r and 2P-1-r, an early and a late one: equal work under a causal mask."""

    name: ClassVar[str] = "zigzag"
    chunks_per_rank: ClassVar[int] = 2

    def runs(self, rank: int, length: int) -> list[range]:
        chunk = self.local_len(length) // 2
        late = 2 * self.num_ranks - 1 - rank
        return [range(i * chunk, (i + 1) * chunk) for i in (rank, late)]

    def block(self, rank: int, source: int, local_len: int, causal: bool) -> ScoreBlock | None:
        everything = slice(0, local_len)
        if not causal or source == rank:
            return ScoreBlock(q=everything, kv=everything, causal=causal)
        half = local_len // 2
        if source < rank:
            # The source's early chunk lies before both of ours, and its late one after both.
            return ScoreBlock(q=everything, kv=slice(0, half), causal=False)
        return ScoreBlock(q=slice(half, local_len), kv=everything, causal=False)


@dataclass(kw_only=True, slots=True, frozen=True)
class Striped(Layout):
    """Rank r holds every P-th token from the r-th on."""

    name: ClassVar[str] = "striped"

    def runs(self, rank: int, length: int) -> list[range]:
        return [range(rank, self.padded(length), self.num_ranks)]

    def block(self, rank: int, source: int, local_len: int, causal: bool) -> ScoreBlock | None:
        if not causal or source <= rank:
            return ScoreBlock(q=slice(0, local_len), kv=slice(0, local_len), causal=causal)
        if local_len == 1:
            return None
        # Keys with our query's local index stand after it: a strictly causal mask, which is the
        # causal one without the first query and the last key.
        return ScoreBlock(q=slice(1, local_len), kv=slice(0, local_len - 1), causal=True)


LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Contiguous, Zigzag, Striped)}


def permute_striped(x: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """``b (n d) -> b (d n)`` along ``dim``, d ranks: a split into d equal parts is then striped.

    Output i is input (i mod n) d + i div n: 16 tokens on 4 ranks become 0, 4, 8, 12, 1, 5, ...
    Raises ValueError unless ``num_ranks`` divides the length.
    """
    return _swap(x, dim, (-1, num_ranks), num_ranks)


def unpermute_striped(x: torch.Tensor, dim: int, num_ranks: int) -> torch.Tensor:
    """The inverse of :func:`permute_striped`: output i is input (i mod d) n + i div d."""
    return _swap(x, dim, (num_ranks, -1), num_ranks)


def _swap(x: torch.Tensor, dim: int, sizes: tuple[int, int], num_ranks: int) -> torch.Tensor:
    dim %= x.dim()
    if x.shape[dim] % num_ranks:
        raise ValueError(f"dim {dim} has {x.shape[dim]} entries: must be a multiple of {num_ranks}")
    return x.unflatten(dim, sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _starts(runs: Sequence[range]) -> list[tuple[int, range]]:
    """Each run after the local index of its first token."""
    found, start = [], 0
    for run in runs:
        found.append((start, run))
        start += len(run)
    return found


def _along(x: torch.Tensor, dim: int, run: range) -> torch.Tensor:
    """A view of ``x`` with the entries of ``run`` along ``dim``."""
    index = [slice(None)] * x.dim()
    index[dim] = slice(run.start, run.stop, run.step)
    return x[tuple(index)]


def _pad(x: torch.Tensor, dim: int, length: int, fill: float) -> torch.Tensor:
    missing = length - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, fill)], dim)
