"""The kernel calls of one rank, and the rows that travel for them, as tensors on its device.

A rank makes at most two calls in a forward pass. The first one needs the rank's own keys alone
and runs while others are on their way; the second one is for the waiting runs. Their *diagonals*,
the scores between a run's own queries and keys, can be in either:

    joined   the second call has every key that a waiting query sees, so each query is in one call
    first    the first call has the diagonals too, so that it hides more of the transfer; waiting
             queries are in both, merged by log-sum-exp. Not with a window or a prefix, whose edges
             fall elsewhere in each run's other keys.

The second call takes its keys from one tensor, [keys, 2, H_kv, D], of three parts: rows that
arrive from other ranks; own rows whose keys are in the first call *again*; and, where diagonals are
joined, the rows of the waiting runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import AttentionSpec, Packing
from parallel.context.documents import routes
from parallel.context.documents.routes import Routes
from parallel.context.documents.runs import Run

PAIRS_OF_A_ROW = 1024
"""Causal pairs that take as long as a row of k and v takes to arrive, or a query to be merged.

A row is 4 H_kv D bytes in a half precision, and a pair costs 4 H D FLOPs: at four query heads for
each key head, 200 GB/s and 600 TFLOP/s a row arrives in the time of 750 pairs. To merge a query of
32 heads of 128 took that of 1,300 on an H200: its o is read and written in float32.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class Call:
    """One kernel call, for consecutive local queries."""

    rows: slice
    packing: Packing
    causal: bool

    def spec(self, like: AttentionSpec) -> AttentionSpec:
        return replace(like, packing=self.packing, causal=self.causal)


@dataclass(kw_only=True, slots=True, frozen=True)
class RankCalls:
    """What one rank computes, sends and receives."""

    num_rows: int
    """Local tokens without padding."""
    num_own: int
    """Rows of the first call, from the first on; all of them unless diagonals are joined."""
    local: Call | None
    """The call that needs own keys alone, those at its queries' rows."""
    halves: tuple[Call, ...]
    """The same in one or two calls of about equal work."""
    rest: Call | None
    """The call of the waiting runs."""
    merges: bool
    """Whether the waiting runs are in both calls."""
    travels: bool
    """Whether rows travel between any ranks; then all of them take part."""
    keeps_keys: bool
    """Whether keys of other ranks are kept for the backward pass."""
    send: Tensor
    """int64: the rows to send, for rank 0, then for rank 1, ...; some go to several."""
    counts: list[list[int]]
    """Rows that each rank sends to each, [source][to]."""
    home_counts: list[list[int]]
    """The same of their gradients, on the way back."""
    send_counts: list[int]
    receive_counts: list[int]
    again: Tensor
    """int64: rows of the first call whose keys the second one needs too."""
    gather: Tensor
    """int64: the keys of the second call, as rows of the tensor that it takes them from."""
    layers: list[tuple[int, int]]
    """Parts of :attr:`gather` in which no row is twice."""
    home: Tensor
    """int64: the rows in :attr:`again` or :attr:`send`, each once: their gradients are sums."""
    home_places: Tensor
    """int64: where in :attr:`home` each row of :attr:`again` is, then each of :attr:`send`."""

    @property
    def num_arriving(self) -> int:
        return sum(self.receive_counts)

    @property
    def joined_rows(self) -> slice:
        """The waiting runs' rows if their diagonals are joined, else none."""
        return slice(self.num_own, self.num_rows)

    @property
    def num_keys(self) -> int:
        """Rows of the tensor from which the second call takes its keys."""
        return self.num_arriving + len(self.again) + self.num_rows - self.num_own


def make_calls(
    plan: Routes, rank: int, device: torch.device, *, joined: bool, keeps_keys: bool
) -> RankCalls:
    """The calls of ``rank``; ranks may differ in ``joined``, and not in ``keeps_keys``."""
    placement, causal = plan.placement, plan.causal
    runs = placement.parts[rank]
    num_local = plan.num_local_runs(rank)
    merges = not joined and num_local < len(runs)
    own = runs if merges else runs[:num_local]
    num_own = sum(run.tokens for run in own)
    sends = [plan.sent(rank, to) if to != rank else [] for to in _ranks(plan)]
    comes = [plan.sent(of, rank) if of != rank else [] for of in _ranks(plan)]
    if not joined:
        # The keys before the last waiting run of each document, whoever holds them.
        asked = plan.needed(rank, diagonals=False)
        ends = {document: ranges[-1][1] for document, ranges in asked.items()}
        assert all(part.stop <= ends[part.document] for part in itertools.chain(*comes))
    again: list[routes.Segment] = []
    waiting: list[routes.Segment] = []
    for part in sorted(plan.sent(rank, rank, diagonals=joined), key=lambda part: part.row):
        (again if part.row < num_own else waiting).append(part)
    num_rows = placement.tokens(rank)
    assert _count(waiting) == num_rows - num_own, "all of the waiting runs, or nothing"
    rest, gather, layers = _rest(plan, rank, num_local, [*comes, again, waiting], joined, device)
    again_rows = _index((part.rows for part in again), device)
    send = _index((part.rows for part in itertools.chain(*sends)), device)
    counts = plan.counts()
    home, home_places = torch.cat([again_rows, send]).unique(return_inverse=True)
    return RankCalls(
        num_rows=num_rows,
        num_own=num_own,
        local=_own_call(runs, 0, len(own), causal, device),
        halves=tuple(_halves(runs, len(own), causal, device)),
        rest=rest,
        merges=merges,
        travels=plan.travels(),
        keeps_keys=keeps_keys,
        send=send,
        counts=counts,
        home_counts=[list(column) for column in zip(*counts, strict=True)],
        send_counts=counts[rank],
        receive_counts=[row[rank] for row in counts],
        again=again_rows,
        gather=gather,
        layers=layers,
        home=home,
        home_places=home_places,
    )


