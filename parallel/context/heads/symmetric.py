"""Heads exchanged by reading other ranks' memory, straight to where they are needed.

Ranks publish their tensors as they are, and each copies the heads and tokens that it needs out of
its peers' buffers to their places between those of the other ranks: rows of a strided view, which
copy engines take (:mod:`parallel.context.transports.strided_copy`). So nothing is packed before or
sorted after, and no SM works for an exchange. Only where a packed batch has more sequences than
are worth a copy each, its tokens land by rank and are sorted by one kernel.

Order of events, on the streams of one rank, for a pass in G groups of heads:

    compute   barrier 0 (peers are done with my last inputs), publish, barrier 0 (all published)
    fetch     copy the heads of one group from every rank, then those of the next
    compute   wait for the copies of group g, compute group g
    results   barrier 1 (peers are done with my results of the group before), wait for the kernel
              of group g, publish, barrier 1 (all published), copy my tokens from every rank
    compute   after the last group: wait for the copies of all groups

Inputs are q, k and v, or the gradient of o; results are o, or the gradients of q, k and v. Results
of all groups go through one buffer of the largest group's size. There are two barriers of channel
0 for inputs and two of channel 1 for each group of results.

A pass may begin while copies of another one are under way. Non-reentrant checkpointing computes
the forward pass again inside the backward pass, between the exchange of do and the first kernel,
and leaves it by an exception once it has what it needs. A new pass therefore waits for every copy
that nothing has waited for: peers overwrite what it reads, and its target may be freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import WAIT, Tracer, aside
from parallel.context.heads.exchange import INPUTS, ExchangePlan, Kind, Kinds, summed_columns
from parallel.context.heads.sequences import HEAD_DIM, Sequences
from parallel.context.transports.kept_copies import KeptCopies
from parallel.context.transports.peer_memory import PeerBuffers, PeerMemory
from parallel.context.transports.strided_copy import StridedCopy, stream_of_copies
from parallel.context.transports.symmetric import publish
from parallel.streams import StreamEvent

_INPUTS, _RESULTS = 0, 1
"""Channels of barriers; different streams of a rank wait in them at the same time."""

_ALIGNMENT = 256
"""Offsets into a buffer are multiples of this many bytes."""


class SymmetricHeads:
    """Memory of the ranks of a host that all of them read, kept between passes."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._buffers = PeerBuffers(group, device)
        self.fetching, self.reducing = self._buffers.fetching, self._buffers.reducing
        self._inputs: KeptCopies[list[_Copies]] = KeptCopies()
        self._results: KeptCopies[list[_Copies]] = KeptCopies()
        self._under_way: dict[_Arriving | _Leaving, None] = {}
        """In the order of their start; they hold their tensors until they have been waited for."""

    @property
    def outside_bytes(self) -> int:
        return self._buffers.outside_bytes

    def exchange(self, plan: ExchangePlan, tracer: Tracer) -> SymmetricExchange:
        return SymmetricExchange(self, plan, tracer)

    def started(self, copies: _Arriving | _Leaving) -> None:
        """Hold what copies read and write until :meth:`waited_for`."""
        self._under_way[copies] = None

    def waited_for(self, copies: _Arriving | _Leaving) -> None:
        """The current stream has waited for the copies."""
        self._under_way.pop(copies, None)

    def settle(self) -> None:
        """Have the current stream wait for all copies that it has not waited for."""
        for copies in self._under_way:
            copies.hold()
        self._under_way.clear()

    def inwards(
        self, plan: ExchangePlan, kinds: Kinds, tensors: Sequence[Tensor]
    ) -> tuple[PeerMemory, list[_Copies]]:
        """The buffers of inputs like these, and each group's copies out of them."""
        memory = self._buffers.get("inputs", sum(map(_aligned_bytes, tensors)))
        # The plan itself, and not its id, which another would get when this one is let go.
        kind = (plan, kinds, *((x.shape, x.dtype) for x in tensors))
        return memory, self._inputs.get(
            memory, kind, lambda: _inwards(memory, plan, kinds, tensors)
        )

    def outwards(
        self, plan: ExchangePlan, kinds: Kinds, like: Tensor
    ) -> tuple[PeerMemory, list[_Copies]]:
        """The buffers of results like this rank's, and each group's copies out of them."""
        # Of a call that will have gradients as well, so that a training step allocates once.
        trained = torch.is_grad_enabled() and like.requires_grad
        largest = INPUTS if trained else kinds
        memory = self._buffers.get("results", _most_bytes(plan, largest, like))
        kind = (plan, kinds, like.shape, like.dtype)
        return memory, self._results.get(memory, kind, lambda: _outwards(memory, plan, kinds, like))


