"""Heads exchanged by messages: one all-to-all collective for each group of heads, each way.

What is sent is put in the order of the ranks before, and what came in the order of the tokens
after. The collective runs beside what is computed between its start and the wait for it, on NCCL
on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.tracing import WAIT, Tracer
from parallel.context.heads.exchange import ExchangePlan, Kinds, summed_columns
from parallel.context.heads.sequences import HEAD_DIM


class AllToAll:
    """Collectives of a process group, over NCCL or gloo."""

    outside_bytes = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def exchange(self, plan: ExchangePlan, tracer: Tracer) -> AllToAllExchange:
        return AllToAllExchange(self._group, plan, tracer)


class AllToAllExchange:
    """The exchanges of one pass."""

    def __init__(self, group: dist.ProcessGroup, plan: ExchangePlan, tracer: Tracer) -> None:
        self._group, self._plan, self._tracer = group, plan, tracer

    def inwards(
        self, kinds: Kinds, tensors: Sequence[Tensor], *, last_first: bool = False
    ) -> list[_Arriving]:
        rows, order = [_rows(x) for x in tensors], self._plan.order(last_first=last_first)
        arriving = {group: self._bring(kinds, rows, group) for group in order}
        return [arriving[group] for group in self._plan.groups]

    def _bring(self, kinds: Kinds, rows: Sequence[Tensor], group: int) -> _Arriving:
        plan = self._plan
        counts = plan.counts(kinds, group)
        if len(rows) == 1 and plan.num_groups == 1:
            # In the order of the ranks already.
            sent = rows[0].contiguous()
        else:
            sent = torch.cat(
                [
                    x[heads.start : heads.stop]
                    for rank in range(plan.num_ranks)
                    for x, heads in zip(
                        rows, (plan.heads(kind, rank, group) for kind in kinds), strict=True
                    )
                ]
            )
        coming = [counts[plan.rank]] * plan.num_ranks
        message = _Message(self._group, self._tracer, sent, counts, coming, plan.rank)
        return _Arriving(plan, kinds, group, message)

    def outwards(self, kinds: Kinds, like: Tensor) -> _Leaving:
        return _Leaving(self._group, self._plan, self._tracer, kinds)


class _Message:
    """One collective under way: rows for each rank, and rows from each."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tracer: Tracer,
        sent: Tensor,
        counts: Sequence[int],
        coming: Sequence[int],
        rank: int,
    ) -> None:
        self._tracer = tracer
        self._got = sent.new_empty((sum(coming), *sent.shape[1:]))
        # Kept until it has left.
        self._sent: Tensor | None = sent
        tracer.sent((sum(counts) - counts[rank]) * sent[0].nbytes)
        # As bytes, which every backend moves, whatever the dtype.
        self._work = dist.all_to_all_single(
            self._got.view(torch.uint8),
            sent.view(torch.uint8),
            list(coming),
            list(counts),
            group=group,
            async_op=True,
        )

    def wait(self, step: int) -> Tensor:
        """The rows that came; on CUDA the current stream waits, not the host."""
        if self._work is not None:
            with self._tracer.span(WAIT, step):
                self._work.wait()
        self._work = self._sent = None
        return self._got


class _Arriving:
    """A group's heads from all ranks."""

    def __init__(self, plan: ExchangePlan, kinds: Kinds, group: int, message: _Message) -> None:
        self._plan, self._kinds, self._group = plan, kinds, group
        self._message: _Message | None = message

    def wait(self) -> list[Tensor]:
        assert self._message is not None, "waited for once"
        plan = self._plan
        got = self._message.wait(self._group)
        self._message = None
        sizes = [len(plan.heads(kind, plan.rank, self._group)) for kind in self._kinds]
        parts = got.unflatten(0, (plan.num_ranks, -1)).split(sizes, dim=1)
        del got
        return [plan.sequences.join(part) for part in parts]


class _Leaving:
    """Results of all groups, on their way to the ranks that hold the tokens."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: ExchangePlan,
        tracer: Tracer,
        kinds: Kinds,
    ) -> None:
        self._group, self._plan, self._tracer, self._kinds = group, plan, tracer, kinds
        self._messages: dict[int, _Message] = {}

    def send(self, group: int, whole: Sequence[Tensor]) -> None:
        plan = self._plan
        parts = [plan.sequences.cut(x) for x in whole]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        del parts
        sent = joined.flatten(0, 1).contiguous()
        coming = plan.counts(self._kinds, group)
        counts = [coming[plan.rank]] * plan.num_ranks
        self._messages[group] = _Message(self._group, self._tracer, sent, counts, coming, plan.rank)

    def collect(self) -> list[Tensor]:
        plan = self._plan
        if len(self._kinds) == 1 and plan.num_groups == 1:
            # In the order of the heads already.
            return [_rows(self._messages.pop(0).wait(plan.num_groups)).contiguous()]
        parts = {
            (group, rank): part
            for group in plan.groups
            for rank, part in enumerate(self._parts(group))
        }
        self._messages = {}
        found = []
        for number, kind in enumerate(self._kinds):
            columns = [
                (heads, _rows(parts[group, rank][number]))
                for rank, group, heads in plan.columns(kind)
            ]
            if plan.repeats(kind):
                found.append(summed_columns(columns, plan.shares.num_kv_heads, HEAD_DIM))
            else:
                found.append(torch.cat([part for _, part in columns], HEAD_DIM))
        return found

    def _parts(self, group: int) -> list[Sequence[Tensor]]:
        """For each rank, its heads of each kind as rows."""
        plan = self._plan
        # The step after those of the groups.
        got = self._messages[group].wait(plan.num_groups)
        sizes = [
            len(plan.heads(kind, rank, group))
            for rank in range(plan.num_ranks)
            for kind in self._kinds
        ]
        parts, each = got.split(sizes), len(self._kinds)
        return [parts[start : start + each] for start in range(0, len(parts), each)]


def _rows(x: Tensor) -> Tensor:
    """Tokens of heads -> heads of tokens, and back."""
    return x.transpose(0, HEAD_DIM)
