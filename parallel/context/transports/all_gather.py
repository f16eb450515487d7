"""All-gather of the keys, reduce-scatter of their gradients: one collective each way.

As Llama 3 was trained (Grattafiori et al. 2024, section 3.3.2). Gathered keys take P times the
memory of local ones; gathering a few KV heads at a time bounds that, and lets the heads after
them travel while these are computed. Gradients are summed over ranks in float32, so that the
error does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.loops import Contribution, Visit
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import WAIT, Tracer

# Renamed in torch 2.13, which warns of the names that older versions know alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class _Reduction:
    """Gradients of some KV heads on their way to the owners of the keys."""

    kv_heads: slice
    parts: tuple[Tensor, Tensor]
    works: list[dist.Work]


class AllGather:
    """Collectives over the group, ``heads_at_once`` KV heads at a time (all if None)."""

    def __init__(
        self, group: dist.ProcessGroup, tracer: Tracer, heads_at_once: int | None = None
    ) -> None:
        self._group = group
        self._num_ranks = dist.get_world_size(group)
        self._tracer = tracer
        self._heads_at_once = heads_at_once
        self._reductions: list[_Reduction] = []
        self._schedule: RankSchedule | None = None

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        self._schedule = schedule
        groups = head_groups(k.shape[schedule.head_dim_of[0]], self._heads_at_once)
        coming = self._start(k, v, schedule, groups[0])
        for step, heads in enumerate(groups):
            gathered, works = coming
            with self._tracer.span(WAIT, step):
                for pending in works:
                    pending.wait()
            if step + 1 < len(groups):
                coming = self._start(k, v, schedule, groups[step + 1])
            else:
                del coming
            arranged = [schedule.arrange(x) for x in gathered]
            del gathered
            yield Visit(step=step, source=None, kv_heads=heads, k=arranged[0], v=arranged[1])

    def _start(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, heads: slice
    ) -> tuple[list[Tensor], list[dist.Work]]:
        gathered, works = [], []
        for x in (k, v):
            own = select_heads(x, schedule, heads).contiguous()
            everything = own.new_empty((self._num_ranks, *own.shape))
            # Concatenated along the first dimension, the form that every backend takes.
            flat = everything.view(-1, *own.shape[1:])
            works.append(_all_gather(flat, own, group=self._group, async_op=True))
            gathered.append(everything)
            self._tracer.sent((self._num_ranks - 1) * own.nbytes)
        return gathered, works

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        assert self._schedule is not None, "deliver() follows visits()"
        parts, works = [], []
        for name, like in (("dk", visit.k), ("dv", visit.v)):
            total = sum_of_contributions(like, contributions, name)
            by_rank = self._schedule.by_rank(total).contiguous()
            del total
            own = torch.empty_like(by_rank[0])
            flat = by_rank.view(-1, *own.shape[1:])
            works.append(_reduce_scatter(own, flat, group=self._group, async_op=True))
            self._tracer.sent((self._num_ranks - 1) * own.nbytes)
            parts.append(own)
        self._reductions.append(_Reduction(visit.kv_heads, (parts[0], parts[1]), works))

    def collect(self) -> tuple[Tensor, Tensor]:
        assert self._schedule is not None, "collect() follows visits()"
        with self._tracer.span(WAIT, len(self._reductions)):
            for reduction in self._reductions:
                for pending in reduction.works:
                    pending.wait()
        dim = self._schedule.head_dim_of[0]
        return join_heads([reduction.parts for reduction in self._reductions], dim)


def head_groups(num_kv_heads: int, heads_at_once: int | None) -> list[slice]:
    """KV heads in groups of ``heads_at_once``."""
    size = heads_at_once or num_kv_heads
    return [slice(start, start + size) for start in range(0, num_kv_heads, size)]


def select_heads(x: Tensor, schedule: RankSchedule, heads: slice) -> Tensor:
    return x.narrow(schedule.head_dim_of[0], heads.start, heads.stop - heads.start)


def join_heads(parts: Sequence[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    """(dk, dv) of all heads from those of each group."""
    if len(parts) == 1:
        return parts[0]
    dk, dv = (torch.cat([part[index] for part in parts], dim) for index in (0, 1))
    return dk, dv


def sum_of_contributions(like: Tensor, contributions: Sequence[Contribution], name: str) -> Tensor:
    """Float32 sum of the ``dk`` or ``dv`` of several calls, in the shape ``like``."""
    if len(contributions) == 1 and contributions[0].call.kv.whole:
        only: Tensor = getattr(contributions[0], name)
        return only.float()
    total = torch.zeros_like(like, dtype=torch.float32)
    for contribution in contributions:
        contribution.call.kv.add(total, getattr(contribution, name))
    return total


def write_contributions(out: Tensor, contributions: Sequence[Contribution], name: str) -> None:
    """Write the ``dk`` or ``dv`` of all calls into a slot, zeros where none has any."""
    if len(contributions) > 1:
        # They may have keys in common.
        out.copy_(sum_of_contributions(out, contributions, name))
        return
    if len(contributions) == 1 and contributions[0].call.kv.whole:
        out.copy_(getattr(contributions[0], name))
        return
    out.zero_()
    for contribution in contributions:
        contribution.call.kv.put(out, getattr(contribution, name))