class SymmetricExchange:
    """The exchanges of one pass."""

    def __init__(self, heads: SymmetricHeads, plan: ExchangePlan, tracer: Tracer) -> None:
        self._heads, self._plan, self._tracer = heads, plan, tracer

    def inwards(
        self, kinds: Kinds, tensors: Sequence[Tensor], *, last_first: bool = False
    ) -> list[_Arriving]:
        plan, device = self._plan, tensors[0].device
        self._heads.settle()
        memory, copies = self._heads.inwards(plan, kinds, tensors)
        with self._tracer.span(WAIT, 0):
            publish(memory, copies[0].published, tensors, _INPUTS)
        landings = [
            [x.new_empty(shape) for x, shape in zip(tensors, of_group.shapes, strict=True)]
            for of_group in copies
        ]
        published, arriving = StreamEvent(device), {}
        for group in plan.order(last_first=last_first):
            with aside(self._heads.fetching, self._tracer, group, published):
                copies[group].run(landings[group], self._tracer)
                arrived = StreamEvent(device)
            arriving[group] = _Arriving(
                self._heads, plan.sequences, self._tracer, group, landings[group], arrived
            )
        return [arriving[group] for group in plan.groups]

    def outwards(self, kinds: Kinds, like: Tensor) -> _Leaving:
        return _Leaving(self._heads, self._plan, self._tracer, kinds, like)


class _Arriving:
    """A group's heads from all ranks."""

    def __init__(
        self,
        heads: SymmetricHeads,
        sequences: Sequences,
        tracer: Tracer,
        group: int,
        landing: list[Tensor],
        arrived: StreamEvent,
    ) -> None:
        self._heads, self._sequences = heads, sequences
        self._tracer, self._group = tracer, group
        self._landing, self._arrived = landing, arrived
        heads.started(self)

    def hold(self) -> None:
        """Have the current stream wait."""
        self._arrived.wait()

    def wait(self) -> list[Tensor]:
        with self._tracer.span(WAIT, self._group):
            self._arrived.wait()
        self._heads.waited_for(self)
        found = [self._sequences.landed(x) for x in self._landing]
        self._landing = []
        return found


class _Leaving:
    """Results of all groups, which the ranks that hold the tokens fetch."""

    def __init__(
        self,
        heads: SymmetricHeads,
        plan: ExchangePlan,
        tracer: Tracer,
        kinds: Kinds,
        like: Tensor,
    ) -> None:
        self._heads = heads
        self._plan, self._tracer, self._kinds = plan, tracer, kinds
        self._like, self._device = like, like.device
        self._stream = heads.reducing
        self._memory, self._copies = heads.outwards(plan, kinds, like)
        self._landing: list[Tensor] = []
        self._sent: list[Sequence[Tensor]] = []
        """Kept until they have been published."""
        self._last = StreamEvent(self._device)

    def send(self, group: int, whole: Sequence[Tensor]) -> None:
        plan, memory, copies = self._plan, self._memory, self._copies[group]
        if not self._landing:
            # Memory of the computing stream, which reads it last.
            self._landing = [self._like.new_empty(shape) for shape in copies.shapes]
        computed = StreamEvent(self._device)
        with aside(self._stream, self._tracer, plan.num_groups, self._last):
            # Passed while the kernel computes, by ranks that have fetched the group before.
            memory.barrier(_RESULTS)
            computed.wait()
            for x, into in zip(whole, copies.published, strict=True):
                plan.sequences.stage(x, into)
            memory.barrier(_RESULTS)
            copies.run(self._landing, self._tracer)
            self._last = StreamEvent(self._device)
        self._sent.append(whole)
        self._heads.started(self)

    def hold(self) -> None:
        """Have the current stream wait for all that was sent."""
        self._last.wait()

    def collect(self) -> list[Tensor]:
        plan = self._plan
        with self._tracer.span(WAIT, plan.num_groups):
            self._last.wait()
        self._heads.waited_for(self)
        found = [
            self._summed(kind, landing) if plan.repeats(kind) else landing
            for kind, landing in zip(self._kinds, self._landing, strict=True)
        ]
        self._sent, self._landing = [], []
        return found

    def _summed(self, kind: Kind, landing: Tensor) -> Tensor:
        plan = self._plan
        heads = [heads for _, _, heads in plan.columns(kind)]
        parts = landing.split([len(each) for each in heads], HEAD_DIM)
        columns = list(zip(heads, parts, strict=True))
        return summed_columns(columns, plan.shares.num_kv_heads, HEAD_DIM)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Copies:
    """The copies of a group of heads, from every rank."""

    published: list[Tensor]
    """Where this rank writes its own tensors for the others."""
    shapes: list[torch.Size]
    """Shapes of the tensors into which is copied."""
    copies: list[tuple[int, StridedCopy]]
    """Each after the number of its tensor."""
    read_bytes: int
    """How much of it is read from other ranks."""

    def run(self, targets: Sequence[Tensor], tracer: Tracer) -> None:
        stream = stream_of_copies(targets[0].device)
        for number, copy in self.copies:
            copy.run(targets[number], stream)
        tracer.sent(self.read_bytes)


