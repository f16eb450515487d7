"""The forward and the backward pass of one rank, for kernels that give a log-sum-exp.

While keys are on their way, the kernel computes what needs the rank's own keys alone. A backward
pass begins with the waiting runs, and computes the rest while gradients of other ranks' keys go
home. Where these keys were not kept, they come again while one half of that rest is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels import Attention, AttentionSpec, sinks
from parallel.context.blocks.tracing import COMPUTE, Tracer
from parallel.context.documents.calls import Call, RankCalls
from parallel.context.documents.exchange import KeyExchange

OWN, WAITING, REST = 0, 1, 2
"""Steps of a timeline: own keys, keys of other ranks, and own keys again in a backward pass."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DocumentPass:
    """One pass over this rank's runs; tensors are [T, H, D], lse is float32 [H, T]."""

    kernel: Attention
    calls: RankCalls
    exchange: KeyExchange
    like: AttentionSpec
    tracer: Tracer

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """o, lse, and the keys of other ranks if rows travel; padding has o of zero."""
        calls = self.calls
        arriving = self.exchange.fetch(k, v) if calls.travels else None
        o = torch.empty_like(q)
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        o[calls.num_rows :], lse[:, calls.num_rows :] = 0, -torch.inf
        if calls.local is not None:
            rows = calls.local.rows
            with self.tracer.span(COMPUTE, OWN):
                part = self.kernel.forward(q[rows], k[rows], v[rows], self._spec(calls.local))
                o[rows], lse[:, rows] = part
        arrived = None if arriving is None else arriving.wait(WAITING)
        if calls.rest is not None:
            assert arrived is not None, "a run waits for rows that travel"
            with self.tracer.span(COMPUTE, WAITING):
                rows = calls.rest.rows
                o[rows], lse[:, rows] = self._rest(q[rows], o[rows], lse[:, rows], arrived)
        if self.like.sinks is not None:
            rows = slice(0, calls.num_rows)
            o[rows], lse[:, rows] = sinks.add(o[rows], lse[:, rows], self.like.sinks)
        return o, lse, arrived

    def _spec(self, call: Call) -> AttentionSpec:
        """The call without sinks, which are put in when all keys have been seen."""
        return call.spec(replace(self.like, sinks=None))

    def _rest(self, q: Tensor, o: Tensor, lse: Tensor, arrived: Tensor) -> tuple[Tensor, Tensor]:
        call = self.calls.rest
        assert call is not None
        tensors = (q, *self.exchange.keys(arrived))
        if not self.calls.merges:
            return self.kernel.forward(*tensors, self._spec(call))
        so_far = o.float(), lse.contiguous()
        return self.kernel.forward_onto(*so_far, *tensors, self._spec(call))

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
        # Waiting queries are in two calls if those merge, and every query is in one otherwise.
        dq = torch.empty_like(q, dtype=torch.float32 if calls.merges else q.dtype)
        dq[0 if calls.merges else calls.num_rows :] = 0
        shape = (k.shape[0], 2, *k.shape[1:])
        total = k.new_empty(shape, dtype=torch.float32 if calls.travels else k.dtype)
        total[0 if calls.local is None else calls.local.rows.stop :] = 0
        arriving = None
        if calls.travels and arrived is None:
            arriving = self.exchange.fetch(k, v)

        def attend(call: Call, keys: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
            rows = call.rows
            with self.tracer.span(COMPUTE, step):
                part, dk, dv = self.kernel.backward(
                    do[rows],
                    q[rows],
                    *keys,
                    o[rows],
                    lse[:, rows].contiguous(),
                    self._spec(call),
                )
                if calls.merges:
                    dq[rows] += part
                else:
                    dq[rows] = part
            return dk, dv

        def attend_own(call: Call, step: int) -> None:
            dk, dv = attend(call, (k[call.rows], v[call.rows]), step)
            total[call.rows, 0] = dk
            total[call.rows, 1] = dv

        # Two calls where both ways are to be hidden, else one.
        own_first: tuple[Call, ...] = ()
        own_last: tuple[Call, ...] = () if calls.local is None else (calls.local,)
        if arriving is not None:
            own_first, own_last = calls.halves[:1], calls.halves[1:]
        for call in own_first:
            attend_own(call, OWN)
        returning = None
        if calls.travels:
            arrived = arriving.wait(WAITING) if arriving is not None else arrived
            assert arrived is not None
            gradients = arrived  # without rows, where no run waits
            if calls.rest is not None:
                keys = self.exchange.keys(arrived)
                gradients = self.exchange.gradients(*attend(calls.rest, keys, WAITING))
            returning = self.exchange.give_back(gradients)
        for call in own_last:
            attend_own(call, REST)
        if returning is not None:
            self.exchange.add_home(total, returning.wait(REST))
        dk, dv = (total[:, place].to(k.dtype) for place in (0, 1))
        return dq.to(q.dtype), dk, dv
