"""Absorbed latent attention of the new tokens over cached latents, in one launch or two.

As in :mod:`kernels.decode.dense.launch`, no length is read on the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kernels.decode import configs
from kernels.decode.call import Call
from kernels.decode.latent import hopper
from kernels.decode.latent.call import describe_latent
from kernels.decode.latent.kernel import latent_decode_kernel
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

_PLANS: dict[tuple, Plan | hopper.HopperPlan] = {}


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    scale: float,
    num_splits: int | None = None,
    out: Tensor | None = None,
    tiles: configs.Tiles | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Absorbed multi-latent attention: every head attends to the same latents.

    It appends nothing: the cache holds the T new tokens already, and ``lengths`` counts them.

    Args:
        q_latent: [B, H, T, R], queries multiplied by W_UK; float32, float16 or bfloat16.
        q_rope: [B, H, T, R_rope], rotated.
        latent_cache: [B, max_len, R + R_rope]; with a block table [blocks, block_size, R + R_rope].
        lengths: int32 [B], tokens in the cache with the new ones, T or more. New token t sees
            the first lengths - T + 1 + t; a query that sees none has output zero.
        block_table: int32 [B, max_blocks].
        scale: of the scores; 1/sqrt of the width of a query before absorption.
        num_splits, out, tiles: as in :func:`~kernels.decode.dense.launch.flash_decode`.
        implementation: ``plain``, one kernel for any GPU; ``hopper``, with a second launch that
            merges, for rank 512 + 64 in 16 bits; ``auto`` takes that where it can.

    Returns:
        [B, H, T, R] in q_latent's dtype: weighted sums of latents, to be multiplied by W_UV.

    Raises:
        ValueError: one line on what does not fit, before anything is written.
    """
    key = (
        layouts(q_latent, q_rope, latent_cache, lengths, block_table, out),
        # The Hopper kernel takes no other cache.
        latent_cache.data_ptr() % hopper.ALIGNMENT,
        *(num_splits, tiles, implementation),
    )
    table = lengths if block_table is None else block_table
    plan = _PLANS.get(key)
    if plan is None:
        call = describe_latent(q_latent, q_rope, latent_cache, lengths, block_table, out)
        check_here(call, num_splits)
        if out is None:
            out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
        if q_latent.numel() == 0:
            return out
        dense = copies_of_sparse(q_latent, q_rope, lengths, block_table)
        if dense is not None:
            q_latent, q_rope, lengths, block_table, *_ = dense
            return mla_decode(
                q_latent, q_rope, latent_cache, lengths, block_table=block_table, scale=scale,
                num_splits=num_splits, out=out, tiles=tiles, implementation=implementation,
            )  # fmt: skip
        if tiles is None and _use_hopper(call, latent_cache, implementation):
            shares = workers(call, num_splits, hopper.TILES, appends=0)
            plan = planned(
                _PLANS, hopper.plan, key, call, latent_cache, table, out, *shares
            )  # fmt: skip
        else:
            plan = planned(
                _PLANS, plan_latent, key, call, q_latent, q_rope, latent_cache, table, out,
                num_splits, tiles,
            )  # fmt: skip
    if out is None:
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    plan(q_latent, q_rope, latent_cache, lengths, table, out, scale=scale)
    return out


def _use_hopper(call: Call, cache: Tensor, implementation: str) -> bool:
    if implementation not in ("auto", "hopper", "plain"):
        raise ValueError(f"implementation is {implementation}: must be auto, hopper or plain")
    if implementation == "plain":
        return False
    reason: str | None = "Triton's interpreter does not run Gluon"
    if not INTERPRETED:
        reason = hopper.why_not(call, cache)
    if reason is not None and implementation == "hopper":
        raise ValueError(f"implementation is hopper: {reason}")
    return reason is None


def plan_latent(
    call: Call,
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    out: Tensor,
    num_splits: int | None,
    tiles: configs.Tiles | None,
) -> Plan:
    """The plan of the kernel for any GPU, for tensors of these layouts."""
    tiles = tiles or configs.choose("latent", call, interpreted=INTERPRETED)
    return plan_of(
        latent_decode_kernel,
        call,
        latent_constants(call, tiles),
        workers(call, num_splits, tiles, appends=0),
        (
            *q_latent.stride()[:3], *q_rope.stride()[:3], *latent_cache.stride()[:2],
            *out.stride()[:3], block_table.stride(0), call.batch_size,
        ),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def latent_constants(call: Call, tiles: configs.Tiles) -> dict[str, Any]:
    """Compile-time constants of the kernel for any GPU."""
    return {
        "NUM_HEADS": call.num_heads,
        "RANK": call.head_dim,
        "ROPE_DIM": call.rope_dim,
        "BLOCK_ROPE": power_of_two(call.rope_dim),
        **shared_constants(call, tiles, merge_values=64),
    }
