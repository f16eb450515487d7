"""Bytes that each transport of keys holds, in the order in which it allocates and frees them.

They follow :mod:`parallel.context.transports`, whose classes have the same names. Sizes of k and v
are those of both together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from parallel.context.blocks.score_blocks import disjoint, keys_of
from parallel.context.memory.ledger import Ledger
from parallel.context.memory.sizes import CallSizes, LocalSizes


class TransportMemory(Protocol):
    """The memory of a transport during one pass."""

    num_visits: int
    narrow: bool
    """Whether results that are merged once are not summed in float32."""
    keeps_keys: bool
    """Whether a backward pass has the other ranks' keys of the forward pass."""

    def begin(self, *, gradients: bool) -> None:
        """Before the first visit.

        Args:
            gradients: whether there are buffers for gradients, which outlive a pass.
        """
        ...

    def arrive(self, visit: int) -> None:
        """The keys of a visit are here."""
        ...

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        """The gradients of a visit's keys leave."""
        ...

    def keeps(self, calls: Sequence[CallSizes]) -> bool:
        """Whether what the first visit's calls give are the sums of dk and dv."""
        ...


class _Plain:
    """Sums of all rows in float32, and keys that come in each pass."""

    narrow = False
    keeps_keys = False

    def keeps(self, calls: Sequence[CallSizes]) -> bool:
        return False


TransportMemoryFactory = Callable[[Ledger, LocalSizes], TransportMemory]


class SendRecvMemory(_Plain):
    """Keys that are computed with and those that come; float32 sums that leave and that come."""

    def __init__(self, ledger: Ledger, sizes: LocalSizes) -> None:
        self._ledger, self._sizes = ledger, sizes
        self.num_visits = sizes.layout.num_ranks

    def begin(self, *, gradients: bool) -> None:
        pass

    def arrive(self, visit: int) -> None:
        kv = self._sizes.kv
        here, coming = kv * (visit > 0), kv * (visit + 1 < self.num_visits)
        if visit > 1:
            # The visit before has not been let go when the next keys get their room.
            with self._ledger.during(visiting_keys=coming):
                pass
        self._ledger.hold(visiting_keys=here + coming)

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        wide = self._sizes.wide * self._sizes.kv
        self._ledger.hold(dk_dv_sums=wide)
        add_wide_rows(self._ledger, self._sizes, calls)
        self._ledger.hold(dk_dv_sums=2 * wide)


class SymmetricRingMemory(_Plain):
    """Keys published and two blocks fetched; two published parts of gradients and one fetched."""

    def __init__(self, ledger: Ledger, sizes: LocalSizes) -> None:
        self._ledger, self._sizes = ledger, sizes
        self.num_visits = sizes.layout.num_ranks

    def begin(self, *, gradients: bool) -> None:
        kv = self._sizes.kv
        self._ledger.hold(published=kv + (2 * kv if gradients else 0), visiting_keys=2 * kv)

    def arrive(self, visit: int) -> None:
        pass

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        if visit == 0:
            self._ledger.hold(dk_dv_sums=self._sizes.wide * self._sizes.kv)
        else:
            self._ledger.hold(fetched_dk_dv=self._sizes.kv)


class HaloMemory:
    """The rows of keys that a mask shows: all at once, and their gradients on the way home.

    Of the rank that most rows leave and reach. ``published`` is memory that peers read.
    """

    def __init__(self, ledger: Ledger, sizes: LocalSizes, *, published: bool) -> None:
        self._ledger, self._sizes, self._published = ledger, sizes, published
        layout, local, mask = sizes.layout, sizes.local_len, sizes.problem.mask
        ranks = range(layout.num_ranks)
        self.num_visits = len(ranks)
        rows = [[layout.num_needed(to, source, local, mask) for source in ranks] for to in ranks]
        row_bytes = sizes.kv / local
        self._come = row_bytes * max(sum(row) for row in rows)
        leave = [0 if published else sum(row[rank] for row in rows) for rank in ranks]
        self._leave = row_bytes * max(leave)
        self.narrow = not sizes.problem.packed
        counts = layout.few_needed(local, mask) if self.narrow else None
        self.keeps_keys = counts is not None
        self._few = row_bytes * sum(counts or ())
        self._asked_once = self.narrow and all(disjoint(_asked_of(sizes, rank)) for rank in ranks)

    def keeps(self, calls: Sequence[CallSizes]) -> bool:
        return self._asked_once and len(calls) == 1 and calls[0].whole_kv

    def begin(self, *, gradients: bool) -> None:
        kv = self._sizes.kv
        if self._published:
            many = kv + (2 * kv if gradients else 0)
            self._ledger.hold(published=self._few if self.keeps_keys else many)
        kept = gradients and self.keeps_keys
        self._ledger.hold(visiting_keys=self._come + (0.0 if kept else self._leave))

    def arrive(self, visit: int) -> None:
        pass

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        wide = self._sizes.wide
        if visit == 0:
            self._ledger.hold(dk_dv_sums=self._sizes.kv * (1 if self.keeps(calls) else wide))
        elif calls:
            arrived = min(self._sizes.kv, sum(call.kv for call in calls))
            with self._ledger.during(dk_dv_sums=wide * arrived):
                # What leaves is kept until the end, and there is room for what comes home.
                self._ledger.hold(returning_dk_dv=self._come + self._leave)


