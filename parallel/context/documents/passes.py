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
        # Calls fill their rows: to join results of each writes and reads all of them once more.
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
        o[calls.num_rows :] = 0.0
        lse[:, calls.num_rows :] = -torch.inf
        so_far = None
        if calls.local is not None:
            rows = calls.local.rows
            tensors = (q[rows], k[rows], v[rows])
            with self.tracer.span(COMPUTE, OWN):
                lse[:, rows] = self.kernel.forward_into(o[rows], *tensors, self._spec(calls.local))
            if calls.merges:
                assert calls.rest is not None
                waiting = calls.rest.rows
                so_far = o[waiting].float(), lse[:, waiting].contiguous()
        arrived = None if arriving is None else arriving.wait(WAITING)
        if calls.rest is not None:
            assert arrived is not None, "a run waits for rows that travel"
            rows = calls.rest.rows
            tensors = (q[rows], *self.exchange.keys(arrived))
            spec = self._spec(calls.rest)
            with self.tracer.span(COMPUTE, WAITING):
                if so_far is None:
                    lse[:, rows] = self.kernel.forward_into(o[rows], *tensors, spec)
                else:
                    o[rows], lse[:, rows] = self.kernel.forward_onto(*so_far, *tensors, spec)
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
        gradients = tuple(
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)
        )
        dq, dk, dv = gradients
        for x in gradients:
            x[calls.num_rows :] = 0.0

        def attend_own(call: Call, step: int) -> None:
            rows = call.rows
            own = (do[rows], q[rows], k[rows], v[rows], o[rows], lse[:, rows].contiguous())
            with self.tracer.span(COMPUTE, step):
                self.kernel.backward_into((dq[rows], dk[rows], dv[rows]), *own, self._spec(call))

        arriving = None
        if calls.travels and arrived is None:
            arriving = self.exchange.fetch(k, v)
        # Two calls where both ways are to be hidden, else one.
        own_first: tuple[Call, ...] = ()
        own_last: tuple[Call, ...] = () if calls.local is None else (calls.local,)
        if arriving is not None:
            own_first, own_last = calls.halves[:1], calls.halves[1:]
        for call in own_first:
            attend_own(call, OWN)
        waiting: Tensor | None = None
        of_keys = returning = None
        if calls.travels:
            arrived = arriving.wait(WAITING) if arriving is not None else arrived
            assert arrived is not None
            of_keys = arrived  # without rows, where no run waits
            if calls.rest is not None:
                waiting, of_keys = self._attend_waiting(do, q, o, lse, arrived, dq)
            returning = self.exchange.give_back(of_keys)
        for call in own_last:
            attend_own(call, REST)
        if waiting is not None:
            assert calls.rest is not None
            rows = calls.rest.rows
            dq[rows] = dq[rows].float() + waiting
        if of_keys is not None and returning is not None:
            dk[calls.joined_rows], dv[calls.joined_rows] = self.exchange.joined(of_keys)
            self.exchange.add_home(dk, dv, of_keys, returning.wait(REST))
        return dq, dk, dv

    def _attend_waiting(
        self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, arrived: Tensor, dq: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """The second call: dq of its queries if they are in the first one too, and the gradients
        of what has arrived. Where they are not, dq is filled.
        """
        call = self.calls.rest
        assert call is not None
        rows = call.rows
        k, v = self.exchange.keys(arrived)
        saved = (do[rows], q[rows], k, v, o[rows], lse[:, rows].contiguous())
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        own = torch.empty_like(q[rows]) if self.calls.merges else dq[rows]
        with self.tracer.span(COMPUTE, WAITING):
            self.kernel.backward_into((own, dk, dv), *saved, self._spec(call))
        return own if self.calls.merges else None, self.exchange.gradients(dk, dv)
