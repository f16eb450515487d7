"""The schedule of a rank: its attention calls, over a dense or a packed batch.

A :class:`KernelCall` attends from rows of queries to rows of keys under a mask. A
:class:`RankSchedule` holds the calls of one rank for one shape of batch; the loops of
:mod:`parallel.context.blocks.loops` run them and know nothing of layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import AttentionSpec, Packing
from parallel.context.blocks.layouts import Layout, ScoreBlock
from parallel.context.blocks.rows import DenseRows, PackedRows, Rows


@dataclass(kw_only=True, slots=True, frozen=True)
class KernelCall:
    """One call of the attention kernel."""

    q: Rows
    kv: Rows
    causal: bool
    first: bool
    """Whether it is the first call with its queries, so that there is no result to merge with."""
    packing: Packing | None = None
    """Lengths of a packed call's sequences, in the selected rows."""

    def spec(self, scale: float) -> AttentionSpec:
        """Mask, scale and packing of the call."""
        return AttentionSpec(causal=self.causal, scale=scale, packing=self.packing)


class RankSchedule(Protocol):
    """The kernel calls of one rank for one shape of batch."""

    accumulates: bool
    """Whether any query meets keys in more than one call, so that results are merged."""
    head_dim_of: tuple[int, int]
    """The dimension of heads in q, k, v and o, and in the log-sum-exp."""

    def of_source(self, source: int) -> Sequence[KernelCall]:
        """Kernel calls with the keys that rank ``source`` holds."""
        ...

    def of_all(self) -> Sequence[KernelCall]:
        """Kernel calls with all keys, as :meth:`arrange` lays them out."""
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
        causal: bool,
        *,
        prefixes: bool,
        takes_rectangles: TakesRectangles,
    ) -> None:
        self._layout = layout
        self._of_all: list[KernelCall] = []
        self._of_source: list[list[KernelCall]] = []
        if prefixes:
            for block in layout.prefix_blocks(rank, local_len, causal):
                self._of_all += [
                    _dense_call(part, local_len, local_len * layout.num_ranks, first=index == 0)
                    for index, part in enumerate(cut(block, takes_rectangles))
                ]
        else:
            for source in range(layout.num_ranks):
                found = layout.block(rank, source, local_len, causal)
                own = source == rank
                self._of_source.append(
                    [_dense_call(found, local_len, local_len, first=own)] if found else []
                )
        calls = itertools.chain(self._of_all, *self._of_source)
        self.accumulates = any(not call.first for call in calls)

    def of_source(self, source: int) -> Sequence[KernelCall]:
        return self._of_source[source]

    def of_all(self) -> Sequence[KernelCall]:
        return self._of_all

    def arrange(self, gathered: Tensor) -> Tensor:
        return self._layout.unshard(gathered.unbind(), dim=2)

    def by_rank(self, arranged: Tensor) -> Tensor:
        ranks = range(self._layout.num_ranks)
        return torch.stack([self._layout.shard(arranged, rank, dim=2) for rank in ranks])


def _dense_call(block: ScoreBlock, q_len: int, kv_len: int, *, first: bool) -> KernelCall:
    return KernelCall(
        q=DenseRows(block.q, whole=block.q_len == q_len),
        kv=DenseRows(block.kv, whole=block.kv_len == kv_len),
        causal=block.causal,
        first=first,
    )


def cut(block: ScoreBlock, takes_rectangles: TakesRectangles) -> list[ScoreBlock]:
    """The block, or the two that make it up, for kernels that know causal squares only."""
    seen_by_all = block.kv_len - block.q_len
    if not block.causal or seen_by_all == 0 or takes_rectangles(block.q_len, block.kv_len):
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
        causal: bool,
        *,
        prefixes: bool,
        fused: bool,
        device: torch.device,
    ) -> None:
        self._layout = layout
        self._device = device
        self._local = [layout.local_len(length) for length in lengths]
        self._starts = [0, *itertools.accumulate(self._local)]
        self._of_all: list[KernelCall] = []
        self._of_source: list[list[KernelCall]] = []
        if prefixes:
            by_sequence = [layout.prefix_blocks(rank, local, causal) for local in self._local]
            # The same run of every sequence, one run after another.
            by_run = [list(blocks) for blocks in zip(*by_sequence, strict=True)]
            arrived = self._arrival_index()
            groups = [by_run] if fused else [[run] for run in by_run]
            self._of_all = [self._prefix_call(group, causal, arrived) for group in groups]
        else:
            self._of_source = [
                self._block_calls(rank, source, causal) for source in range(layout.num_ranks)
            ]
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
        self, runs: Sequence[Sequence[ScoreBlock]], causal: bool, arrived: Sequence[Tensor]
    ) -> KernelCall:
        """One call for the given runs, each a block of every sequence."""
        blocks = [block for run in runs for block in run]
        kv_parts = tuple(
            torch.cat([index[block.kv] for index, block in zip(arrived, run, strict=True)])
            for run in runs
        )
        q_parts = tuple(self._q_index(run) for run in runs)
        return KernelCall(
            q=self._rows(q_parts, self._starts[-1]),
            kv=self._rows(kv_parts, self._starts[-1] * self._layout.num_ranks),
            causal=causal,
            first=True,
            packing=self._packing(blocks),
        )

    def _block_calls(self, rank: int, source: int, causal: bool) -> list[KernelCall]:
        found = [self._layout.block(rank, source, local, causal) for local in self._local]
        blocks = [
            block or ScoreBlock(q=slice(0, 0), kv=slice(0, 0), causal=causal) for block in found
        ]
        if not any(block.q_len for block in blocks):
            return []
        num_local = self._starts[-1]
        return [
            KernelCall(
                q=self._rows((self._q_index(blocks),), num_local),
                kv=self._rows((self._kv_index(blocks),), num_local),
                causal=next(block.causal for block in blocks if block.q_len),
                first=source == rank,
                packing=self._packing(blocks),
            )
        ]

    def _q_index(self, blocks: Sequence[ScoreBlock]) -> Tensor:
        return _joined(self._starts, [block.q for block in blocks])

    def _kv_index(self, blocks: Sequence[ScoreBlock]) -> Tensor:
        return _joined(self._starts, [block.kv for block in blocks])

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


def _joined(starts: Sequence[int], slices: Sequence[slice]) -> Tensor:
    """Indices of a slice of each sequence, the sequences beginning at ``starts``."""
    parts = [
        torch.arange(start + part.start, start + part.stop)
        for start, part in zip(starts, slices, strict=False)
    ]
    return torch.cat(parts)