def _asked_of(sizes: LocalSizes, source: int) -> list[slice]:
    """Rows of ``source`` that other ranks need."""
    others = (to for to in range(sizes.layout.num_ranks) if to != source)
    blocks = (sizes.layout.blocks(to, source, sizes.local_len, sizes.problem.mask) for to in others)
    return [part for found in blocks for part in keys_of(found)]


class GatheredKeys(_Plain):
    """Keys of all ranks, some KV heads at a time, as they come and as kernels read them."""

    def __init__(self, ledger: Ledger, sizes: LocalSizes, kv_heads_at_once: int) -> None:
        self._ledger, self._sizes = ledger, sizes
        num_kv_heads = sizes.problem.num_kv_heads
        self.num_visits = num_kv_heads // (kv_heads_at_once or num_kv_heads)
        self._own = sizes.kv / self.num_visits
        self._everything = sizes.layout.num_ranks * self._own
        # A packed call takes its keys by index; for a dense one they are put in order.
        self._arranged = 0.0 if sizes.problem.packed else self._everything

    def _coming(self, visit: int) -> float:
        return self._everything if visit + 1 < self.num_visits else 0.0

    @property
    def _copies_heads(self) -> bool:
        """Whether some heads of k are not contiguous in memory."""
        problem = self._sizes.problem
        return self.num_visits > 1 and (problem.packed or problem.batch_size > 1)

    @property
    def _wide_total(self) -> float:
        """Float32 dk, or dv, of all ranks."""
        return self._everything / 2 * self._sizes.wide

    def _sum(self, calls: Sequence[CallSizes]) -> None:
        """The sum of dk, or dv, of several calls, put in the order of the ranks."""
        total = self._wide_total
        self._ledger.hold(summed=total)
        add_wide_rows(self._ledger, self._sizes, calls)
        if not self._sizes.problem.packed:
            # In the order of the ranks, and before it in the order of their pieces.
            copies = 1 if self._sizes.layout.is_in_order else 2
            with self._ledger.during(summed=copies * total):
                pass


class AllGatherMemory(GatheredKeys):
    """A collective keeps what it gathered until the next one, and what it reduces to the end."""

    def begin(self, *, gradients: bool) -> None:
        self._ledger.hold(gathered_keys=self._everything)

    def arrive(self, visit: int) -> None:
        coming = self._coming(visit)
        copied = self._own if coming and self._copies_heads else 0.0
        self._ledger.hold(gathered_keys=self._everything + coming, own_heads=copied)
        # The keys of the visit before are let go afterwards.
        before = self._everything if visit else 0.0
        self._ledger.hold(arranged_keys=before + self._arranged)
        self._ledger.hold(arranged_keys=self._arranged)

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        own = self._wide_total / self._sizes.layout.num_ranks
        for _ in ("dk", "dv"):
            self._sum(calls)
            self._ledger.free("summed")
            self._ledger.add(reduced_dk_dv=self._wide_total + own)


class SymmetricGatherMemory(GatheredKeys):
    """Keys in their places as they come; gradients published for all ranks, and own sums."""

    def begin(self, *, gradients: bool) -> None:
        published = self._sizes.kv + (self._everything if gradients else 0)
        self._ledger.hold(published=published, coming_keys=self._everything)

    def arrive(self, visit: int) -> None:
        # The keys of the visit before are let go afterwards.
        before = self._everything if visit else 0.0
        coming = self._coming(visit)
        self._ledger.hold(arranged_keys=before + self._everything, coming_keys=coming)
        self._ledger.hold(arranged_keys=self._everything)

    def deliver(self, visit: int, calls: Sequence[CallSizes]) -> None:
        if self._sizes.problem.packed:
            for _ in ("dk", "dv"):
                self._sum(calls)
                self._ledger.free("summed")
        self._ledger.hold(own_dk_dv=self._sizes.wide * self._sizes.kv)
        # The parts of one peer after another.
        with self._ledger.during(landed_dk_dv=self._own):
            pass


def add_wide_rows(ledger: Ledger, sizes: LocalSizes, calls: Sequence[CallSizes]) -> None:
    """Rows of packed dk, or dv, are widened to float32 before they are added by index."""
    taken = [call.kv for call in calls if not call.whole_kv]
    if sizes.problem.packed and taken and sizes.wide > 1:
        with ledger.during(wide_rows=max(taken) / 2 * sizes.wide):
            pass
