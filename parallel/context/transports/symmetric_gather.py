"""All ranks' keys read out of their memory straight to their places, and gradients read home.

Keys of a dense batch are attended to in the order of their positions, of which a rank may hold
several runs. Copy engines take each run out of its owner's buffer to its place between the others
(:mod:`parallel.context.transports.strided_copy`), so that nothing is sorted after. Gradients lie in
the same order: where two kernel calls read a row, one kernel adds their parts in float32, rounds
once, and writes where peers read it. Owners fetch their runs out of each peer's buffer, and sum the
parts in float32.

Rows that no call of a rank reads are neither fetched nor, as gradients, written or fetched: both
sides know them from the :class:`~parallel.context.blocks.arrangement.Arrangement`. So they hold
whatever was there before, in the keys that a rank computes with as in the buffer of gradients.

Order of events, on the streams of one rank, for a pass in G groups of KV heads:

    compute   barrier 0 (peers are done with my last keys), publish all heads, barrier 0 (all
              published)
    fetch     copy the runs of one group from every rank, while the group before is computed
    compute   wait for the copies of group g, compute group g, wait until all have read my gradients
              of the group before, write those of group g
    reducing  begin sums with my own part, barrier 1 (all have written), copy my runs from each peer
              and add them, barrier 1 (all have read)
    compute   after the last group: wait for the second barrier, and so for the sums

What could meet in one place, and what keeps it apart:

- A peer's copy of my keys, and my next keys: its computing stream has waited for its copies before
  its next barrier 0, and I write after that barrier.
- My copies into keys that come, and other uses of their memory: it is memory of the computing
  stream, which the copies follow, and which waits for them before it reads.
- A peer's copies of my gradients, and those that I write next: the computing stream waits for the
  second barrier 1, which the peer passes after its copies, as it does in :meth:`collect`.
- Sums and what is added to them: one stream makes both, in the order of the ranks' distances.

There are two barriers of channel 0 in a pass, and two of channel 1 for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.arrangement import Arrangement, joined
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer, aside
from parallel.context.transports.all_gather import (
    head_groups,
    select_heads,
    sum_of_contributions,
)
from parallel.context.transports.kept_copies import KeptCopies
from parallel.context.transports.peer_memory import PeerBuffers, PeerMemory
from parallel.context.transports.strided_copy import StridedCopy, copy_rows, stream_of_copies
from parallel.context.transports.symmetric import Pair, publish
from parallel.streams import StreamEvent

_KEYS, _GRADIENTS = 0, 1
"""Channels of barriers; different streams of a rank wait in them at the same time."""

_NAMES = ("dk", "dv")


class GatherMemory:
    """Memory of the ranks of a host that all of them read, kept between passes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.device = device
        self.buffers = PeerBuffers(group, device)
        self._keys: KeptCopies[_Keys] = KeptCopies()
        self._gradients: KeptCopies[_Gradients] = KeptCopies()

    def keys(
        self, arrangement: Arrangement, k: Tensor, v: Tensor, head_dim: int, groups: list[slice]
    ) -> tuple[PeerMemory, _Keys]:
        """The buffers of keys and values like these, and the copies out of them."""
        memory = self.buffers.get("keys", Pair.bytes_of(k, v, 1))
        kind = (arrangement, k.shape, v.shape, k.dtype, len(groups))
        return memory, self._keys.get(
            memory,
            kind,
            lambda: _keys(memory, arrangement, self.rank, (k, v), head_dim, groups),
        )

    def gradients(
        self, arrangement: Arrangement, k: Tensor, v: Tensor
    ) -> tuple[PeerMemory, _Gradients]:
        """The buffers of gradients of a group's keys, ``k`` and ``v`` of all ranks like these."""
        memory = self.buffers.get("gradients", Pair.bytes_of(k, v, 1))
        kind = (arrangement, k.shape, v.shape, k.dtype)
        return memory, self._gradients.get(
            memory, kind, lambda: _gradients(memory, arrangement, self.rank, (k, v))
        )


