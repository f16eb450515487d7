"""The forward and the backward pass of one rank, for kernels that give a log-sum-exp.

While keys are on their way, the kernel computes what needs the rank's own keys alone. A backward
pass begins with the waiting runs, and computes the rest while gradients of other ranks' keys go
home. Where these keys were not kept, they come again while one half of that rest is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import Attention, AttentionSpec, sinks
from parallel.context.blocks.tracing import COMPUTE, Tracer
from parallel.context.documents.calls import Call, RankCalls
from parallel.context.documents.exchange import OWN, REST, WAITING, KeyExchange


@dataclass(kw_only=True, slots=True, frozen=True)
class DocumentPass:
    """One pass over this rank's runs; tensors are [T, H, D], lse is float32 [H, T]."""

    kernel: Attention
    calls: RankCalls
    exchange: KeyExchange
    like: AttentionSpec
    tracer: Tracer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """o, lse, and the second call's keys if rows travel; padding has o of zero."""
        calls = self.calls
        arriving = self.exchange.fetch(k, v) if calls.travels else None
        parts, so_far = [], None
        if calls.local is not None:
            rows = calls.local.rows
            with self.tracer.span(COMPUTE, OWN):
                o, lse = self.kernel.forward(q[rows], k[rows], v[rows], self._spec(calls.local))
            if calls.merges:
                assert calls.rest is not None
                waiting = calls.rest.rows
                so_far = o[waiting].float(), lse[:, waiting].contiguous()
                o, lse = o[: waiting.start], lse[:, : waiting.start]
            parts.append((o, lse))
        arrived = None if arriving is None else arriving.wait(WAITING)
        if calls.rest is not None:
            assert arrived is not None, "a run waits for rows that travel"
            tensors = (q[calls.rest.rows], *self.exchange.keys(arrived))
            spec = self._spec(calls.rest)
            with self.tracer.span(COMPUTE, WAITING):
                if so_far is None:
                    o, lse = self.kernel.forward(*tensors, spec)
                else:
                    o, lse = self.kernel.forward_onto(*so_far, *tensors, spec)
            parts.append((o.to(q.dtype), lse))
        padding = len(q) - calls.num_rows
        no_lse = q.new_full((q.shape[1], padding), -torch.inf, dtype=torch.float32)
        o = _end_to_end([*(o for o, _ in parts), q.new_zeros(padding, *q.shape[1:])])
        lse = _end_to_end([*(lse for _, lse in parts), no_lse], dim=1)
        if self.like.sinks is not None:
            rows = slice(0, calls.num_rows)
            o[rows], lse[:, rows] = sinks.add(o[rows], lse[:, rows], self.like.sinks)
        return o, lse, arrived

    def _spec(self, call: Call) -> AttentionSpec:
        """The call without sinks, which are put in when all keys have been seen."""
        return replace(self.like, packing=call.packing, causal=call.causal, sinks=None)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        arrived: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of this rank's tokens; zero for padding."""
        calls = self.calls

        def attend(call: Call, keys: tuple[Tensor, Tensor], step: int) -> list[Tensor]:
            rows = call.rows
            saved = o[rows], lse[:, rows].contiguous()
            with self.tracer.span(COMPUTE, step):
                return [*self.kernel.backward(do[rows], q[rows], *keys, *saved, self._spec(call))]

        def attend_own(call: Call, step: int) -> list[Tensor]:
            return attend(call, (k[call.rows], v[call.rows]), step)

        arriving = None
        if calls.travels and arrived is None:
            arriving = self.exchange.fetch(k, v)
        # Two calls where both ways are to be hidden, else one.
        own_first: tuple[Call, ...] = ()
        own_last: tuple[Call, ...] = () if calls.local is None else (calls.local,)
        if arriving is not None:
            own_first, own_last = calls.halves[:1], calls.halves[1:]
        # dq, dk and dv, each by the rows of the calls.
        parts = [attend_own(call, OWN) for call in own_first]
        waiting: Tensor | None = None
        gradients = returning = None
        if calls.travels:
            arrived = arriving.wait(WAITING) if arriving is not None else arrived
            assert arrived is not None
            gradients = arrived  # without rows, where no run waits
            if calls.rest is not None:
                waiting, *found = attend(calls.rest, self.exchange.keys(arrived), WAITING)
                gradients = self.exchange.gradients(*found)
            returning = self.exchange.give_back(gradients)
        parts += [attend_own(call, REST) for call in own_last]
        dqs, dks, dvs = ([part[place] for part in parts] for place in range(3))
        if waiting is not None and calls.merges:
            assert calls.rest is not None
            so_far = _end_to_end(dqs)
            start = calls.rest.rows.start
            dqs = [so_far[:start], (so_far[start:].float() + waiting).to(q.dtype)]
        elif waiting is not None:
            dqs.append(waiting)
        if gradients is not None:
            dk, dv = self.exchange.joined(gradients)
            dks, dvs = [*dks, dk], [*dvs, dv]
        dq, dk, dv = (
            _end_to_end([*found, x.new_zeros(len(x) - calls.num_rows, *x.shape[1:])])
            for found, x in ((dqs, q), (dks, k), (dvs, v))
        )
        if gradients is not None and returning is not None:
            self.exchange.add_home(dk, dv, gradients, returning.wait(REST))
        return dq, dk, dv


def _end_to_end(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """One tensor of all: the only one with rows itself, which is then not copied."""
    filled = [part for part in parts if part.shape[dim]] or parts[-1:]
    return filled[0].contiguous() if len(filled) == 1 else torch.cat(filled, dim)
