"""Attention over placed documents, bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionProblem, AttentionSpec, Packing, sinks
from kernels.autograd import first_order_only
from kernels.problem import Mask
from parallel.context.blocks.kept import Kept
from parallel.context.blocks.tracing import COMPUTE
from parallel.context.bound import SplitAttention
from parallel.context.documents.calls import RankCalls, joins_well, make_calls
from parallel.context.documents.exchange import (
    OWN,
    REST,
    WAITING,
    Arriving,
    KeyExchange,
    RowTransport,
)
from parallel.context.documents.layout import WHY_NOT_DENSE, Documents
from parallel.context.documents.passes import DocumentPass
from parallel.context.documents.placement import place
from parallel.context.documents.routes import Routes
from parallel.context.heads.agreement import Agreements, facts_of_call, kind_of_call

_NAME = "document attention"
"""For errors."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Choices:
    """What is open in :mod:`parallel.context.documents.calls`; None decides by the placement."""

    joined: bool | None = None
    keeps_keys: bool | None = None


class DocumentAttention(SplitAttention):
    """A kernel over the ranks of a group, each with whole documents and parts of others."""

    def __init__(
        self,
        kernel: Attention,
        layout: Documents,
        group: dist.ProcessGroup,
        transport: RowTransport,
        choices: Choices,
    ) -> None:
        super().__init__(layout, group)
        self._kernel = kernel
        self._transport = transport
        self._choices = choices
        self._calls: Kept[tuple[str, RankCalls]] = Kept()
        self._agreements = Agreements(group)
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    @property
    def outside_bytes(self) -> int:
        return self._transport.outside_bytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if they differ in shape, dtype or packing, one of them has
        other tokens than its part of the packing, or the batch is dense; looked at for each new
        shape and packing.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        calls = self._prepared(q, k, v, spec)
        if not self._kernel.gives_lse:
            return self._attend_without_lse(q, k, v, spec, calls)
        # What the passes see holds no sinks, of which autograd knows the tensor alone.
        keys = spec if spec.sinks is None else replace(spec, sinks=None)
        o: Tensor = _Attention.apply(q, k, v, spec.sinks, self, calls, keys)
        return o

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        if not self._kernel.gives_lse:
            return None
        if self.layout.num_ranks == 1:
            return self._kernel.attend_with_lse(q, k, v, spec)
        calls = self._prepared(q, k, v, spec)
        with torch.no_grad():
            o, lse, _ = self.new_pass(calls, spec).forward(q, k, v)
        return o, lse

    def new_pass(self, calls: RankCalls, spec: AttentionSpec) -> DocumentPass:
        """A pass over the rank's runs."""
        return DocumentPass(
            kernel=self._kernel,
            calls=calls,
            exchange=self._exchange(calls),
            like=spec,
            tracer=self.tracer,
        )

    def _exchange(self, calls: RankCalls) -> KeyExchange:
        return KeyExchange(transport=self._transport, calls=calls, tracer=self.tracer)

    def _attend_without_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, calls: RankCalls
    ) -> Tensor:
        """By the kernel's own backward pass, which keeps the keys of other ranks until then.

        Autograd runs backward what was computed last first: gradients of other ranks' keys are on
        their way home while those of the rank's own ones are computed.
        """
        exchange, box = self._exchange(calls), _Box()
        rows_on_the_way = _Fetch.apply(k, v, exchange, box) if calls.travels else None
        parts = []
        if calls.local is not None:
            rows = calls.local.rows
            with self.tracer.span(COMPUTE, OWN):
                tensors = q[rows], k[rows], v[rows]
                parts.append(self._kernel.attend(*tensors, calls.local.spec(spec)))
        if rows_on_the_way is not None:
            arrived = _Wait.apply(rows_on_the_way, exchange, box)
            if calls.rest is not None:
                with self.tracer.span(COMPUTE, WAITING):
                    tensors = (q[calls.rest.rows], *exchange.keys(arrived))
                    parts.append(self._kernel.attend(*tensors, calls.rest.spec(spec)))
            else:
                # Its backward pass is a collective, which this rank has to take part in.
                parts.append(arrived[:0, 0, :1].expand(-1, *q.shape[1:]))
        return torch.cat([*parts, q[calls.num_rows :] * 0])

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> RankCalls:
        if spec.packing is None:
            raise ValueError(WHY_NOT_DENSE)
        key = kind_of_call((q, k, v), spec)
        found = self._calls.get(key, q.device)
        if found is not None:
            self._agreements.repeat(found[0])
            return found[1]
        facts, lengths = self._agreed_lengths((q, k, v), spec.packing, spec)
        # An evaluation may come first, and its inference tensors are no part of a graph.
        with torch.inference_mode(False):
            calls = self._make(q, k, spec.mask, lengths)
        self._calls.put(key, (facts, calls), spec.packing.cu_seqlens_q)
        return calls

    def _make(self, q: Tensor, k: Tensor, mask: Mask, lengths: tuple[int, ...]) -> RankCalls:
        placement = place(lengths, self.layout.num_ranks)
        plan = Routes.of(placement, mask.causal, mask.window, mask.prefix_len)
        joined, keeps_keys = self._choices.joined, self._choices.keeps_keys
        if not mask.causal or not plan.is_plain or not self._kernel.gives_lse:
            joined = True
        elif joined is None:
            rectangle = _problem(q, k, max(lengths))
            fits = self._kernel.why_unsupported(rectangle) is None
            joined = fits and joins_well(plan, self.rank)
        if keeps_keys is None:
            keeps_keys = plan.keeps_keys()
        return make_calls(plan, self.rank, q.device, joined=joined, keeps_keys=keeps_keys)

    def _agreed_lengths(
        self, tensors: tuple[Tensor, ...], packing: Packing, spec: AttentionSpec
    ) -> tuple[str, tuple[int, ...]]:
        """What ranks have agreed on, in words, and the lengths of the whole batch's documents."""
        starts, key_starts = packing.cu_seqlens_q.tolist(), packing.cu_seqlens_k.tolist()
        lengths = tuple(end - start for start, end in itertools.pairwise(starts))
        complaint = None
        if starts != key_starts:
            complaint = "queries and keys of a split document are the same tokens, equally many"
        elif min(lengths, default=0) < 0 or starts[0] != 0:
            complaint = "cu_seqlens must begin with 0 and not decrease"
        else:
            complaint = self._complaint(tensors, lengths)
        facts = f"{facts_of_call(tensors, spec)}, lengths {list(lengths)}"
        self._agreements.require(tensors[0].device, facts, complaint)
        return facts, lengths

    def _complaint(self, tensors: tuple[Tensor, ...], lengths: tuple[int, ...]) -> str | None:
        expected = place(lengths, self.layout.num_ranks).local_len
        found = [x.shape[0] for x in tensors]
        if found != [expected] * len(found):
            return (
                f"q, k and v have {', '.join(map(str, found))} tokens; its part of documents of "
                f"{', '.join(map(str, lengths))} has {expected}: lengths are those of whole "
                "documents"
            )
        if tensors[1].shape != tensors[2].shape:
            return "k and v differ in shape; they travel together"
        return None


