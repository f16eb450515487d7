"""The peak of a pass over the keys of all ranks, by walking through it.

The walk follows :class:`parallel.context.blocks.loops.AttentionPass` call by call, and counts the
tensors that the loop, the kernel and the transport allocate and free. It asks no device. Freed
tensors count as free at once, and results of a call stay until the next one replaces them, as
Python's variables do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.context.memory.ledger import Ledger
from parallel.context.memory.sizes import CallSizes, LocalSizes
from parallel.context.memory.transports import TransportMemoryFactory

Visits = Sequence[Sequence[CallSizes]]
"""The kernel calls of each visit of one rank."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PassMemory:
    """What one rank holds in a pass."""

    sizes: LocalSizes
    transport: TransportMemoryFactory

    def peak(self, visits: Visits) -> dict[str, float]:
        """Bytes by part at the peak of a forward pass, or with gradients of a backward pass.

        A backward pass holds all that the forward pass before it held, and more.
        """
        if self.sizes.problem.needs_grad:
            return self._backward(visits)
        return self._forward(visits)

    def _forward(self, visits: Visits) -> dict[str, float]:
        sizes, ledger = self.sizes, Ledger()
        ledger.hold(inputs=sizes.q + sizes.kv)
        transport = self.transport(ledger, sizes)
        transport.begin(gradients=False)
        accumulates = _accumulates(visits)
        total = sizes.q * (sizes.wide if accumulates else 1)
        for index, calls in enumerate(visits):
            transport.arrive(index)
            for call in calls:
                ledger.hold(**self._taken(call, 1))
                ledger.hold(output_part=call.q + call.lse)
                if call.whole_q and call.all_heads and not accumulates:
                    ledger.free("output_part")
                ledger.hold(output=total, lse=sizes.lse)
        if accumulates:
            ledger.add(output=sizes.q)
        return ledger.peak

    def _backward(self, visits: Visits) -> dict[str, float]:
        sizes, ledger = self.sizes, Ledger()
        ledger.hold(
            inputs=sizes.q + sizes.kv,
            output=sizes.q,
            lse=sizes.lse,
            output_gradient=sizes.q,
        )
        transport = self.transport(ledger, sizes)
        transport.begin(gradients=True)
        accumulates = _accumulates(visits)
        total = sizes.q * (sizes.wide if accumulates else 1)
        last = 0.0
        for index, calls in enumerate(visits):
            transport.arrive(index)
            ledger.hold(dk_dv=last)
            for number, call in enumerate(calls):
                ledger.hold(**self._taken(call, 3))
                row_copies = 0.0 if call.whole_q else call.lse
                ledger.add(dq=call.q, dk_dv=call.kv)
                with ledger.during(kernel_workspace=call.workspace + row_copies):
                    pass
                # What the call before gave is let go now, unless this visit keeps it.
                ledger.hold(dk_dv=sum(done.kv for done in calls[: number + 1]))
                last = call.kv
                if call.whole_q and call.all_heads and not accumulates:
                    ledger.hold(dq=sizes.q)
                else:
                    ledger.hold(dq=total + call.q)
                    ledger.hold(dq=total)
            transport.deliver(index, calls)
        if sizes.wide > 1:
            # What was summed in float32 is returned in the problem's dtype.
            ledger.add(narrowed=(sizes.q if accumulates else 0.0) + sizes.kv)
        return ledger.peak

    def _taken(self, call: CallSizes, num_queries: int) -> dict[str, float]:
        """Copies of a packed call's rows: of q (with gradients o and do too), k and v."""
        if not self.sizes.problem.packed:
            return {}
        return {
            "taken_queries": 0.0 if call.whole_q else num_queries * call.q,
            "taken_keys": 0.0 if call.whole_kv else call.kv,
        }


def _accumulates(visits: Visits) -> bool:
    return any(not call.first for calls in visits for call in calls)
