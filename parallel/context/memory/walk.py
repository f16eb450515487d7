"""The peak of a pass over the keys of all ranks, by walking through it.

The walk follows :class:`parallel.context.blocks.loops.AttentionPass` call by call, and counts the
tensors that the loop, the kernel and the transport allocate and free. It asks no device. Freed
tensors count as free at once: the rows that a call takes after it, and gradients of keys when they
have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels import Attention, AttentionSpec
from kernels.query_gradient import QueryBlock, QueryGradientMemory
from parallel.context.blocks.score_blocks import ScoreBlock, disjoint, hides_more
from parallel.context.memory.ledger import Ledger
from parallel.context.memory.sizes import CallSizes, LocalSizes
from parallel.context.memory.transports import TransportMemoryFactory

_TAKEN = ("taken_queries", "taken_keys")

Visits = Sequence[Sequence[CallSizes]]
"""The kernel calls of each visit of one rank."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PassMemory:
    """What one rank holds in a pass."""

    sizes: LocalSizes
    kernel: Attention
    transport: TransportMemoryFactory
    keys_in_turn: bool
    """Whether one rank's keys come after another's."""

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
        merged = _Merged(sizes, visits, narrow=transport.narrow and not sizes.problem.sinks)
        for index, calls in enumerate(visits):
            transport.arrive(index)
            for call in calls:
                ledger.hold(**self._taken(call, 1))
                ledger.hold(output_part=call.q + call.lse)
                if merged.keeps(call):
                    ledger.free("output_part")
                # Merged in its place.
                ledger.hold(output=merged.whole, lse=sizes.lse)
                ledger.free("output_part", *_TAKEN)
        if merged.all_rows:
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
        in_kernel = self._query_gradient(visits)
        of_blocks: Sequence[float] = ()
        if in_kernel is not None:
            ledger.hold(dq=sizes.q, dq_sums=in_kernel.kept)
            of_blocks = in_kernel.of_blocks
        merged = _Merged(sizes, visits, narrow=transport.narrow)
        num_done = 0
        order = list(range(len(visits)))
        if transport.keeps_keys:
            # Other ranks' keys first.
            order = [*order[1:], *order[:1]]
        for index in order:
            calls = visits[index]
            transport.arrive(index)
            for call in calls:
                ledger.hold(**self._taken(call, 3))
                if in_kernel is not None:
                    ledger.add(dk_dv=call.kv)
                    workspace = of_blocks[num_done]
                else:
                    ledger.add(dq=call.q, dk_dv=call.kv)
                    workspace = call.workspace + (0.0 if call.whole_q else call.lse)
                num_done += 1
                with ledger.during(kernel_workspace=workspace):
                    pass
                ledger.free(*_TAKEN)
                if in_kernel is not None:
                    continue
                total = merged.after(call)
                if not merged.keeps(call):
                    ledger.hold(dq=total + call.q)
                ledger.hold(dq=total)
            transport.deliver(index, calls)
            ledger.free("dk_dv")
        ledger.free("dq_sums")
        if sizes.wide > 1:
            # What was summed in float32 is returned in the problem's dtype.
            narrow_keys = bool(visits) and transport.keeps(visits[0])
            narrowed = sizes.q if merged.all_rows and in_kernel is None else 0.0
            ledger.add(narrowed=narrowed + (0.0 if narrow_keys else sizes.kv))
        return ledger.peak

    def _query_gradient(self, visits: Visits) -> QueryGradientMemory | None:
        """The sums of dq that the kernel goes on with, where it does."""
        problem, layout = self.sizes.problem, self.sizes.layout
        length = self.sizes.local_len * layout.num_ranks
        if problem.packed or not self.keys_in_turn:
            return None
        if not hides_more(problem.mask, length).is_plain:
            return None
        blocks = [call.block for calls in visits for call in calls if call.block is not None]
        own = replace(problem, cp=1, q_len=self.sizes.local_len, sinks=False)
        return self.kernel.query_gradient_memory(own, [_query_block(block) for block in blocks])

    def _taken(self, call: CallSizes, num_queries: int) -> dict[str, float]:
        """Copies of a packed call's rows: of q (with gradients o and do too), k and v."""
        if not self.sizes.problem.packed:
            return {}
        queries = 0.0 if call.whole_q else num_queries * call.q
        return dict(zip(_TAKEN, (queries, 0.0 if call.whole_kv else call.kv), strict=True))


def _query_block(block: ScoreBlock) -> QueryBlock:
    # Which scale, is of no account.
    spec = AttentionSpec(causal=block.causal, scale=1.0)
    return QueryBlock(block.q.start, block.q.stop, block.kv_len, spec)


class _Merged:
    """The result of calls that are merged, in the order in which they are made.

    Args:
        narrow: whether what is merged once is not float32.
    """

    def __init__(self, sizes: LocalSizes, visits: Visits, *, narrow: bool) -> None:
        later = [call for calls in visits for call in calls if not call.first]
        rows = [call.block.q for call in later if call.block is not None]
        self.once = narrow and len(rows) == len(later) and disjoint(rows)
        self.all_rows = bool(later) and not self.once
        """Whether all of it is float32."""
        self.whole = sizes.q * (sizes.wide if self.all_rows else 1)
        """Bytes of the result."""
        self._held = self._parts = 0.0

    def keeps(self, call: CallSizes) -> bool:
        """Whether what a call gives becomes the result, or is kept to be added in the end."""
        if self.once and not call.first:
            return True
        return call.whole_q and call.all_heads and call.first and not self.all_rows

    def after(self, call: CallSizes) -> float:
        """Bytes of the result, and of what is kept, after a call."""
        if self.once and not call.first:
            self._parts += call.q
        else:
            self._held = self.whole
        return self._held + self._parts
