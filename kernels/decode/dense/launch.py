"""Flash decode: attention of the new tokens over keys and values, in one launch.

``lengths`` is never read on the host, and no grid depends on it, so that a captured CUDA graph
stays right when lengths, block tables and cache contents change between replays. Run a call
once before capturing it: Triton compiles and loads a kernel at its first launch. Later calls on
tensors of the same layout are launched by :mod:`kernels.launching.prepared`, without Triton.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.decode import configs
from kernels.decode.call import Call
from kernels.decode.dense.call import describe_flash
from kernels.decode.dense.kernel import flash_decode_kernel
from kernels.decode.plans import (
    INTERPRETED,
    Plan,
    check_here,
    copies_of_sparse,
    layouts,
    plan_of,
    power_of_two,
    shared_constants,
    workers,
)
from kernels.launching.prepared import planned
from kernels.rotary import Rotary

_PLANS: dict[tuple, Plan] = {}


def flash_decode(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    rotary: Rotary | None = None,
    scale: float | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    tiles: configs.Tiles | None = None,
) -> Tensor:
    """Rotates q and k_new, appends k_new and v_new to the caches, and attends; one kernel.

    New token t of a sequence stands at position lengths + t; it sees all cached tokens and the
    new ones up to itself.

    Args:
        q: [B, H, T, D], not yet rotated; float32, float16 or bfloat16, D at most 256.
        k_new, v_new: [B, H_kv, T, D], H_kv divides H; keys not yet rotated.
        k_cache, v_cache: [B, H_kv, max_len, D]; with a block table [blocks, H_kv, block_size, D].
            Written at positions lengths .. lengths + T - 1, with rotated keys.
        lengths: int32 [B], tokens in the cache before this call; left as they are. The caller
            sees to it that lengths + T fit: tokens beyond the capacity are not written.
        block_table: int32 [B, max_blocks]; entries up to position lengths + T - 1 are used.
        rotary: angles for the positions; none if q and k_new are as they should be.
        scale: 1/sqrt(D) if not given.
        num_splits: shares of the work for each sequence and KV head, on average; by default as
            many as fill the device. Results of different numbers differ by rounding.
        out: where to put the result.
        tiles: in place of those of :mod:`kernels.decode.configs`, for tuning.

    Returns:
        [B, H, T, D] in q's dtype; the same bits for the same call.

    Raises:
        ValueError: one line on what does not fit, before anything is written.
    """
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    key = (
        layouts(q, k_new, v_new, k_cache, v_cache, lengths, block_table, cos, sin, out),
        *(interleaved, num_splits, tiles),
    )
    plan = _PLANS.get(key)
    if plan is None:
        call = describe_flash(q, k_new, v_new, k_cache, v_cache, lengths, block_table, rotary, out)
        check_here(call, num_splits)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if q.numel() == 0:
            return out
        dense = copies_of_sparse(q, k_new, v_new, lengths, block_table, cos=cos, sin=sin)
        if dense is not None:
            q, k_new, v_new, lengths, block_table, cos, sin = dense
            return flash_decode(
                q, k_new, v_new, k_cache, v_cache, lengths, block_table=block_table,
                rotary=None if rotary is None else Rotary(cos, sin, interleaved), scale=scale,
                num_splits=num_splits, out=out, tiles=tiles,
            )  # fmt: skip
        given = KernelTensors(
            q, k_new, v_new, k_cache, v_cache, out,
            block_table=lengths if block_table is None else block_table,
            cos=lengths if cos is None else cos,
        )  # fmt: skip
        plan = planned(_PLANS, plan_flash, key, call, given, interleaved, num_splits, tiles)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    plan(
        q, k_new, v_new, k_cache, v_cache, lengths,
        # Any tensor stands for an argument that the kernel was compiled not to read.
        lengths if block_table is None else block_table,
        lengths if cos is None else cos, lengths if sin is None else sin, out,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return out


class KernelTensors(NamedTuple):
    """Tensors whose layouts a plan depends on, as the kernel takes them."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    block_table: Tensor
    cos: Tensor


def plan_flash(
    call: Call,
    given: KernelTensors,
    interleaved: bool,
    num_splits: int | None,
    tiles: configs.Tiles | None,
) -> Plan:
    """The plan for tensors of these layouts."""
    tiles = tiles or configs.choose("flash", call, interpreted=INTERPRETED)
    return plan_of(
        flash_decode_kernel,
        call,
        flash_constants(call, tiles, interleaved),
        workers(call, num_splits, tiles, appends=1),
        (
            *(step for x in given[:6] for step in x.stride()[:3]),
            given.block_table.stride(0), given.cos.stride(0),
            call.batch_size, call.capacity, given.cos.shape[0],
        ),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def flash_constants(call: Call, tiles: configs.Tiles, interleaved: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel."""
    return {
        "NUM_KV_HEADS": call.num_kv_heads,
        "GROUP_SIZE": call.group_size,
        "HEAD_DIM": call.head_dim,
        "ROTARY_DIM": call.rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_T": power_of_two(call.new),
        **shared_constants(call, tiles, merge_values=32),
    }
