"""The forward loop and the backward loop that every context-parallel attention runs.

Keys come to the queries, block by block: a transport hands out *visits*, the keys of one rank
(ring) or of all (all-gather), while it has the next ones on their way. The forward loop
attends to each visit and merges by log-sum-exp in float32, so that the error does not grow
with the number of ranks. The backward loop recomputes each visit's part from the log-sum-exp
over all keys (Ring Attention, Liu et al. 2023; FlashAttention-2, section 3.1.2), sums dq in
float32, and hands the gradients of the visiting keys to the transport, which brings them home.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels import Attention, sinks
from kernels.query_gradient import QueryGradient
from parallel.context.blocks.halo import keeps
from parallel.context.blocks.rows import Rows
from parallel.context.blocks.schedule import KernelCall, RankSchedule, query_block
from parallel.context.blocks.tracing import COMPUTE, Tracer


@dataclass(kw_only=True, slots=True, frozen=True)
class Visit:
    """Keys and values that a transport has brought here."""

    step: int
    source: int | None
    """The rank that owns the keys; None for all ranks' keys, as the schedule arranges them."""
    kv_heads: slice
    """The KV heads that are here."""
    k: Tensor
    v: Tensor


@dataclass(slots=True, frozen=True)
class Contribution:
    """Gradients of keys from one kernel call."""

    call: KernelCall
    dk: Tensor
    dv: Tensor


class Transport(Protocol):
    """Brings other ranks' keys here, and their gradients home; made for one pass of one call.

    Between :meth:`visits` handing out one visit and the next, the caller computes; in a backward
    pass it calls :meth:`deliver` for each visit before it asks for the next.
    """

    def visits(
        self, k: Tensor, v: Tensor, schedule: RankSchedule, kept: Sequence[Visit] | None = None
    ) -> Iterator[Visit]:
        """Every rank's keys once.

        Args:
            kept: in the backward pass under a halo that :func:`keeps` them, the forward pass's
                visits of other ranks' keys, in order. They come first, so that their gradients
                travel while this rank computes with its own keys; else its own are the first.
        """
        ...

    def deliver(self, visit: Visit, contributions: Sequence[Contribution]) -> None:
        """Take the gradients of a visit's keys."""
        ...

    def collect(self) -> tuple[Tensor, Tensor]:
        """(dk, dv) of this rank's own keys, summed over all ranks in float32.

        In float32, or rounded to the dtype of the keys.
        """
        ...


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionPass:
    """One forward or backward pass over the keys of all ranks.

    Tensors are local, dense [B, H, S, D] or packed [T, H, D] as the schedule is.
    """

    kernel: Attention
    schedule: RankSchedule
    transport: Transport
    tracer: Tracer
    sinks: Tensor | None = None
    """Put in once, when all keys have been seen; the backward pass of the keys needs none."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Visit]]:
        """o in q's dtype and lse in float32, of this rank's queries over all ranks' keys.

        And the visits that a backward pass is given again.
        """
        schedule, kept = self.schedule, []
        head_dim = schedule.head_dim_of[0]
        # Sinks shrink o once more, before it is rounded.
        o = _Total(q, schedule, once=schedule.merges_once and self.sinks is None)
        lse = _Total(q, schedule, lse=True)
        for visit in self.transport.visits(k, v, schedule):
            if visit.step and keeps(schedule.halo):
                kept.append(visit)
            heads = _query_heads(visit.kv_heads, q, k, schedule)
            for call in _calls(schedule, visit):
                with self.tracer.span(COMPUTE, visit.step):
                    self._attend(call, visit, heads, _of_heads(q, heads, head_dim), o, lse)
        total = o.result(), lse.result()
        if self.sinks is not None:
            total = sinks.add(*total, self.sinks)
        return total[0].to(q.dtype), total[1], kept

    def _attend(
        self, call: KernelCall, visit: Visit, heads: slice | None, q: Tensor, o: _Total, lse: _Total
    ) -> None:
        """Compute one call with the queries ``q`` of these heads, and merge what it gives."""
        tensors = call.q.take(q), call.kv.take(visit.k), call.kv.take(visit.v)
        if call.first:
            part = self.kernel.forward(*tensors, call.spec)
            o.put(heads, call.q, part[0])
            lse.put(heads, call.q, part[1])
        else:
            so_far = (o.so_far(heads, call.q).float(), lse.so_far(heads, call.q))
            part = self.kernel.forward_onto(*so_far, *tensors, call.spec)
            o.put_back(heads, call.q, part[0])
            lse.put_back(heads, call.q, part[1])

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        kept: Sequence[Visit] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens, in the dtypes of q, k and v.

        Args:
            kept: what :meth:`forward` gave.
        """
        dq = self._query_gradient(do, q, k, o, lse)
        again = kept if keeps(self.schedule.halo) else None
        for visit in self.transport.visits(k, v, self.schedule, again):
            self.transport.deliver(visit, self._key_gradients(visit, dq))
        # While the last gradients of keys are on their way.
        total = dq.result().to(q.dtype)
        dk, dv = self.transport.collect()
        return total, dk.to(k.dtype), dv.to(v.dtype)

    def _key_gradients(self, visit: Visit, dq: _SumOfCalls | _SumOfKernel) -> list[Contribution]:
        """The gradients of a visit's keys, while dq grows."""
        found = []
        for call in _calls(self.schedule, visit):
            with self.tracer.span(COMPUTE, visit.step):
                # Rows that a call takes are let go with it.
                gradients = dq.add(call, visit, (call.kv.take(visit.k), call.kv.take(visit.v)))
                found.append(Contribution(call, *gradients))
        return found

    def _query_gradient(
        self, do: Tensor, q: Tensor, k: Tensor, o: Tensor, lse: Tensor
    ) -> _SumOfCalls | _SumOfKernel:
        if self.schedule.query_blocks:
            blocks = self.schedule.query_blocks
            in_kernel = self.kernel.query_gradient(do, q, k, o, lse, blocks)
            if in_kernel is not None:
                return _SumOfKernel(in_kernel)
        return _SumOfCalls(self.kernel, self.schedule, do, q, k, o, lse)


