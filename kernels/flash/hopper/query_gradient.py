"""Sums of dq that the Hopper kernels go on with from one block of keys to the next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.flash.call.arguments import BackwardPass, FlashCall, FlashOptions
from kernels.flash.call.problem import Problem
from kernels.flash.hopper import backward_memory, plans, schedule
from kernels.flash.hopper.launch import LOG2_E, backward_steps
from kernels.flash.hopper.plans import BackwardPlan, addressable, aligned
from kernels.launching.device import on
from kernels.launching.prepared import Step, planned, run
from kernels.query_gradient import QueryBlock


def can_sum(problems: Sequence[Problem], blocks: Sequence[QueryBlock], num_queries: int) -> bool:
    """Whether dq of a dense batch can be summed over these blocks.

    Args:
        problems: of the calls of the blocks.
        num_queries: of the whole sequence.
    """
    are_whole_turns = backward_memory.are_whole_turns(blocks, num_queries)
    return are_whole_turns and all(map(_in_one_slice, problems))


@lru_cache(maxsize=4096)
def _in_one_slice(problem: Problem) -> bool:
    """Whether all heads fit into the workspace at once."""
    num_queries, num_keys = (problem.batch_size * n for n in (problem.q_len, problem.kv_len))
    heads = backward_memory.key_heads_of_slice(problem, num_queries, num_keys)
    return heads == problem.num_kv_heads


class HopperQueryGradient:
    """A :class:`kernels.query_gradient.QueryGradient` of blocks that :func:`can_sum`.

    Args:
        do, q, o: [B, H, S, D] with a last stride of 1, o in the dtype of q or float32.
        lse: [B, H, S] float32, contiguous.
        dq: like q, to be filled.
    """

    def __init__(
        self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, dq: Tensor, options: FlashOptions
    ) -> None:
        self._do, self._q = addressable(do), addressable(q)
        self._o, self._lse, self._dq = aligned(o), aligned(lse), dq
        self._options = options
        self._plan: BackwardPlan | None = None
        self._statistics = self._sums = q.new_empty(0)
        self._last_step: Step | None = None

    def add(self, block: QueryBlock, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert k.shape[2] == block.num_keys, "blocks are added as they were announced"
        k, v = (addressable(x if x.stride(-1) == 1 else x.contiguous()) for x in (k, v))
        call = self._call(block, k, v)
        with on(self._q.device):
            if self._plan is None:
                assert call.q.shape == self._q.shape, "the first block comes first"
                self._begin(call)
            else:
                self._go_on(call, block)
        return call.dk, call.dv

    def result(self) -> Tensor:
        assert self._last_step is not None, "result() follows add()"
        with on(self._q.device):
            run([self._last_step])
        # Whoever waits for gradients of keys now has no use for the sums.
        self._last_step = None
        self._statistics = self._sums = self._q.new_empty(0)
        return self._dq

    def _call(self, block: QueryBlock, k: Tensor, v: Tensor) -> BackwardPass:
        start = backward_memory.first_query(block)
        assert start is not None, "can_sum() was asked"
        do, q, o, lse, dq = self._do, self._q, self._o, self._lse, self._dq
        if (start, block.stop) != (0, q.shape[2]):
            do, q, o, lse, dq = (x[:, :, start : block.stop] for x in (do, q, o, lse, dq))
        flash_call = FlashCall(q=q, k=k, v=v, spec=block.spec, options=self._options)
        return BackwardPass(
            problem=flash_call.problem(),
            do=do,
            q=q,
            k=k,
            v=v,
            o=o,
            lse=lse,
            dlse=None,
            dq=dq,
            dk=torch.empty_like(k),
            dv=torch.empty_like(v),
            scale=float(block.spec.scale),
        )

    def _begin(self, call: BackwardPass) -> None:
        """Run a whole pass but for its end."""
        key = plans.backward_key(call)
        plan = planned(plans.BACKWARD_PLANS, plans.plan_backward, key, call)
        workspace = [self._q.new_empty(shape, dtype=dtype) for shape, dtype in plan.workspace]
        *steps, self._last_step = backward_steps(plan, call, workspace)
        run(steps)
        self._plan = plan
        self._statistics, _, self._sums, *_ = workspace

    def _go_on(self, call: BackwardPass, block: QueryBlock) -> None:
        """Add to the sums that :meth:`_begin` left."""
        statistics, sums = self._statistics, self._sums
        num_lines, padded_len = statistics.shape[1:]
        key = (*plans.backward_key(call), padded_len)
        plan = planned(plans.ONTO_PLANS, plans.plan_onto, key, call, padded_len)
        num_counts = num_lines * (padded_len // schedule.ROWS)
        # Those of keys behind them begin at a multiple of 16 bytes, too.
        room = -(-num_counts // 4) * 4
        counts = sums.new_zeros(room + plan.num_key_counts, dtype=torch.int32)
        # Where no programs share a group, nobody reads or writes these.
        key_sums = sums.new_empty(plan.key_sums) if plan.num_key_counts else sums
        key_counts = counts[room:] if plan.num_key_counts else counts
        start = block.stop - call.q.shape[2]
        tensors = (
            *(call.q, call.do, call.k, call.v),
            *(statistics[:, :, start:], sums[:, start:]),
            *(counts[start // schedule.ROWS :], key_sums, key_counts),
            *(call.dk, call.dv, call.q, call.q),
        )
        run([Step(plan.main, tensors, (call.scale, call.scale * LOG2_E))])