class SymmetricGather:
    """Reads all ranks' keys at once, ``heads_at_once`` KV heads at a time (all if None)."""

    def __init__(
        self, memory: GatherMemory, tracer: Tracer, heads_at_once: int | None = None
    ) -> None:
        self._memory, self._tracer = memory, tracer
        self._device = memory.device
        self._heads_at_once = heads_at_once
        self._fetching, self._reducing = memory.buffers.fetching, memory.buffers.reducing
        self._schedule: RankSchedule | None = None
        self._own: tuple[Tensor, Tensor] | None = None
        self._totals: list[Tensor] = []
        """Of all heads, in float32."""
        self._last = StreamEvent(self._device)
        """When all ranks have read the gradients that this one wrote last."""

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        self._schedule, self._own = schedule, (k, v)
        head_dim = schedule.head_dim_of[0]
        groups = head_groups(k.shape[head_dim], self._heads_at_once)
        memory, keys = self._memory.keys(_arrangement(schedule), k, v, head_dim, groups)
        with self._tracer.span(WAIT, 0):
            publish(memory, keys.published, (k, v), _KEYS)
        coming = self._fetch(keys, 0)
        for step, heads in enumerate(groups):
            here, arrived = coming
            with self._tracer.span(WAIT, step):
                arrived.wait()
            if step + 1 < len(groups):
                coming = self._fetch(keys, step + 1)
            else:
                del coming
            yield Visit(step=step, source=None, kv_heads=heads, k=here[0], v=here[1])

    def _fetch(self, keys: _Keys, step: int) -> tuple[list[Tensor], StreamEvent]:
        """Start to copy a group's keys of every rank to their places here."""
        assert self._own is not None, "visits() sets it"
        # Memory of the computing stream, which reads it last.
        here = [x.new_empty(shape) for x, shape in zip(self._own, keys.shapes, strict=True)]
        with aside(self._fetching, self._tracer, step, StreamEvent(self._device)):
            keys.of_group[step].run(here, self._tracer)
            return here, StreamEvent(self._device)

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        schedule = self._schedule
        assert schedule is not None, "deliver() follows visits()"
        assert self._own is not None, "visits() sets it"
        memory, gradients = self._memory.gradients(_arrangement(schedule), visit.k, visit.v)
        self._last.wait()
        gradients.write(contributions)
        if not self._totals:
            self._totals = [x.new_empty(x.shape, dtype=torch.float32) for x in self._own]
        totals = [select_heads(total, schedule, visit.kv_heads) for total in self._totals]
        written = StreamEvent(self._device)
        with aside(self._reducing, self._tracer, visit.step, written):
            gradients.begin(totals)
            memory.barrier(_GRADIENTS)
            gradients.add_parts(totals, visit.k.dtype, self._tracer)
            memory.barrier(_GRADIENTS)
            self._last = StreamEvent(self._device)

    def collect(self) -> tuple[Tensor, Tensor]:
        with self._tracer.span(WAIT, len(self._totals)):
            self._last.wait()
        dk, dv = self._totals
        return dk, dv


def _arrangement(schedule: RankSchedule) -> Arrangement:
    assert schedule.arrangement is not None, "keys are gathered"
    return schedule.arrangement


@dataclass(slots=True)
class _Copies:
    """Copies of k (or dk) and v (or dv) out of several ranks' buffers."""

    copies: list[tuple[int, StridedCopy]] = field(default_factory=list)
    """Each after 0 of k, 1 of v."""
    read_bytes: int = 0
    """How much of it is read from other ranks."""

    def add(self, number: int, into: Tensor, out: Tensor, *, is_own: bool = False) -> None:
        copy = StridedCopy(into, out)
        self.copies.append((number, copy))
        self.read_bytes += 0 if is_own else copy.num_bytes

    def run(self, targets: Sequence[Tensor], tracer: Tracer) -> None:
        stream = stream_of_copies(targets[0].device)
        for number, copy in self.copies:
            copy.run(targets[number], stream)
        tracer.sent(self.read_bytes)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Keys:
    """How keys come, for passes over keys of one shape."""

    published: tuple[Tensor, Tensor]
    """Where this rank writes its own for the others."""
    shapes: list[torch.Size]
    """Of k and v of all ranks, of the heads of a group."""
    of_group: list[_Copies]


