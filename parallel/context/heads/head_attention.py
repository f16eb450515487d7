"""Attention over heads, bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionSpec
from kernels.autograd import first_order_only
from parallel.context.blocks.kept import Kept
from parallel.context.blocks.layouts import Layout
from parallel.context.blocks.tracing import COMPUTE, Tracer
from parallel.context.bound import SplitAttention
from parallel.context.heads.agreement import Agreements, facts_of_call, kind_of_call
from parallel.context.heads.exchange import (
    INPUTS,
    QUERIES,
    Arriving,
    ExchangePlan,
    HeadExchange,
    HeadTransport,
    Leaving,
)
from parallel.context.heads.sequences import HEAD_DIM, DenseSequences, PackedSequences, Sequences
from parallel.context.heads.split import HeadSplit, Piece

_NAME = "attention over heads (ulysses)"
"""For errors."""


class HeadAttention(SplitAttention):
    """A kernel over the ranks of a group, each with whole sequences of some heads.

    Args:
        transport: how the ranks exchange heads.
        num_groups: groups of heads that a rank attends with one after another, while the others
            are exchanged.
    """

    def __init__(
        self,
        kernel: Attention,
        layout: Layout,
        group: dist.ProcessGroup,
        transport: HeadTransport,
        num_groups: int,
    ) -> None:
        super().__init__(layout, group)
        self._kernel = kernel
        self._transport = transport
        self._num_groups = num_groups
        self._plans: Kept[tuple[str, ExchangePlan]] = Kept()
        self._agreements = Agreements(group)
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    @property
    def outside_bytes(self) -> int:
        return self._transport.outside_bytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if they differ in shape, dtype or packing, or one of them
        has other tokens than its part of the packing; looked at for each new shape and packing.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        call = _Call(self._transport, self._plan((q, k, v), spec), self.tracer)
        call.begin(q, k, v)
        last = call.plan.num_groups - 1
        sent: list[Tensor] = []
        for group, pieces in enumerate(call.plan.pieces):
            whole = _Inwards.apply(q, k, v, call, group)
            with self.tracer.span(COMPUTE, group):
                parts = [
                    self._kernel.attend(
                        *_piece(whole, piece), self._spec(spec, call.plan, group, piece)
                    )
                    for piece in pieces
                ]
            joined = _joined(parts, HEAD_DIM)
            sent.append(_Outwards.apply(joined, call, group, *(sent if group == last else ())))
        return sent[-1]

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        if not self._kernel.gives_lse:
            return None
        if self.layout.num_ranks == 1:
            return self._kernel.attend_with_lse(q, k, v, spec)
        plan = self._plan((q, k, v), spec)
        with torch.no_grad():
            exchange = self._transport.exchange(plan, self.tracer)
            arriving = exchange.inwards(INPUTS, (q, k, v))
            o = exchange.outwards(QUERIES, q)
            found = []
            for group, pieces in enumerate(plan.pieces):
                whole = arriving[group].wait()
                parts = [
                    self._kernel.attend_with_lse(
                        *_piece(whole, piece), self._spec(spec, plan, group, piece)
                    )
                    for piece in pieces
                ]
                o.send(group, (_joined([part for part, _ in parts], HEAD_DIM),))
                found.append([part for _, part in parts])
            (own,) = o.collect()
            return own, self._lse(exchange, plan, q, found, packed=spec.packing is not None)

    def _lse(
        self,
        exchange: HeadExchange,
        plan: ExchangePlan,
        q: Tensor,
        found: list[list[Tensor]],
        *,
        packed: bool,
    ) -> Tensor:
        """This rank's lse of all heads, from that of each group's pieces."""
        # With a last dimension of one, the lse has the form of o.
        like = torch.empty((*q.shape[:-1], 1), dtype=torch.float32, device=q.device)
        leaving = exchange.outwards(QUERIES, like)
        for group, parts in enumerate(found):
            lse = _joined(parts, 0 if packed else 1)
            leaving.send(group, ((lse.mT if packed else lse).unsqueeze(-1),))
        own = leaving.collect()[0].squeeze(-1)
        return own.mT if packed else own

    def _spec(
        self, spec: AttentionSpec, plan: ExchangePlan, group: int, piece: Piece
    ) -> AttentionSpec:
        """The call of a piece, with the sinks of its heads; their gradient is zero for others."""
        if spec.sinks is None:
            return spec
        first = plan.first_head(group)
        heads = slice(first + piece.q.start, first + piece.q.stop)
        return replace(spec, sinks=spec.sinks[heads])

    def _plan(self, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> ExchangePlan:
        """What all calls like this one share, when all ranks are known to make the same one."""
        key, device = kind_of_call(tensors, spec), tensors[0].device
        found = self._plans.get(key, device)
        if found is not None:
            self._agreements.repeat(found[0])
            return found[1]
        # An evaluation may come first, and its inference tensors are no part of a graph.
        with torch.inference_mode(False):
            facts, sequences = self._sequences(tensors, spec)
        split = HeadSplit(
            num_ranks=self.layout.num_ranks,
            num_heads=tensors[0].shape[1],
            num_kv_heads=tensors[1].shape[1],
        )
        plan = ExchangePlan(self.rank, split, sequences, self._num_groups)
        starts = None if spec.packing is None else spec.packing.cu_seqlens_q
        self._plans.put(key, (facts, plan), starts)
        return plan

    def _sequences(self, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> tuple[str, Sequences]:
        """What ranks have agreed on, in words, and how their tensors hold it."""
        facts = facts_of_call(tensors, spec)
        device = tensors[0].device
        if spec.packing is None:
            self._agreements.require(device, facts)
            return facts, DenseSequences(num_ranks=self.layout.num_ranks)
        starts = spec.packing.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        facts = f"{facts}, lengths {lengths}"
        self._agreements.require(device, facts, self._complaint(tensors, lengths))
        return facts, PackedSequences(self.layout, lengths, device)

    def _complaint(self, tensors: tuple[Tensor, ...], lengths: list[int]) -> str | None:
        expected = sum(map(self.layout.local_len, lengths))
        found = [x.shape[0] for x in tensors]
        if found == [expected] * len(found):
            return None
        return (
            f"q, k and v have {', '.join(map(str, found))} tokens; its part of sequences of "
            f"{', '.join(map(str, lengths))} has {expected}: lengths are those of whole sequences"
        )


def _piece(whole: Sequence[Tensor], piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one kernel call."""
    q, k, v = (
        x.narrow(HEAD_DIM, heads.start, heads.stop - heads.start)
        for x, heads in zip(whole, (piece.q, piece.kv, piece.kv), strict=True)
    )
    return q, k, v


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Call:
    """One call of :meth:`HeadAttention.attend`, as the nodes of autograd's graph share it."""

    def __init__(self, transport: HeadTransport, plan: ExchangePlan, tracer: Tracer) -> None:
        self.plan, self.tracer = plan, tracer
        self._transport = transport
        self._arriving: Sequence[Arriving] = ()
        self._leaving: Leaving | None = None
        self._num_sent = 0
        self.sources: tuple[Tensor, ...] = ()
        """What the gradients of all groups depend on, where autograd would follow it."""
        self._computing = contextlib.ExitStack()

    def begin(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Start to exchange the inputs of the forward pass."""
        exchange = self._transport.exchange(self.plan, self.tracer)
        self._leaving, self._num_sent = exchange.outwards(QUERIES, q), 0
        with torch.no_grad():
            self._arriving = exchange.inwards(INPUTS, (q, k, v))

    def begin_backward(self, do: Tensor) -> None:
        """Start to exchange the input of the backward pass."""
        exchange = self._transport.exchange(self.plan, self.tracer)
        self._leaving, self._num_sent = exchange.outwards(INPUTS, do), 0
        self.sources = (do,) if torch.is_grad_enabled() else ()
        with torch.no_grad():
            self._arriving = exchange.inwards(QUERIES, (do,), last_first=True)

    def arrived(self, group: int) -> Sequence[Tensor]:
        """The inputs of a group."""
        return self._arriving[group].wait()

    def send(self, group: int, whole: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Send a group's results; after the last group, this rank's own of all heads."""
        assert self._leaving is not None, "begin() comes first"
        self._leaving.send(group, whole)
        self._num_sent += 1
        if self._num_sent < self.plan.num_groups:
            return None
        found = self._leaving.collect()
        self._leaving, self._arriving, self.sources = None, (), ()
        return found

    def begin_computing(self, group: int) -> None:
        """The kernel's backward pass comes now, which autograd runs between two nodes."""
        self._computing.enter_context(self.tracer.span(COMPUTE, group))

    def end_computing(self) -> None:
        self._computing.close()


class _Inwards(torch.autograd.Function):
    """Whole sequences of a group of this rank's heads, from its tokens of all heads.

    Autograd runs the groups from the last to the first; the gradients of all come with the one
    that it runs last.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call, group: int
    ) -> tuple[Tensor, ...]:
        ctx.call, ctx.group = call, group
        return tuple(call.arrived(group))

    @staticmethod
    def backward(ctx: Any, *whole: Tensor) -> Any:
        ctx.call.end_computing()
        with torch.no_grad():
            own = ctx.call.send(ctx.group, whole)
        if own is None:
            return (None,) * 5
        return *first_order_only(_NAME, own, whole), None, None


class _Outwards(torch.autograd.Function):
    """This rank's tokens of all heads, from whole sequences of each group of its own heads.

    Only the last group gives them; those before give a tensor without elements, by which the last
    depends on them.
    """

    @staticmethod
    def forward(ctx: Any, o: Tensor, call: _Call, group: int, *before: Tensor) -> Tensor:
        ctx.call, ctx.group, ctx.num_before = call, group, len(before)
        ctx.set_materialize_grads(False)
        own = call.send(group, (o,))
        return o.new_empty(0) if own is None else own[0]

    @staticmethod
    def backward(ctx: Any, do: Tensor | None) -> Any:
        call, group = ctx.call, ctx.group
        if do is not None:
            call.begin_backward(do)
        with torch.no_grad():
            (whole_do,) = call.arrived(group)
        call.begin_computing(group)
        own = first_order_only(_NAME, (whole_do,), call.sources)
        return *own, None, None, *(None,) * ctx.num_before
