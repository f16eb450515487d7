"""The schedule of a rank: its attention calls, over a dense or a packed batch.

A :class:`KernelCall` attends from rows of queries to rows of keys under a mask. A
:class:`RankSchedule` holds the calls of one rank for one shape of batch; the loops of
:mod:`parallel.context.blocks.loops` run them and know nothing of layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels import AttentionSpec, Packing
from kernels.problem import Mask
from kernels.query_gradient import QueryBlock
from parallel.context.blocks.arrangement import Arrangement, sums_of
from parallel.context.blocks.halo import Halo, Reach, keeps
from parallel.context.blocks.layouts import Layout, ScoreBlock
from parallel.context.blocks.rows import DenseRows, PackedRows, Rows
from parallel.context.blocks.score_blocks import EMPTY, begins, disjoint, hides_more, keys_of


@dataclass(kw_only=True, slots=True, frozen=True)
class KernelCall:
    """One call of the attention kernel."""

    q: Rows
    kv: Rows
    first: bool
    """Whether it is the first call with its queries, so that there is no result to merge with."""
    spec: AttentionSpec
    """Mask, scale, cap, and of a packed call the lengths of its sequences in the selected rows."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Scores:
    """How scores are made of q and k, for the whole sequence and each of its blocks."""

    scale: float
    softcap: float | None = None

    def under(self, mask: Mask, packing: Packing | None = None) -> AttentionSpec:
        """The arguments of a call."""
        return AttentionSpec(
            causal=mask.causal,
            scale=self.scale,
            packing=packing,
            window=mask.window,
            prefix_len=mask.prefix_len,
            shift=mask.shift,
            softcap=self.softcap,
        )