@dataclass(kw_only=True, slots=True, frozen=True)
class _Gradients:
    """How gradients of a group's keys leave and come home, for keys of one shape."""

    written: tuple[Tensor, Tensor]
    """Where this rank writes its parts for the others: dk and dv of all ranks' keys."""
    sums: list[tuple[tuple[Tensor, Tensor], list[tuple[int, range]]]] | None
    """Of disjoint rows the places in :attr:`written`, and the calls and their rows that are summed
    there; None where calls take rows by index."""
    dim: int
    """The dimension of tokens."""
    own: list[tuple[range, tuple[Tensor, Tensor]]]
    """This rank's rows, and where it has written its own part of them."""
    shapes: list[torch.Size]
    """Of dk and dv of this rank's keys."""
    parts: list[tuple[_Copies, list[range]]]
    """Of each peer that reads keys of this rank its parts, and of which rows these are."""

    def write(self, contributions: Sequence[Contribution]) -> None:
        """Write the sums of all calls, each row rounded once."""
        for number, name in enumerate(_NAMES):
            if self.sums is None:
                out = self.written[number]
                out.copy_(sum_of_contributions(out, contributions, name))
                continue
            of_calls = [getattr(contribution, name) for contribution in contributions]
            for places, calls in self.sums:
                found = [of_calls[call].narrow(self.dim, *_span(rows)) for call, rows in calls]
                if len(found) == 1:
                    copy_rows(places[number], found[0])
                else:
                    # In float32, like any sum of PyTorch's kernels.
                    torch.add(*found, out=places[number])

    def begin(self, totals: Sequence[Tensor]) -> None:
        """Begin the sums of this rank's keys with its own part."""
        for rows, places in self.own:
            for total, place in zip(totals, places, strict=True):
                total.narrow(self.dim, *_span(rows)).copy_(place)

    def add_parts(self, totals: Sequence[Tensor], dtype: torch.dtype, tracer: Tracer) -> None:
        """Fetch the parts of one peer after another and add them."""
        landing = [
            total.new_empty(x, dtype=dtype) for total, x in zip(totals, self.shapes, strict=True)
        ]
        for copies, spans in self.parts:
            copies.run(landing, tracer)
            for total, part in zip(totals, landing, strict=True):
                for rows in spans:
                    span = _span(rows)
                    total.narrow(self.dim, *span).add_(part.narrow(self.dim, *span))


def _keys(
    memory: PeerMemory,
    arrangement: Arrangement,
    rank: int,
    like: tuple[Tensor, Tensor],
    head_dim: int,
    groups: Sequence[slice],
) -> _Keys:
    """The copies of passes over k and v ``like`` these of one rank."""
    published, dim = Pair(memory, *like), arrangement.dim
    num_heads = groups[0].stop - groups[0].start
    shapes = [_resized(x, {head_dim: num_heads, dim: arrangement.num_rows}) for x in like]
    places = [_template(x, shape) for x, shape in zip(like, shapes, strict=True)]
    found = []
    for heads in groups:
        copies = _Copies()
        for step in range(len(arrangement.places)):
            # A different peer for each rank at each step, so that no link is shared.
            peer = (rank - step) % len(arrangement.places)
            for number, x in enumerate(published.of_rank(peer)):
                out = x.narrow(head_dim, heads.start, num_heads)
                for own, rows in arrangement.moves(peer, rank):
                    copies.add(
                        number,
                        places[number].narrow(dim, *_span(rows)),
                        out.narrow(dim, *_span(own)),
                        is_own=peer == rank,
                    )
        found.append(copies)
    return _Keys(published=published.of_rank(rank), shapes=shapes, of_group=found)


def _gradients(
    memory: PeerMemory, arrangement: Arrangement, rank: int, like: tuple[Tensor, Tensor]
) -> _Gradients:
    """The copies of passes over k and v of all ranks ``like`` these."""
    published, dim, num_ranks = Pair(memory, *like), arrangement.dim, len(arrangement.places)
    written = published.of_rank(rank)

    def places(rows: range) -> tuple[Tensor, Tensor]:
        return written[0].narrow(dim, *_span(rows)), written[1].narrow(dim, *_span(rows))

    own = arrangement.moves(rank, rank)
    num_rows = sum(len(rows) for rows, _ in arrangement.places[rank])
    assert sum(len(rows) for rows, _ in own) == num_rows, "every token sees itself"
    shapes = [_resized(x, {dim: num_rows}) for x in like]
    landing = [_template(x, shape) for x, shape in zip(like, shapes, strict=True)]
    parts = []
    for step in range(1, num_ranks):
        peer = (rank - step) % num_ranks
        moves, copies = arrangement.moves(rank, peer), _Copies()
        for number, x in enumerate(published.of_rank(peer)):
            for mine, rows in moves:
                into = landing[number].narrow(dim, *_span(mine))
                copies.add(number, into, x.narrow(dim, *_span(rows)))
        if moves:
            parts.append((copies, joined([mine for mine, _ in moves])))
    sums = arrangement.sums
    return _Gradients(
        written=written,
        sums=None if sums is None else [(places(rows), list(calls)) for rows, calls in sums],
        dim=dim,
        own=[(mine, places(rows)) for mine, rows in own],
        shapes=shapes,
        parts=parts,
    )


def _span(rows: range) -> tuple[int, int]:
    """Start and length."""
    return rows.start, len(rows)


def _resized(x: Tensor, sizes: dict[int, int]) -> torch.Size:
    """The shape of ``x`` with other sizes of some dimensions."""
    return torch.Size(sizes.get(dim, size) for dim, size in enumerate(x.shape))


def _template(like: Tensor, shape: torch.Size) -> Tensor:
    """A tensor without memory, for its shape and its dtype."""
    return torch.empty(shape, dtype=like.dtype, device="meta")