def joins_well(plan: Routes, rank: int) -> bool:
    """Whether to wait for keys costs less than to merge the queries that need them.

    The part of the transfer is waited for that the work on own keys, without diagonals, does not
    hide.
    """
    runs = plan.placement.parts[rank]
    num_local = plan.num_local_runs(rank)
    hidden = sum(run.pairs for run in runs[:num_local])
    merged = sum(run.tokens for run in runs[num_local:])
    return PAIRS_OF_A_ROW * plan.received(rank) - hidden <= PAIRS_OF_A_ROW * merged


def _ranks(plan: Routes) -> range:
    return range(plan.placement.num_ranks)


def _count(parts: Iterable[routes.Segment]) -> int:
    return sum(part.stop - part.start for part in parts)


def _index(parts: Iterable[range], device: torch.device) -> Tensor:
    ranges = [torch.arange(part.start, part.stop) for part in parts]
    return torch.cat([torch.empty(0, dtype=torch.int64), *ranges]).to(device)


def _own_call(
    runs: Sequence[Run], first: int, last: int, causal: bool, device: torch.device
) -> Call | None:
    """The call for ``runs[first:last]`` and their own keys."""
    if first == last:
        return None
    start = sum(run.tokens for run in runs[:first])
    lens = [run.tokens for run in runs[first:last]]
    return Call(
        rows=slice(start, start + sum(lens)), packing=_packing(lens, lens, device), causal=causal
    )


def _halves(
    runs: Sequence[Run], num_own: int, causal: bool, device: torch.device
) -> Iterable[Call]:
    """The call for the first ``num_own`` runs, cut between two of them near half of its work."""
    work = [0, *itertools.accumulate(run.tokens**2 for run in runs[:num_own])]
    cut = min(range(num_own + 1), key=lambda at: abs(2 * work[at] - work[-1]))
    for first, last in ((0, cut), (cut, num_own)):
        call = _own_call(runs, first, last, causal, device)
        if call is not None:
            yield call


def _rest(
    plan: Routes,
    rank: int,
    num_local: int,
    parts: Sequence[Sequence[routes.Segment]],
    joined: bool,
    device: torch.device,
) -> tuple[Call | None, Tensor, list[tuple[int, int]]]:
    """The second call, its keys among the rows of ``parts``, and their layers."""
    placement = plan.placement
    runs = placement.parts[rank]
    waiting = runs[num_local:]
    if not waiting:
        return None, _index((), device), []
    there = routes.end_to_end(parts)
    keys = [plan.keys(run, diagonals=joined) for run in waiting]
    found = [
        part
        for run, (first, stop) in zip(waiting, keys, strict=True)
        for part in routes.rows_between(there[run.document], first, stop)
    ]
    kv_lens = [stop - first for first, stop in keys]
    q_lens = [run.tokens for run in waiting]
    start = sum(run.tokens for run in runs[:num_local])
    call = Call(
        rows=slice(start, start + sum(q_lens)),
        packing=_packing(q_lens, kv_lens, device),
        causal=plan.causal and joined,
    )
    return call, _index(found, device), _layers(waiting, kv_lens)


def _layers(waiting: Sequence[Run], kv_lens: Sequence[int]) -> list[tuple[int, int]]:
    """Bounds of the keys of consecutive runs of different documents."""
    bounds = [0]
    seen: set[int] = set()
    total = 0
    for run, kv_len in zip(waiting, kv_lens, strict=True):
        if run.document in seen:
            bounds.append(total)
            seen = set()
        seen.add(run.document)
        total += kv_len
    return list(itertools.pairwise([*bounds, total]))


def _packing(q_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device) -> Packing:
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32).to(device)
        for lens in (q_lens, kv_lens)
    )
    return Packing(
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_q_len=max(q_lens), max_kv_len=max(kv_lens)
    )