class _SumOfCalls:
    """dq of kernel calls that each give a part of it, added up in float32."""

    def __init__(
        self,
        kernel: Attention,
        schedule: RankSchedule,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        o: Tensor,
        lse: Tensor,
    ) -> None:
        self._kernel, self._schedule = kernel, schedule
        self._do, self._q, self._k, self._o, self._lse = do, q, k, o, lse
        self._total = _Total(q, schedule, once=schedule.merges_once)

    def add(
        self, call: KernelCall, visit: Visit, keys: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """dk and dv of a call with these of the visit's keys and values."""
        heads = _query_heads(visit.kv_heads, self._q, self._k, self._schedule)
        head_dim, lse_head_dim = self._schedule.head_dim_of
        do, q, o = (
            call.q.take(_of_heads(x, heads, head_dim)) for x in (self._do, self._q, self._o)
        )
        lse = call.q.take_lse(_of_heads(self._lse, heads, lse_head_dim))
        dq, dk, dv = self._kernel.backward(do, q, *keys, o, lse, call.spec)
        if call.first:
            self._total.put(heads, call.q, dq)
        else:
            self._total.add(heads, call.q, dq)
        return dk, dv

    def result(self) -> Tensor:
        return self._total.result()


class _SumOfKernel:
    """dq that the kernel sums from call to call, of all heads."""

    def __init__(self, gradient: QueryGradient) -> None:
        self._gradient = gradient

    def add(
        self, call: KernelCall, visit: Visit, keys: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return self._gradient.add(query_block(call), *keys)

    def result(self) -> Tensor:
        return self._gradient.result()


def _calls(schedule: RankSchedule, visit: Visit) -> Sequence[KernelCall]:
    return schedule.of_all() if visit.source is None else schedule.of_source(visit.source)


def _query_heads(kv_heads: slice, q: Tensor, k: Tensor, schedule: RankSchedule) -> slice | None:
    """The query heads that read these KV heads; None for all of them."""
    dim = schedule.head_dim_of[0]
    if kv_heads.start == 0 and kv_heads.stop == k.shape[dim]:
        return None
    group = q.shape[dim] // k.shape[dim]
    return slice(kv_heads.start * group, kv_heads.stop * group)


def _of_heads(x: Tensor, heads: slice | None, dim: int) -> Tensor:
    return x if heads is None else x.narrow(dim, heads.start, heads.stop - heads.start)


class _Total:
    """A result that calls fill row by row; a first call that gives all rows becomes the result.

    Where results are merged it is float32, unless each is merged ``once``: two parts that are
    summed in float32 are rounded once, wherever they lie.
    """

    def __init__(
        self, like: Tensor, schedule: RankSchedule, *, lse: bool = False, once: bool = False
    ) -> None:
        self._head_dim = schedule.head_dim_of[1 if lse else 0]
        self._lse = lse
        wide = lse or (schedule.accumulates and not once)
        self._dtype = torch.float32 if wide else like.dtype
        self._like = like
        self._value: Tensor | None = None
        self._once = once
        self._later: list[tuple[slice | None, Rows, Tensor]] = []
        """What is added in the end, since it may come before the first calls' results."""

    @property
    def _whole(self) -> Tensor:
        if self._value is None:
            shape = list(self._like.shape)
            if self._lse:
                # [B, H, S] beside [B, H, S, D], and [H, T] beside [T, H, D].
                shape = shape[:-1] if len(shape) == 4 else [shape[1], shape[0]]
            self._value = self._like.new_empty(shape, dtype=self._dtype)
        return self._value

    def put(self, heads: slice | None, rows: Rows, part: Tensor) -> None:
        """The result of a first call."""
        if rows.whole and heads is None:
            self._value = part.to(self._dtype)
        else:
            self.put_back(heads, rows, part)

    def so_far(self, heads: slice | None, rows: Rows) -> Tensor:
        """The result of these rows until now, to be merged with."""
        view = _of_heads(self._whole, heads, self._head_dim)
        return rows.take_lse(view) if self._lse else rows.take(view)

    def put_back(self, heads: slice | None, rows: Rows, part: Tensor) -> None:
        """What :meth:`so_far` gave, merged: in its place, or elsewhere."""
        view = _of_heads(self._whole, heads, self._head_dim)
        (rows.put_lse if self._lse else rows.put)(view, part)

    def add(self, heads: slice | None, rows: Rows, part: Tensor) -> None:
        if self._once:
            self._later.append((heads, rows, part))
        else:
            rows.add(_of_heads(self._whole, heads, self._head_dim), part)

    def result(self) -> Tensor:
        for heads, rows, part in self._later:
            rows.add(_of_heads(self._whole, heads, self._head_dim), part)
        return self._whole
