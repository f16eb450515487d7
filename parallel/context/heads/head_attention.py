"""Attention over heads, bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionSpec
from kernels.autograd import first_order_only
from parallel.context.blocks.layouts import Layout
from parallel.context.blocks.tracing import COMPUTE, Tracer
from parallel.context.bound import SplitAttention
from parallel.context.heads.agreement import agree, facts_of_call, kind_of_call
from parallel.context.heads.exchange import Exchange, ExchangePlan
from parallel.context.heads.sequences import HEAD_DIM, DenseSequences, PackedSequences, Sequences
from parallel.context.heads.split import HeadSplit, Piece

_NAME = "attention over heads (ulysses)"
"""For errors."""

_PLANS_KEPT = 16
"""A training run packs each batch anew, and its layers share the batch's packing."""


class HeadAttention(SplitAttention):
    """A kernel over the ranks of a group, each with whole sequences of some heads."""

    def __init__(self, kernel: Attention, layout: Layout, group: dist.ProcessGroup) -> None:
        super().__init__(layout, group)
        self._kernel = kernel
        self._plans: dict[tuple[Any, ...], tuple[Tensor | None, ExchangePlan]] = {}
        self._agreed: set[str] = set()
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if they differ in shape, dtype or packing, or one of them
        has other tokens than its part of the packing; looked at for each new shape and packing.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        exchange = self._exchange(q, k, v, spec)
        backward = _BackwardSpan(self.tracer)
        whole = _Inwards.apply(q, k, v, exchange, backward)
        with self.tracer.span(COMPUTE, 0):
            parts = [
                self._kernel.attend(*_piece(whole, piece), self._spec(spec, exchange, piece))
                for piece in exchange.plan.pieces
            ]
        o: Tensor = _Outwards.apply(_joined(parts, HEAD_DIM), exchange, backward)
        return o

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        if not self._kernel.gives_lse:
            return None
        if self.layout.num_ranks == 1:
            return self._kernel.attend_with_lse(q, k, v, spec)
        exchange = self._exchange(q, k, v, spec)
        whole = exchange.inwards(q, k, v)
        pieces = exchange.plan.pieces
        found = [
            self._kernel.attend_with_lse(*_piece(whole, piece), self._spec(spec, exchange, piece))
            for piece in pieces
        ]
        o = _joined([part for part, _ in found], HEAD_DIM)
        packed = spec.packing is not None
        lse = _joined([part for _, part in found], 0 if packed else 1)
        # With a last dimension of one, the lse has the form of o.
        column = (lse.mT if packed else lse).unsqueeze(-1)
        own = exchange.outwards_as_queries(column).squeeze(-1)
        return exchange.outwards_as_queries(o), own.mT if packed else own

    def _spec(self, spec: AttentionSpec, exchange: Exchange, piece: Piece) -> AttentionSpec:
        """The call of a piece, with the sinks of its heads; their gradient is zero for others."""
        if spec.sinks is None:
            return spec
        first = exchange.plan.split.q_heads(self.rank).start
        heads = slice(first + piece.q.start, first + piece.q.stop)
        return replace(spec, sinks=spec.sinks[heads])

    def _exchange(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Exchange:
        return Exchange(group=self._group, plan=self._plan((q, k, v), spec), tracer=self.tracer)

    def _plan(self, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> ExchangePlan:
        """What all calls like this one share, when all ranks are known to make the same one."""
        # Of a packing by identity: to compare lengths would wait for the device in every call.
        starts = None if spec.packing is None else spec.packing.cu_seqlens_q
        key = kind_of_call(tensors, spec)
        if key not in self._plans:
            # An evaluation may come first, and its inference tensors are no part of a graph.
            with torch.inference_mode(False):
                sequences = self._sequences(tensors, spec)
            split = HeadSplit(
                num_ranks=self.layout.num_ranks,
                num_heads=tensors[0].shape[1],
                num_kv_heads=tensors[1].shape[1],
            )
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.pop(next(iter(self._plans)))
            # The offsets stay alive with what is known of them, so that no others get their id.
            self._plans[key] = starts, ExchangePlan(self.rank, split, sequences)
        return self._plans[key][1]

    def _sequences(self, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> Sequences:
        facts = facts_of_call(tensors, spec)
        device = tensors[0].device
        if spec.packing is None:
            self._agree(device, facts)
            return DenseSequences(num_ranks=self.layout.num_ranks)
        starts = spec.packing.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        self._agree(device, f"{facts}, lengths {lengths}", self._complaint(tensors, lengths))
        return PackedSequences(self.layout, lengths, device)

    def _complaint(self, tensors: tuple[Tensor, ...], lengths: list[int]) -> str | None:
        expected = sum(map(self.layout.local_len, lengths))
        found = [x.shape[0] for x in tensors]
        if found == [expected] * len(found):
            return None
        return (
            f"q, k and v have {', '.join(map(str, found))} tokens; its part of sequences of "
            f"{', '.join(map(str, lengths))} has {expected}: lengths are those of whole sequences"
        )

    def _agree(self, device: torch.device, facts: str, complaint: str | None = None) -> None:
        if facts not in self._agreed:
            agree(self._group, device, facts, complaint)
            self._agreed.add(facts)


def _piece(whole: tuple[Tensor, Tensor, Tensor], piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one kernel call."""
    q, k, v = (
        x.narrow(HEAD_DIM, heads.start, heads.stop - heads.start)
        for x, heads in zip(whole, (piece.q, piece.kv, piece.kv), strict=True)
    )
    return q, k, v


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _BackwardSpan:
    """The span of the kernel's backward pass, which autograd runs between the two exchanges."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open = contextlib.ExitStack()

    def begin(self) -> None:
        self._open.enter_context(self._tracer.span(COMPUTE, 0))

    def end(self) -> None:
        self._open.close()


class _Inwards(torch.autograd.Function):
    """Whole sequences of this rank's heads, from its tokens of all heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: Exchange, span: _BackwardSpan
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.exchange, ctx.span = exchange, span
        return exchange.inwards(q, k, v)

    @staticmethod
    def backward(ctx: Any, *whole: Tensor) -> Any:
        ctx.span.end()
        with torch.no_grad():
            own = ctx.exchange.outwards(*whole)
        return *first_order_only(_NAME, own, whole), None, None


class _Outwards(torch.autograd.Function):
    """This rank's tokens of all heads, from whole sequences of its own heads."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, exchange: Exchange, span: _BackwardSpan) -> Tensor:
        ctx.exchange, ctx.span = exchange, span
        return exchange.outwards_as_queries(o)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        with torch.no_grad():
            whole_do = ctx.exchange.inwards_as_queries(do)
        ctx.span.begin()
        return *first_order_only(_NAME, (whole_do,), (do,)), None, None