def _problem(q: Tensor, k: Tensor, longest: int) -> AttentionProblem:
    """A causal kernel call with fewer queries than keys."""
    return AttentionProblem(
        batch_size=1,
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        q_len=max(1, longest // 2),
        kv_len=longest,
        head_dim=q.shape[2],
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        causal=True,
        needs_grad=True,
        packed=True,
    )


class _Attention(torch.autograd.Function):
    """Saves local q, k, v, o and lse, and keys of other ranks where the calls keep them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        bound: DocumentAttention,
        calls: RankCalls,
        spec: AttentionSpec,
    ) -> Tensor:
        with_sinks = spec if sink_logits is None else replace(spec, sinks=sink_logits)
        o, lse, arrived = bound.new_pass(calls, with_sinks).forward(q, k, v)
        kept = arrived if calls.keeps_keys else None
        ctx.save_for_backward(q, k, v, o, lse, sink_logits, kept)
        ctx.bound, ctx.calls, ctx.spec = bound, calls, spec
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        this_pass = ctx.bound.new_pass(ctx.calls, ctx.spec)
        q, k, v, o, lse, sink_logits, arrived = ctx.saved_tensors
        with torch.no_grad():
            gradients: tuple[Tensor, ...] = this_pass.backward(do, q, k, v, o, lse, arrived)
            sources: tuple[Tensor, ...] = (do, q, k, v)
            if sink_logits is not None:
                rows = slice(0, ctx.calls.num_rows)
                d_sinks = sinks.gradient(do[rows], o[rows], lse[:, rows], sink_logits)
                gradients, sources = (*gradients, d_sinks), (*sources, sink_logits)
        found = first_order_only(_NAME, gradients, sources)
        return *found, *(None,) * (7 - len(found))


class _Box:
    """Gradients on their way home, between two steps of a backward pass."""

    returning: Arriving | None = None


class _Fetch(torch.autograd.Function):
    """Rows of other ranks, on their way; their gradients, when they are home."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: KeyExchange, box: _Box) -> Tensor:
        ctx.exchange, ctx.box = exchange, box
        ctx.save_for_backward(k, v)
        box.returning = exchange.fetch(k, v)
        return box.returning.rows

    @staticmethod
    def backward(ctx: Any, carried: Tensor) -> Any:
        k, v = ctx.saved_tensors
        with torch.no_grad():
            home = [torch.zeros_like(x) for x in (k, v)]
            for x, joined in zip(home, ctx.exchange.joined(carried), strict=True):
                x[ctx.exchange.calls.joined_rows] = joined
            ctx.exchange.add_home(*home, carried, ctx.box.returning.wait(REST))
        # What comes home depends on these keys even where this rank's queries see no others.
        return *first_order_only(_NAME, home, (carried, k, v)), None, None


class _Wait(torch.autograd.Function):
    """Rows that were on their way; their gradients begin to go home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: KeyExchange, box: _Box) -> Tensor:
        assert box.returning is not None, "fetched before"
        box.returning.wait(WAITING)
        ctx.exchange, ctx.box = exchange, box
        # Nothing, but a checkpoint runs the forward pass again when it is asked for.
        ctx.save_for_backward(rows.new_empty(0))
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> Any:
        # In a checkpoint, ranks without a second call would else send gradients before the keys
        # come again, and the others after.
        (_,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.box.returning = ctx.exchange.give_back(gradients)
        return *first_order_only(_NAME, (gradients,), (gradients,)), None, None
