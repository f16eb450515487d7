"""Launches the Hopper kernels: an implementation as :mod:`kernels.flash.plain` describes one.

They read q, k, v and do through the tensor memory accelerator, which addresses rows that are
multiples of 16 bytes apart; a tensor that is not laid out so is copied. What they do not do,
the plain kernels do: float32, accumulators, head dims above 128, and empty tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.backend import Packing
from kernels.flash import plain
from kernels.flash.problem import Problem

ROWS = 64
"""Rows of one consumer warpgroup, and of what each reads once."""

_PROGRAM_ROWS = 2 * ROWS
"""Queries, or keys, of one program: those of its two consumers."""

_MAX_GRID_Y = 65535

_STATISTICS_BLOCK = 128


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """How a kernel is cut up."""

    tile: int
    """Rows of the tiles that stream by: keys, or for dK and dV queries."""
    stages: int
    """Slots of the ring they stream through."""


# By padded head dim. Measured on an H200: results/README.md says what else was tried.
FORWARD = {64: Schedule(tile=128, stages=2), 128: Schedule(tile=128, stages=2)}
BACKWARD_DKDV = {64: Schedule(tile=64, stages=2), 128: Schedule(tile=64, stages=2)}
# Three slots are in use at once: of the tile before, the tile at hand, and the next.
BACKWARD_DQ = {64: Schedule(tile=128, stages=3), 128: Schedule(tile=64, stages=3)}


def why_not(problem: Problem) -> str | None:
    """None if these kernels can run ``problem`` here, else the reason."""
    if plain.INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    if problem.device.type != "cuda":
        return "runs on a CUDA device of compute capability 9.0"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability != (9, 0):
        return f"needs compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
    if find_spec("triton.experimental.gluon") is None:
        return f"triton {triton.__version__} has no Gluon; install triton 3.6 or newer"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 and float16 only"
    if problem.head_dim > 128 or problem.head_dim % 8:
        return f"head_dim {problem.head_dim}: must be a multiple of 8, at most 128"
    if problem.accumulates:
        return "does not continue from an accumulator"
    if problem.batch_size * problem.num_heads > _MAX_GRID_Y:
        return f"more than {_MAX_GRID_Y} heads in a batch"
    return None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill o [B, H, S, D] and lse [B, H, S] (contiguous)."""
    # The running maximum is of the raw scores, which a scale below zero turns around.
    if q.numel() == 0 or k.numel() == 0 or scale <= 0:
        plain.forward(problem, q, k, v, o, lse, scale=scale, packing=packing)
        return
    from kernels.flash.hopper_forward import flash_forward

    block_d = _block_d(problem)
    chosen = FORWARD[block_d]
    grid = (
        triton.cdiv(problem.q_len, _PROGRAM_ROWS),
        problem.batch_size * problem.num_heads,
    )
    flash_forward[grid](
        _descriptor(q, ROWS, block_d),
        _descriptor(k, chosen.tile, block_d),
        _descriptor(v, chosen.tile, block_d),
        o,
        lse,
        *_cu_seqlens(packing, q),
        *o.stride()[:3],
        problem.num_heads,
        problem.group_size,
        problem.q_len,
        problem.kv_len,
        q.shape[2],
        scale * math.log2(math.e),
        BLOCK_K=chosen.tile,
        **_constants(problem, chosen),
    )


def backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill dq, dk, dv; lse and dlse are contiguous [B, H, S]."""
    if q.numel() == 0 or k.numel() == 0:
        plain.backward(problem, do, q, k, v, o, lse, dlse, dq, dk, dv, scale=scale, packing=packing)
        return
    from kernels.flash.hopper_backward import flash_backward_dkdv, flash_backward_dq

    block_d = _block_d(problem)
    by_key, by_query = BACKWARD_DKDV[block_d], BACKWARD_DQ[block_d]
    statistics = _row_statistics(problem, do, o, lse, dlse, packing)
    _, lines, padded_len = statistics.shape
    q, do, k, v = (_addressable(x) for x in (q, do, k, v))
    scale_log2 = scale * math.log2(math.e)
    cu_seqlens = _cu_seqlens(packing, q)
    grid = (
        triton.cdiv(problem.kv_len, _PROGRAM_ROWS),
        problem.batch_size * problem.num_kv_heads,
    )
    flash_backward_dkdv[grid](
        _descriptor(q, by_key.tile, block_d),
        _descriptor(do, by_key.tile, block_d),
        _descriptor(k, ROWS, block_d),
        _descriptor(v, ROWS, block_d),
        _line_descriptor(statistics, by_key.tile),
        dk,
        dv,
        *cu_seqlens,
        *dk.stride()[:3],
        *dv.stride()[:3],
        problem.num_heads,
        problem.group_size,
        problem.q_len,
        problem.kv_len,
        lines,
        scale,
        scale_log2,
        BLOCK_Q=by_key.tile,
        **_constants(problem, by_key),
    )
    grid = (
        triton.cdiv(problem.q_len, _PROGRAM_ROWS),
        problem.batch_size * problem.num_heads,
    )
    flash_backward_dq[grid](
        _descriptor(q, ROWS, block_d),
        _descriptor(do, ROWS, block_d),
        _descriptor(k, by_query.tile, block_d),
        _descriptor(v, by_query.tile, block_d),
        statistics,
        dq,
        *cu_seqlens,
        *dq.stride()[:3],
        problem.num_heads,
        problem.group_size,
        problem.q_len,
        problem.kv_len,
        padded_len,
        lines * padded_len,
        scale,
        scale_log2,
        BLOCK_K=by_query.tile,
        **_constants(problem, by_query),
    )


def _row_statistics(
    problem: Problem,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    packing: Packing | None,
) -> Tensor:
    """lse in units of log2, and rowsum(o * do) - dlse: [2, B * H, S padded] float32."""
    from kernels.flash.hopper_backward import row_statistics

    batch_size, num_heads, lse_len = lse.shape
    lines = batch_size * num_heads
    # Each sequence of a packed batch begins at a multiple of four, up to four rows later.
    rows = lse_len if packing is None else lse_len + 4 * problem.batch_size
    shape = (2, lines, triton.cdiv(rows, _STATISTICS_BLOCK) * _STATISTICS_BLOCK)
    statistics = torch.empty(shape, dtype=torch.float32, device=lse.device)
    grid = (
        triton.cdiv(problem.q_len, _STATISTICS_BLOCK),
        problem.batch_size * problem.num_heads,
    )
    row_statistics[grid](
        o,
        do,
        lse,
        lse if dlse is None else dlse,
        statistics,
        _cu_seqlens(packing, lse)[0],
        *o.stride()[:3],
        *do.stride()[:3],
        num_heads,
        problem.q_len,
        lse_len,
        shape[2],
        lines * shape[2],
        HEAD_DIM=problem.head_dim,
        BLOCK_D=_block_d(problem),
        BLOCK_Q=_STATISTICS_BLOCK,
        HAS_DLSE=dlse is not None,
        PACKED=problem.packed,
    )
    return statistics


def _constants(problem: Problem, schedule: Schedule) -> dict[str, Any]:
    """What every kernel is compiled for."""
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": _block_d(problem),
        "STAGES": schedule.stages,
        "CAUSAL": problem.causal,
        "PACKED": problem.packed,
        "num_warps": 4,
    }


def _block_d(problem: Problem) -> int:
    """Columns of a tile: whole 128-byte swizzles of 16-bit numbers; TMA fills up with zeros."""
    return 64 if problem.head_dim <= 64 else 128


def _cu_seqlens(packing: Packing | None, any_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Where sequences begin; a dense batch passes tensors that nobody reads."""
    if packing is None:
        return any_tensor, any_tensor
    return packing.cu_seqlens_q, packing.cu_seqlens_k


def _addressable(x: Tensor) -> Tensor:
    """x itself if TMA can address it, else a contiguous copy (aligned, as head_dim is by 8)."""
    if x.data_ptr() % 16 == 0:
        strides, shape = x.stride(), x.shape
        if all(shape[i] == 1 or (strides[i] > 0 and strides[i] % 8 == 0) for i in range(3)):
            return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _gluon() -> tuple[Any, Any, Any]:
    """TensorDescriptor, and the shared-memory layouts of a tile and of a line of statistics."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    line = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor, tile, line


def _descriptor(x: Tensor, rows: int, columns: int) -> Any:
    """For copies of [1, 1, rows, columns] tiles; what lies outside of x comes as zero."""
    descriptor, layout, _ = _gluon()
    x = _addressable(x)
    # The stride of a dimension of size 1 is never used, but has to be a valid one.
    row = x.stride(2) if x.shape[2] > 1 else x.shape[3]
    strides = [x.stride(i) if x.shape[i] > 1 else row for i in (0, 1)]
    return descriptor(x, list(x.shape), [*strides, row, 1], [1, 1, rows, columns], layout)


def _line_descriptor(statistics: Tensor, columns: int) -> Any:
    """For copies of [1, columns] of the statistics, lse's lines first, then delta's."""
    descriptor, _, layout = _gluon()
    planes, lines, padded_len = statistics.shape
    return descriptor(
        statistics, [planes * lines, padded_len], [padded_len, 1], [1, columns], layout
    )