class RankSchedule(Protocol):
    """The kernel calls of one rank for one shape of batch."""

    accumulates: bool
    """Whether any query meets keys in more than one call, so that results are merged."""
    head_dim_of: tuple[int, int]
    """The dimension of heads in q, k, v and o, and in the log-sum-exp."""

    halo: Halo | None
    """Set where ranks need some of the others' keys alone: :meth:`of_source` then has calls with
    the rows that ``halo.needed`` names."""
    merges_once: bool
    """Of a dense batch with a halo, whether no query meets keys in more than two calls."""
    query_blocks: Sequence[QueryBlock]
    """The calls of :meth:`of_source`, those with own keys first, where every rank's keys come whole
    and queries meet keys in several calls of a dense batch; else none."""
    arrangement: Arrangement | None
    """How :meth:`of_all` expects the keys of all ranks; None where they are not gathered."""

    def of_source(self, source: int) -> Sequence[KernelCall]:
        """Kernel calls with the keys that rank ``source`` holds."""
        ...

    def of_all(self) -> Sequence[KernelCall]:
        """Kernel calls with all keys, as :attr:`arrangement` says where they lie."""
        ...

    def arrange(self, gathered: Tensor) -> Tensor:
        """All ranks' keys [P, ...] in the order that :meth:`of_all` expects."""
        ...

    def by_rank(self, arranged: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`, contiguous."""
        ...


TakesRectangles = Callable[[int, int], bool]
"""Whether the kernel takes a causal block of these many queries and keys."""


class DenseSchedule:
    """Kernel calls over [B, H, local_len, D].

    Args:
        prefixes: prepare :meth:`of_all`, for keys gathered from all ranks; else
            :meth:`of_source`.
        takes_rectangles: a causal block that the kernel cannot take is cut in two, a full
            rectangle and a causal square.
    """

    head_dim_of = (1, 1)

    def __init__(
        self,
        layout: Layout,
        rank: int,
        local_len: int,
        mask: Mask,
        scores: Scores,
        *,
        prefixes: bool,
        takes_rectangles: TakesRectangles,
    ) -> None:
        self._layout = layout
        self._of_all: list[KernelCall] = []
        self._of_source: list[list[KernelCall]] = []
        self.halo: Halo | None = None
        if not prefixes and not hides_more(mask, local_len * layout.num_ranks).is_plain:
            self.halo = _halo(
                rank,
                layout.num_ranks,
                lambda to, source: Reach(
                    [layout.blocks(to, source, local_len, mask)], [0]
                ).dense_rows(local_len),
                layout.few_needed(local_len, mask),
                dense=True,
            )
        if prefixes:
            for block in layout.gathered_blocks(rank, local_len, mask):
                self._of_all += [
                    _dense_call(
                        part, scores, local_len, local_len * layout.num_ranks, first=index == 0
                    )
                    for index, part in enumerate(cut(block, takes_rectangles))
                ]
        else:
            for source in range(layout.num_ranks):
                blocks = layout.blocks(rank, source, local_len, mask)
                firsts = begins(blocks) if source == rank else [False] * len(blocks)
                kv_len = local_len
                if self.halo is not None and source != rank:
                    reach = Reach([blocks], [0])
                    blocks = [replace(block, kv=reach.place(0, block.kv)) for block in blocks]
                    kv_len = reach.num_rows
                self._of_source.append(
                    [
                        _dense_call(block, scores, local_len, kv_len, first=first)
                        for block, first in zip(blocks, firsts, strict=True)
                    ]
                )
        self.arrangement = (
            _by_position(layout, local_len, mask, [call.kv for call in self._of_all])
            if prefixes
            else None
        )
        later = [c for c in itertools.chain(self._of_all, *self._of_source) if not c.first]
        self.accumulates = bool(later)
        self.merges_once = self.halo is not None and disjoint(_slices([c.q for c in later]))
        self.query_blocks: Sequence[QueryBlock] = ()
        if self.halo is None and any(not c.first for calls in self._of_source for c in calls):
            # As a ring visits them, which is not the order of the ranks.
            steps = (
                self._of_source[(rank - step) % layout.num_ranks]
                for step in range(layout.num_ranks)
            )
            self.query_blocks = [query_block(call) for call in itertools.chain(*steps)]
        # A window with few keys of other ranks, half as wide as a run of tokens at most.
        assert self.merges_once or not keeps(self.halo), "a query sees keys of one other rank"

    def of_source(self, source: int) -> Sequence[KernelCall]:
        return self._of_source[source]

    def of_all(self) -> Sequence[KernelCall]:
        return self._of_all

    def arrange(self, gathered: Tensor) -> Tensor:
        if self._layout.is_in_order:
            return gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)
        # Piece by piece, in one operation.
        length = self._layout.num_ranks * gathered.shape[3]
        found = [gathered[rank, :, :, part] for rank, part in self._layout.pieces(length)]
        return torch.cat(found, dim=2)

    def by_rank(self, arranged: Tensor) -> Tensor:
        layout = self._layout
        if not layout.is_in_order:
            length = arranged.shape[2]
            runs = itertools.chain(*(layout.runs(rank, length) for rank in range(layout.num_ranks)))
            arranged = torch.cat([arranged[:, :, run.start : run.stop] for run in runs], dim=2)
        return arranged.unflatten(2, (layout.num_ranks, -1)).permute(2, 0, 1, 3, 4).contiguous()


def _by_position(layout: Layout, local_len: int, mask: Mask, calls: Sequence[Rows]) -> Arrangement:
    """The keys of all ranks in the order of their positions.

    Args:
        calls: the rows of keys that each call of this rank reads.
    """
    ranks = range(layout.num_ranks)
    places: list[list[tuple[range, range]]] = [[] for _ in ranks]
    start = 0
    for rank, part in layout.pieces(local_len * len(ranks)):
        own = range(part.start, part.stop)
        places[rank].append((own, range(start, start + len(own))))
        start += len(own)
    seen = [keys_of(layout.gathered_blocks(rank, local_len, mask)) for rank in ranks]
    return Arrangement(
        dim=2,
        num_rows=start,
        places=tuple(map(tuple, places)),
        seen=tuple(tuple(range(part.start, part.stop) for part in parts) for parts in seen),
        sums=sums_of(_slices(calls)),
    )


def _dense_call(
    block: ScoreBlock, scores: Scores, q_len: int, kv_len: int, *, first: bool
) -> KernelCall:
    return KernelCall(
        q=DenseRows(block.q, whole=block.q_len == q_len),
        kv=DenseRows(block.kv, whole=block.kv_len == kv_len),
        first=first,
        spec=scores.under(block.mask),
    )


def query_block(call: KernelCall) -> QueryBlock:
    """A call of a dense batch."""
    (queries,) = _slices([call.q])
    return QueryBlock(queries.start, queries.stop, call.kv.count, call.spec)


def cut(block: ScoreBlock, takes_rectangles: TakesRectangles) -> list[ScoreBlock]:
    """The block, or the two that make it up, for kernels that know causal squares only."""
    seen_by_all = block.kv_len - block.q_len
    plain_causal = block.causal and block.mask.is_plain
    if not plain_causal or seen_by_all == 0 or takes_rectangles(block.q_len, block.kv_len):
        return [block]
    edge = block.kv.start + seen_by_all
    return [
        ScoreBlock(q=block.q, kv=slice(block.kv.start, edge), causal=False),
        ScoreBlock(q=block.q, kv=slice(edge, block.kv.stop), causal=True),
    ]


class PackedSchedule:
    """Kernel calls over [T, H, D], whose sequences are each split by the layout alone.

    Keys gathered from all ranks stay in the order in which they arrive: calls find theirs by
    index, which also brings them into the order of their positions.

    Args:
        lengths: real tokens of each whole sequence.
        fused: make one call of all runs, with the keys that several of them see repeated,
            instead of one call for each run.
    """

    head_dim_of = (1, 0)

    def __init__(
        self,
        layout: Layout,
        rank: int,
        lengths: Sequence[int],
        mask: Mask,
        scores: Scores,
        *,
        prefixes: bool,
        fused: bool,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._scores = scores
        self._device = device
        self._local = [layout.local_len(length) for length in lengths]
        self._starts = [0, *itertools.accumulate(self._local)]
        self._of_all: list[KernelCall] = []
        self._of_source: list[list[KernelCall]] = []
        self.halo: Halo | None = None
        self.merges_once = False
        self.query_blocks: Sequence[QueryBlock] = ()
        self._masks = [within(mask, length) for length in lengths]
        plain = (
            hides_more(own, local * layout.num_ranks).is_plain
            for own, local in zip(self._masks, self._local, strict=True)
        )
        if not prefixes and not all(plain):
            self.halo = _halo(
                rank,
                layout.num_ranks,
                lambda to, source: self._reach(to, source).packed_rows(self._starts[-1], device),
                None,
                dense=False,
            )
        if prefixes:
            by_sequence = [
                layout.gathered_blocks(rank, local, own)
                for local, own in zip(self._local, self._masks, strict=True)
            ]
            # The same run of every sequence, one run after another.
            by_run = [list(blocks) for blocks in zip(*by_sequence, strict=True)]
            arrived = self._arrival_index()
            groups = [by_run] if fused else [[run] for run in by_run]
            self._of_all = [
                self._prefix_call(alike, arrived) for group in groups for alike in _by_mask(group)
            ]
        else:
            self._of_source = [
                self._block_calls(rank, source) for source in range(layout.num_ranks)
            ]
        self.arrangement = _by_rank(layout.num_ranks, self._starts[-1]) if prefixes else None
        calls = itertools.chain(self._of_all, *self._of_source)
        self.accumulates = any(not call.first for call in calls)

    def of_source(self, source: int) -> Sequence[KernelCall]:
        return self._of_source[source]

    def of_all(self) -> Sequence[KernelCall]:
        return self._of_all

    def arrange(self, gathered: Tensor) -> Tensor:
        return gathered.flatten(0, 1)

    def by_rank(self, arranged: Tensor) -> Tensor:
        return arranged.unflatten(0, (self._layout.num_ranks, -1))

    def _arrival_index(self) -> list[Tensor]:
        """For each sequence, the indices of its tokens in all ranks' parts laid end to end."""
        num_local = self._starts[-1]
        found = []
        for start, local in itertools.pairwise(self._starts):
            parts = [
                torch.arange(start, local) + rank * num_local
                for rank in range(self._layout.num_ranks)
            ]
            found.append(self._layout.unshard(parts, dim=0))
        return found

    def _prefix_call(
        self, runs: Sequence[Sequence[ScoreBlock]], arrived: Sequence[Tensor]
    ) -> KernelCall:
        """One call for the given runs, each a block of every sequence, of one mask but empty ones.

        ``runs`` with a block each for every sequence.
        """
        blocks = [block for run in runs for block in run]
        kv_parts = tuple(
            torch.cat([index[block.kv] for index, block in zip(arrived, run, strict=True)])
            for run in runs
        )
        q_parts = tuple(self._q_index(run) for run in runs)
        return KernelCall(
            q=self._rows(q_parts, self._starts[-1]),
            kv=self._rows(kv_parts, self._starts[-1] * self._layout.num_ranks),
            first=True,
            spec=self._scores.under(_mask_of(blocks), self._packing(blocks)),
        )

    def _blocks(self, rank: int, source: int) -> list[list[ScoreBlock]]:
        """The blocks of each sequence."""
        return [
            self._layout.blocks(rank, source, local, own)
            for local, own in zip(self._local, self._masks, strict=True)
        ]

    def _reach(self, rank: int, source: int) -> Reach:
        return Reach(self._blocks(rank, source), self._starts)

    def _block_calls(self, rank: int, source: int) -> list[KernelCall]:
        """Of each sequence the first block in one call, the second in another, and so on.

        Blocks of different masks are in different calls.
        """
        by_sequence = self._blocks(rank, source)
        firsts = [begins(blocks) if source == rank else [] for blocks in by_sequence]
        num_local = num_keys = self._starts[-1]
        reach = None
        if self.halo is not None and source != rank:
            reach = self._reach(rank, source)
            num_keys = reach.num_rows
        calls = []
        for place in range(max(map(len, by_sequence), default=0)):
            run = [blocks[place] if place < len(blocks) else EMPTY for blocks in by_sequence]
            for first in (True, False):
                own = [
                    block if (place < len(begin) and begin[place]) is first else EMPTY
                    for block, begin in zip(run, firsts, strict=True)
                ]
                for (blocks,) in _by_mask([own]):
                    calls.append(
                        KernelCall(
                            q=self._rows((self._q_index(blocks),), num_local),
                            kv=self._rows((self._kv_index(blocks, reach),), num_keys),
                            first=first,
                            spec=self._scores.under(_mask_of(blocks), self._packing(blocks)),
                        )
                    )
        return calls

    def _q_index(self, blocks: Sequence[ScoreBlock]) -> Tensor:
        return _joined(self._starts, [block.q for block in blocks])

    def _kv_index(self, blocks: Sequence[ScoreBlock], reach: Reach | None) -> Tensor:
        if reach is None:
            return _joined(self._starts, [block.kv for block in blocks])
        places = [reach.place(number, block.kv) for number, block in enumerate(blocks)]
        return _joined([0] * len(places), places)

    def _rows(self, parts: tuple[Tensor, ...], num_tokens: int) -> PackedRows:
        whole = len(parts) == 1 and torch.equal(parts[0], torch.arange(num_tokens))
        return PackedRows(tuple(part.to(self._device) for part in parts), whole)

    def _packing(self, blocks: Sequence[ScoreBlock]) -> Packing:
        q_lens = [block.q_len for block in blocks]
        kv_lens = [block.kv_len for block in blocks]
        cu_q, cu_k = (
            torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32).to(self._device)
            for lens in (q_lens, kv_lens)
        )
        return Packing(
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            max_q_len=max(q_lens),
            max_kv_len=max(kv_lens),
        )


def _by_rank(num_ranks: int, num_local: int) -> Arrangement:
    """The keys of one rank after those of another, all of which come."""
    everything = range(num_ranks * num_local)
    return Arrangement(
        dim=0,
        num_rows=len(everything),
        places=tuple(
            ((range(num_local), everything[rank * num_local : (rank + 1) * num_local]),)
            for rank in range(num_ranks)
        ),
        seen=((everything,),) * num_ranks,
        sums=None,
    )


def _joined(starts: Sequence[int], slices: Sequence[slice]) -> Tensor:
    """Indices of a slice of each sequence, the sequences beginning at ``starts``."""
    parts = [
        torch.arange(start + part.start, start + part.stop)
        for start, part in zip(starts, slices, strict=False)
    ]
    return torch.cat(parts)


def _halo(
    rank: int,
    num_ranks: int,
    rows: Callable[[int, int], Rows | None],
    counts: Sequence[int] | None,
    *,
    dense: bool,
) -> Halo:
    """Of ``rows(to, source)``, those of ``source`` that rank ``to`` needs.

    Args:
        counts: as :attr:`Halo.counts`.
    """
    others = [None if other == rank else other for other in range(num_ranks)]
    asked = [None if other is None else rows(other, rank) for other in others]
    given = _slices([own for own in asked if own is not None])
    return Halo(
        needed=[None if other is None else rows(rank, other) for other in others],
        asked=asked,
        asked_once=dense and disjoint(given),
        counts=counts,
    )


def _slices(rows: Sequence[Rows]) -> list[slice]:
    """The slices of rows of a dense batch."""
    return [part for own in rows for part in own.slices or ()]


def within(mask: Mask, length: int) -> Mask:
    """``mask`` in a sequence of so many real tokens, whose padding no prefix shows."""
    if not mask.prefix_len:
        return mask
    return replace(mask, prefix_len=min(mask.prefix_len, length))


def _mask_of(blocks: Sequence[ScoreBlock]) -> Mask:
    """The one mask of all blocks that have queries."""
    return next(block.mask for block in blocks if block.q_len)


def _by_mask(runs: Sequence[Sequence[ScoreBlock]]) -> list[list[list[ScoreBlock]]]:
    """The runs once for each mask, with the blocks of others empty; runs of none are left out."""
    masks = dict.fromkeys(block.mask for run in runs for block in run if block.q_len)
    found = []
    for mask in masks:
        alike = [[block if block.mask == mask else EMPTY for block in run] for run in runs]
        found.append([run for run in alike if any(block.q_len for block in run)])
    return found
