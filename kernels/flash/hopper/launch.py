"""Launches the Hopper kernels, and says which calls they support.

They read q, k, v and do through the tensor memory accelerator, which addresses rows that are
multiples of 16 bytes apart; a tensor that is not laid out so is copied. What they do not do,
:mod:`kernels.flash.any_gpu.launch` does: float32, accumulators, head dims above 256 or
not by eights, most values narrower than keys (:func:`schedule.why_not_narrow`), and empty tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from kernels.flash.any_gpu import launch as any_gpu
from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem
from kernels.flash.hopper import backward_memory, plans, schedule
from kernels.flash.hopper.plans import BackwardPlan, addressable, aligned, are_aligned
from kernels.launching.gluon import why_no_gluon
from kernels.launching.prepared import (
    MAX_PLANS,
    PlannedPass,
    PreparedLaunch,
    Step,
    planned,
    run,
)
from kernels.problem import Packing
from kernels.query_gradient import QueryBlock, QueryGradient

_MAX_GRID_Y = 65535

FORWARD_TAKES = frozenset(("window", "prefix_len", "shift", "softcap"))
"""What the forward pass takes besides a causal mask, of ``Problem.asks_for``."""
BACKWARD_TAKES = frozenset(("window", "prefix_len", "shift", "softcap"))
"""The same of the backward pass."""

LOG2_E = math.log2(math.e)


def why_not(problem: Problem) -> str | None:
    """None if these kernels can run ``problem`` here, else the reason."""
    if any_gpu.INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    if problem.device.type != "cuda":
        return "runs on a CUDA device of compute capability 9.0"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability != (9, 0):
        return f"needs compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
    if reason := why_no_gluon():
        return reason
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 and float16 only"
    if problem.head_dim > 256 or problem.head_dim % 8:
        return f"head_dim {problem.head_dim}: must be a multiple of 8, at most 256"
    if problem.value_dim is not None and (
        reason := schedule.why_not_narrow(problem.head_dim, problem.value_dim)
    ):
        return reason
    if problem.accumulates:
        return "does not continue from an accumulator"
    if (1 if problem.packed else problem.batch_size) * problem.num_heads > _MAX_GRID_Y:
        return f"more than {_MAX_GRID_Y} heads in a batch"
    return None


def forward(call: ForwardPass) -> None:
    """Fill o and lse."""
    # The running maximum is of the raw scores, which a scale below zero turns around.
    if call.q.numel() == 0 or call.k.numel() == 0 or call.scale <= 0:
        any_gpu.forward(call)
        return
    plan = plans.FORWARD_PLANS.get(plans.forward_key(call))
    if plan is None or not are_aligned(call.q, call.k, call.v):
        call = replace(call, q=addressable(call.q), k=addressable(call.k), v=addressable(call.v))
        key = plans.forward_key(call)
        plan = planned(plans.FORWARD_PLANS, plans.plan_forward, key, call)
    run(_forward_steps(plan, call))


def _forward_steps(plan: PreparedLaunch, call: ForwardPass) -> list[Step]:
    tensors = (call.q, call.k, call.v, call.o, call.lse, *_cu_seqlens(call.packing, call.q))
    return [Step(plan, tensors, (call.scale * LOG2_E,))]


def planned_forward(call: ForwardPass) -> PlannedPass | None:
    """The launches of a call; None unless they are planned, and all that :func:`forward` does."""
    plan = plans.FORWARD_PLANS.get(plans.forward_key(call))
    if plan is None or not are_aligned(call.q, call.k, call.v):
        return None
    return PlannedPass(_forward_steps(plan, call))


def backward(call: BackwardPass) -> None:
    """Fill dq, dk and dv.

    Needs, besides, float32 sums of dq, 4 bytes for each of its elements, or several of few heads
    (:func:`backward_schedule.keys_turned`, :func:`backward_schedule.bands_of`); and where programs
    share grouped queries (:func:`backward_schedule.num_parts`), or their turns are divided, those
    of dk and dv; of grouped queries for so many key heads at a time as keep them within
    ``backward_memory.SLICE_BYTES``.
    """
    q, k = call.q, call.k
    if q.numel() == 0 or k.numel() == 0:
        any_gpu.backward(call)
        return
    num_kv_heads = call.problem.num_kv_heads
    num_queries, num_keys = q.shape[0] * q.shape[2], k.shape[0] * k.shape[2]
    heads_of_slice = backward_memory.key_heads_of_slice(call.problem, num_queries, num_keys)
    if heads_of_slice < num_kv_heads:
        for start in range(0, num_kv_heads, heads_of_slice):
            backward(_of_key_heads(call, start, min(start + heads_of_slice, num_kv_heads)))
        return
    plan = plans.BACKWARD_PLANS.get(plans.backward_key(call))
    if plan is None or not are_aligned(q, k, call.v, call.do, call.o, call.lse):
        call = replace(
            call,
            q=addressable(q),
            k=addressable(k),
            v=addressable(call.v),
            do=addressable(call.do),
            # Triton compiled for the alignment that torch allocates with.
            o=aligned(call.o),
            lse=aligned(call.lse),
        )
        key = plans.backward_key(call)
        plan = planned(plans.BACKWARD_PLANS, plans.plan_backward, key, call)
    workspace = [q.new_empty(shape, dtype=dtype) for shape, dtype in plan.workspace]
    run(backward_steps(plan, call, workspace))


def _of_key_heads(call: BackwardPass, start: int, stop: int) -> BackwardPass:
    """The part of a call that some of the key heads, and their queries, have in it."""
    problem = call.problem
    keys = slice(start, stop)
    queries = slice(start * problem.group_size, stop * problem.group_size)
    return replace(
        call,
        problem=_problem_of_key_heads(problem, stop - start),
        do=call.do[:, queries],
        q=call.q[:, queries],
        k=call.k[:, keys],
        v=call.v[:, keys],
        o=call.o[:, queries],
        lse=call.lse[:, queries].contiguous(),
        dlse=None if call.dlse is None else call.dlse[:, queries].contiguous(),
        dq=call.dq[:, queries],
        dk=call.dk[:, keys],
        dv=call.dv[:, keys],
    )


@lru_cache(maxsize=MAX_PLANS)
def _problem_of_key_heads(problem: Problem, num_kv_heads: int) -> Problem:
    """The problem of ``num_kv_heads`` key heads and their queries; the same object each time."""
    num_heads = num_kv_heads * problem.group_size
    return replace(problem, num_heads=num_heads, num_kv_heads=num_kv_heads)


def backward_steps(
    plan: BackwardPlan, call: BackwardPass, workspace: Sequence[Tensor]
) -> list[Step]:
    """The launches of a pass, the last of which makes dq of its sums."""
    statistics, counts, dq_sums, *of_keys = workspace
    # Where no programs share a tile of keys, nobody reads or writes these.
    key_counts, key_sums = of_keys or (counts, dq_sums)
    cu_q, cu_k = _cu_seqlens(call.packing, call.q)
    dlse = call.lse if call.dlse is None else aligned(call.dlse)
    before = (call.o, call.do, call.lse, dlse, statistics, counts, key_counts, cu_q)
    streamed = (call.q, call.do, call.k, call.v, statistics, dq_sums, counts, key_sums, key_counts)
    return [
        Step(plan.row_statistics, before),
        Step(
            plan.main,
            (*streamed, call.dk, call.dv, cu_q, cu_k),
            (call.scale, call.scale * LOG2_E),
        ),
        Step(plan.finish_dq, (dq_sums, call.dq, cu_q, cu_k), (call.scale,)),
    ]


def query_gradient(
    problems: Sequence[Problem], blocks: Sequence[QueryBlock], num_queries: int
) -> type[QueryGradient] | None:
    """What sums dq over these blocks (:mod:`kernels.flash.hopper.query_gradient`), if it can."""
    # It launches what is planned here.
    from kernels.flash.hopper import query_gradient

    found = query_gradient.can_sum(problems, blocks, num_queries)
    return query_gradient.HopperQueryGradient if found else None


def planned_backward(call: BackwardPass) -> PlannedPass | None:
    """The launches of a call; None unless they are planned, and all that :func:`backward` does."""
    plan = plans.BACKWARD_PLANS.get(plans.backward_key(call))
    if plan is None or not are_aligned(call.q, call.k, call.v, call.do, call.o, call.lse):
        return None
    workspace = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in plan.workspace]
    return PlannedPass(backward_steps(plan, call, workspace), workspace)


def _cu_seqlens(packing: Packing | None, any_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets of the sequences; a dense batch passes tensors that nobody reads."""
    if packing is None:
        return any_tensor, any_tensor
    return packing.cu_seqlens_q, packing.cu_seqlens_k
