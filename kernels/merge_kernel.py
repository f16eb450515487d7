"""The merge of :mod:`kernels.merge` in one pass over memory, in Triton.

PyTorch needs two passes over the float32 output, which a ring pays at every step.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_S = 32

MAX_LINES = 65535
"""Batch size times heads: the second dimension of a CUDA grid."""


@triton.jit
def merge_kernel(
    o_ptr,
    lse_ptr,
    new_o_ptr,
    new_lse_ptr,
    merged_lse_ptr,
    stride_ob,
    stride_oh,
    stride_os,
    stride_nb,
    stride_nh,
    stride_ns,
    stride_lb,
    stride_lh,
    stride_ls,
    stride_mb,
    stride_mh,
    stride_ms,
    num_heads,
    seq_len,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """o, in place, and merged_lse [B, H, S] contiguous, of BLOCK_S rows of one head."""
    row = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    batch = (tl.program_id(1) // num_heads).to(tl.int64)
    head = (tl.program_id(1) % num_heads).to(tl.int64)
    inside = row < seq_len
    row = row.to(tl.int64)
    old = tl.load(
        lse_ptr + batch * stride_lb + head * stride_lh + row * stride_ls,
        mask=inside,
        other=float("-inf"),
    )
    new = tl.load(
        new_lse_ptr + batch * stride_mb + head * stride_mh + row * stride_ms,
        mask=inside,
        other=float("-inf"),
    )
    top = tl.maximum(old, new)
    # Where neither part has a key: -inf - -inf is not a number.
    reference = tl.where(top == float("-inf"), 0.0, top)
    old_weight = tl.exp(old - reference)
    new_weight = tl.exp(new - reference)
    total = old_weight + new_weight
    safe_total = tl.where(total == 0.0, 1.0, total)
    merged = tl.where(total == 0.0, float("-inf"), reference + tl.log(safe_total))
    tl.store(merged_lse_ptr + tl.program_id(1).to(tl.int64) * seq_len + row, merged, mask=inside)

    column = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (column < HEAD_DIM)[None, :]
    o_places = (
        o_ptr + batch * stride_ob + head * stride_oh + row[:, None] * stride_os + column[None, :]
    )
    new_places = (
        new_o_ptr
        + batch * stride_nb
        + head * stride_nh
        + row[:, None] * stride_ns
        + column[None, :]
    )
    o = tl.load(o_places, mask=mask, other=0.0)
    new_o = tl.load(new_places, mask=mask, other=0.0).to(tl.float32)
    o = o * (old_weight / safe_total)[:, None] + new_o * (new_weight / safe_total)[:, None]
    tl.store(o_places, o, mask=mask)


def takes(o: Tensor, new_o: Tensor) -> bool:
    """Whether these are laid out for the kernel: o [B, H, S, D] or [H, S, D] in float32."""
    return (
        o.dtype == torch.float32
        and o.dim() in (3, 4)
        and o.stride(-1) == new_o.stride(-1) == 1
        and 0 not in o.stride()
        and o.shape[:-2].numel() <= MAX_LINES
        and o.numel() > 0
    )


def merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`kernels.merge.merge` for tensors that :func:`takes` accepts; o is overwritten."""
    result = o
    if o.dim() == 3:
        o, lse, new_o, new_lse = (x.unsqueeze(0) for x in (o, lse, new_o, new_lse))
    batch_size, num_heads, seq_len, head_dim = o.shape
    merged_lse = torch.empty(o.shape[:-1], dtype=torch.float32, device=o.device)
    merge_kernel[(triton.cdiv(seq_len, _BLOCK_S), batch_size * num_heads)](
        o,
        lse,
        new_o,
        new_lse,
        merged_lse,
        *o.stride()[:3],
        *new_o.stride()[:3],
        *lse.stride(),
        *new_lse.stride(),
        num_heads,
        seq_len,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_S=_BLOCK_S,
    )
    return result, merged_lse if result.dim() == 4 else merged_lse.squeeze(0)