def _inwards(
    memory: PeerMemory, plan: ExchangePlan, kinds: Kinds, tensors: Sequence[Tensor]
) -> list[_Copies]:
    """For each group, from the inputs of every rank to whole sequences of its heads."""
    inputs = [_template(x, x.shape) for x in tensors]
    found = []
    for group in plan.groups:
        heads = [plan.heads(kind, plan.rank, group) for kind in kinds]
        landings = [
            _template(x, plan.sequences.landing(x, len(own)))
            for x, own in zip(tensors, heads, strict=True)
        ]
        copies = _Maker(plan.rank, _published(memory, plan.rank, inputs), landings)
        for peer in plan.peers:
            theirs = _published(memory, peer, inputs)
            for number, (own, x) in enumerate(zip(heads, theirs, strict=True)):
                part = x.narrow(HEAD_DIM, own.start, len(own))
                for into, out in plan.sequences.places(landings[number], part, peer):
                    copies.add(peer, number, into, out)
        found.append(copies.made())
    return found


def _outwards(memory: PeerMemory, plan: ExchangePlan, kinds: Kinds, like: Tensor) -> list[_Copies]:
    """For each group, from the staged results of every rank to this rank's tokens of its heads.

    Heads lie in the order of :meth:`ExchangePlan.columns`.
    """
    landings = [_template(like, _columns_shape(plan, kind, like)) for kind in kinds]
    starts = [_starts(plan, kind) for kind in kinds]
    found = []
    for group in plan.groups:
        mine = _published(memory, plan.rank, _staged(plan, kinds, like, plan.rank, group))
        copies = _Maker(plan.rank, mine, landings)
        for peer in plan.peers:
            theirs = _published(memory, peer, _staged(plan, kinds, like, peer, group))
            for number, x in enumerate(theirs):
                out = plan.sequences.part(x, plan.rank)
                first = starts[number][peer, group]
                into = landings[number].narrow(HEAD_DIM, first, out.shape[HEAD_DIM])
                copies.add(peer, number, into, out)
        found.append(copies.made())
    return found


class _Maker:
    """Collects the copies of a group."""

    def __init__(self, rank: int, published: list[Tensor], landings: Sequence[Tensor]) -> None:
        self._rank, self._published = rank, published
        self._shapes = [x.shape for x in landings]
        self._copies: list[tuple[int, StridedCopy]] = []
        self._read_bytes = 0

    def add(self, peer: int, number: int, into: Tensor, out: Tensor) -> None:
        copy = StridedCopy(into, out)
        self._copies.append((number, copy))
        self._read_bytes += 0 if peer == self._rank else copy.num_bytes

    def made(self) -> _Copies:
        return _Copies(
            published=self._published,
            shapes=self._shapes,
            copies=self._copies,
            read_bytes=self._read_bytes,
        )


def _published(memory: PeerMemory, rank: int, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that lie one after another in a rank's buffer."""
    offsets = itertools.accumulate(map(_aligned_bytes, like), initial=0)
    return [memory.of_rank(rank, at, x) for at, x in zip(offsets, like, strict=False)]


def _staged(plan: ExchangePlan, kinds: Kinds, like: Tensor, rank: int, group: int) -> list[Tensor]:
    """Templates of what a rank publishes of a group's results."""
    heads = [plan.heads(kind, rank, group) for kind in kinds]
    return [_template(like, plan.sequences.staging(like, len(own))) for own in heads]


def _most_bytes(plan: ExchangePlan, kinds: Kinds, like: Tensor) -> int:
    """Bytes of the results of any group on any rank: buffers are of one size on all ranks."""
    return max(
        sum(_aligned(plan.sequences.staging(like, count), like.element_size()) for count in counts)
        for counts in plan.sizes(kinds)
    )


def _columns_shape(plan: ExchangePlan, kind: Kind, like: Tensor) -> torch.Size:
    """The shape of this rank's tokens of the heads of all shares."""
    num_heads = sum(len(heads) for _, _, heads in plan.columns(kind))
    shape = (*like.shape[:HEAD_DIM], num_heads, *like.shape[HEAD_DIM + 1 :])
    return torch.Size(shape)


def _starts(plan: ExchangePlan, kind: Kind) -> dict[tuple[int, int], int]:
    """By rank and group, where the heads of that share begin among those of all."""
    columns = plan.columns(kind)
    ends = itertools.accumulate((len(heads) for _, _, heads in columns), initial=0)
    return {(rank, group): at for (rank, group, _), at in zip(columns, ends, strict=False)}


def _template(like: Tensor, shape: torch.Size) -> Tensor:
    """A tensor without memory, for its shape and its dtype."""
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _aligned_bytes(x: Tensor) -> int:
    return _aligned(x.shape, x.element_size())


def _aligned(shape: torch.Size, element_bytes: int) -> int:
    return -(-shape.numel() * element_bytes // _ALIGNMENT) * _ALIGNMENT
