"""Keys from their owners to the ranks that need them, those rows alone, and their gradients home.

At distance t, a rank sends to rank r + t and receives from r - t, and gradients go the other way.
All keys leave before the first is computed with: together they are a window's reach, or a prefix.
Where they are few, they stay for the backward pass, in which gradients alone travel.
Every rank starts its exchanges in the same order of distances, first of keys and then of
gradients, so that none waits in a circle; where two ranks have nothing for each other, there is no
message. Gradients travel in the keys' dtype and are summed in float32, in the order of distances:
each part is rounded once, and a pass gives the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from parallel.context.blocks.halo import Halo, room_for
from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.rows import Rows
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.transports.all_gather import sum_of_contributions
from parallel.context.transports.messages import Messages
from parallel.context.transports.own_gradients import OwnGradients


class _Message:
    """Tensors for one rank, and those of another that come here; either may be none."""

    def __init__(
        self,
        messages: Messages,
        sent: tuple[Sequence[Tensor], int],
        received: tuple[Sequence[Tensor], int],
        first_tag: int,
        tracer: Tracer,
    ) -> None:
        # Kept until they have left.
        self._sent = sent[0]
        self.received = received[0]
        tracer.sent(sum(x.nbytes for x in self._sent))
        self._works = messages.start(*sent, *received, first_tag)

    def wait(self) -> Sequence[Tensor]:
        """What came; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        self._works, self._sent = [], ()
        return self.received


class HaloExchange:
    """The exchanges of one pass over the ranks of a group."""

    _KEYS, _GRADIENTS = 0, 2
    """Tags: keys and gradients may be on their way at the same time."""

    def __init__(self, messages: Messages, tracer: Tracer, halo: Halo) -> None:
        self._messages, self._tracer, self._halo = messages, tracer, halo
        self._rank, self._num_ranks = messages.rank, messages.num_ranks
        self._totals: OwnGradients | None = None
        self._like: tuple[Tensor, Tensor] | None = None
        self._returning: list[_Message] = []
        """Gradients at distances 1, 2, ..., as far as this rank has started them."""

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        heads = slice(0, k.shape[schedule.head_dim_of[0]])
        self._like = (k, v)
        own = Visit(step=0, source=self._rank, kv_heads=heads, k=k, v=v)
        if kept is not None:
            yield from kept
            self._return_nothing_before(self._num_ranks)
            yield own
            return
        coming = [self._send_keys(distance) for distance in range(1, self._num_ranks)]
        yield own
        for step, message in enumerate(coming, 1):
            source = (self._rank - step) % self._num_ranks
            with self._tracer.span(WAIT, step):
                arrived = message.wait()
            if arrived:
                yield Visit(step=step, source=source, kv_heads=heads, k=arrived[0], v=arrived[1])

    def _send_keys(self, distance: int) -> _Message:
        assert self._like is not None, "visits() sets them"
        to, source = ((self._rank + hop) % self._num_ranks for hop in (distance, -distance))
        asked, needed = self._halo.asked[to], self._halo.needed[source]
        sent = () if asked is None else tuple(asked.take(x).contiguous() for x in self._like)
        received = self._room(needed)
        tags = self._KEYS
        return _Message(self._messages, (sent, to), (received, source), tags, self._tracer)

    def _room(self, rows: Rows | None) -> tuple[Tensor, ...]:
        """Empty tensors for rows of k and v, in the form of :meth:`Rows.take`."""
        assert self._like is not None, "visits() sets them"
        return () if rows is None else tuple(room_for(rows, x) for x in self._like)

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        if visit.step == 0:
            self._totals = OwnGradients(visit, contributions, self._halo)
            return
        self._return_nothing_before(visit.step)
        self._return(
            tuple(
                sum_of_contributions(like, contributions, name).to(like.dtype).contiguous()
                for name, like in (("dk", visit.k), ("dv", visit.v))
            )
        )

    def _return_nothing_before(self, distance: int) -> None:
        """Receive from the ranks at lower distances whose keys this rank does not need."""
        while len(self._returning) + 1 < distance:
            self._return(())

    def _return(self, gradients: Sequence[Tensor]) -> None:
        """Send gradients to the owner at the next distance, and receive from the one opposite."""
        distance = len(self._returning) + 1
        owner, from_ = ((self._rank + hop) % self._num_ranks for hop in (-distance, distance))
        room = self._room(self._halo.asked[from_])
        message = _Message(
            self._messages, (gradients, owner), (room, from_), self._GRADIENTS, self._tracer
        )
        self._returning.append(message)

    def collect(self) -> tuple[Tensor, Tensor]:
        assert self._totals is not None, "collect() follows deliver()"
        self._return_nothing_before(self._num_ranks)
        for distance, message in enumerate(self._returning, 1):
            rows = self._halo.asked[(self._rank + distance) % self._num_ranks]
            with self._tracer.span(WAIT, distance):
                found = message.wait()
            if rows is not None:
                self._totals.add(rows, found)
        return self._totals.result()
