"""FlashAttention on Hopper: launches the Gluon kernels of hopper_forward and hopper_backward.

Tensors are [B, H, S, D] with any strides that the tensor memory accelerator can address: the
last dimension contiguous, the others multiples of 16 bytes. A packed batch comes as [1, H, T, D].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.backend import Packing
from kernels.flash import hopper_backward, hopper_forward

ROWS = 64
"""Rows of one consumer warpgroup."""

LOG2_E = 1.4426950408889634


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """How one kernel is cut: rows per tile that streams by, ring slots, consumers, registers."""

    tile: int
    stages: int
    consumers: int
    carry: bool = True
    """Whether dV and dK of a tile run beside the scores of the next; then three slots are in use
    at once, that of the tile before, its own, and the one that is waited for."""

    @property
    def registers(self) -> int:
        """Of each consumer thread; the 64 Ki of a multiprocessor shared with the producer's."""
        return 240 if self.consumers == 2 else 160


FORWARD = {
    64: Schedule(tile=128, stages=2, consumers=2),
    128: Schedule(tile=128, stages=2, consumers=2),
}
BACKWARD_DKDV = {
    64: Schedule(tile=64, stages=3, consumers=2),
    128: Schedule(tile=64, stages=2, consumers=2, carry=False),
}
BACKWARD_DQ = {
    64: Schedule(tile=128, stages=3, consumers=2),
    128: Schedule(tile=64, stages=3, consumers=2),
}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    packing: Packing | None = None,
    schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, H, S, D], k and v [B, H_kv, S_k, D] -> o like q and lse [B, H, S] float32."""
    batch, num_heads, q_len, head_dim = q.shape
    block_d = _block_d(head_dim)
    chosen = schedule or FORWARD[block_d]
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    sequences, max_q_len, cu_q, cu_k = _extent(q, packing)
    grid = (triton.cdiv(max_q_len, chosen.consumers * ROWS), sequences * num_heads)
    hopper_forward.flash_forward[grid](
        _descriptor(q, ROWS, block_d),
        _descriptor(k, chosen.tile, block_d),
        _descriptor(v, chosen.tile, block_d),
        o,
        lse,
        cu_q,
        cu_k,
        *o.stride()[:3],
        num_heads,
        num_heads // k.shape[1],
        q_len,
        k.shape[2],
        q_len,
        scale * LOG2_E,
        BLOCK_K=chosen.tile,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        STAGES=chosen.stages,
        CONSUMERS=chosen.consumers,
        CONSUMER_REGISTERS=chosen.registers,
        CAUSAL=causal,
        PACKED=packing is not None,
        num_warps=4,
    )
    return o, lse


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    packing: Packing | None = None,
    dlse: Tensor | None = None,
    dkdv_schedule: Schedule | None = None,
    dq_schedule: Schedule | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv), in the shapes of q, k and v."""
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[1:3]
    block_d = _block_d(head_dim)
    dkdv = dkdv_schedule or BACKWARD_DKDV[block_d]
    by_query = dq_schedule or BACKWARD_DQ[block_d]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    sequences, max_q_len, cu_q, cu_k = _extent(q, packing)
    max_kv_len = kv_len if packing is None else packing.max_kv_len

    padded_len = triton.cdiv(q_len, 128) * 128
    statistics = q.new_empty((2, batch * num_heads, padded_len), dtype=torch.float32)
    hopper_backward.row_statistics[(padded_len // 128, batch * num_heads)](
        o,
        do,
        lse,
        lse if dlse is None else dlse,
        statistics,
        *o.stride()[:3],
        *do.stride()[:3],
        num_heads,
        q_len,
        padded_len,
        statistics.stride(0),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        BLOCK_Q=128,
        HAS_DLSE=dlse is not None,
    )
    grid = (triton.cdiv(max_kv_len, dkdv.consumers * ROWS), sequences * num_kv_heads)
    hopper_backward.flash_backward_dkdv[grid](
        _descriptor(q, dkdv.tile, block_d),
        _descriptor(do, dkdv.tile, block_d),
        _descriptor(k, ROWS, block_d),
        _descriptor(v, ROWS, block_d),
        TensorDescriptor(
            statistics,
            [2 * batch * num_heads, padded_len],
            [padded_len, 1],
            [1, dkdv.tile],
            gl.NVMMASharedLayout(0, 32, rank=2),
        ),
        dk,
        dv,
        cu_q,
        cu_k,
        *dk.stride()[:3],
        *dv.stride()[:3],
        num_heads,
        num_heads // num_kv_heads,
        q_len,
        kv_len,
        batch * num_heads,
        scale,
        scale * LOG2_E,
        BLOCK_Q=dkdv.tile,
        CARRY=dkdv.carry,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        STAGES=dkdv.stages,
        CONSUMERS=dkdv.consumers,
        CONSUMER_REGISTERS=dkdv.registers,
        CAUSAL=causal,
        PACKED=packing is not None,
        num_warps=4,
    )
    grid = (triton.cdiv(max_q_len, by_query.consumers * ROWS), sequences * num_heads)
    hopper_backward.flash_backward_dq[grid](
        _descriptor(q, ROWS, block_d),
        _descriptor(do, ROWS, block_d),
        _descriptor(k, by_query.tile, block_d),
        _descriptor(v, by_query.tile, block_d),
        statistics,
        dq,
        cu_q,
        cu_k,
        *dq.stride()[:3],
        num_heads,
        num_heads // num_kv_heads,
        q_len,
        kv_len,
        padded_len,
        statistics.stride(0),
        scale,
        scale * LOG2_E,
        BLOCK_K=by_query.tile,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        STAGES=by_query.stages,
        CONSUMERS=by_query.consumers,
        CONSUMER_REGISTERS=by_query.registers,
        CAUSAL=causal,
        PACKED=packing is not None,
        num_warps=4,
    )
    return dq, dk, dv


def _block_d(head_dim: int) -> int:
    """Width of a tile: wgmma and the swizzle want 64 or 128 columns; TMA fills up with zeros."""
    return 64 if head_dim <= 64 else 128


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, x.shape, x.stride(), [1, 1, rows, columns], _layout())


def _extent(q: Tensor, packing: Packing | None) -> tuple[int, int, Tensor, Tensor]:
    """Number of sequences, the longest one, and the offsets (any tensor where none are read)."""
    if packing is None:
        return q.shape[0], q.shape[2], q, q
    sequences = len(packing.cu_seqlens_q) - 1
    return sequences, packing.max_q_len, packing.cu_seqlens_q, packing.cu_seqlens_k
