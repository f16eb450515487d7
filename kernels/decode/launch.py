"""The two entry points: attention of the new tokens over a cache, in one launch or two.

Neither reads ``lengths`` on the host, and no grid depends on them, so that a captured CUDA graph
stays right when lengths, block tables and cache contents change between replays. Run a call
once before capturing it: Triton compiles and loads a kernel at its first launch. Later calls whose
tensors lie alike are launched by :mod:`kernels.launching.prepared`, without asking Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decode import configs
from kernels.decode.call import Call, describe_flash
from kernels.decode.latent import hopper as hopper_latent
from kernels.decode.latent.call import describe_latent
from kernels.decode.plans import (
    INTERPRETED,
    Plan,
    copies_of_sparse,
    layouts,
    plan_flash,
    plan_latent,
    workers,
)
from kernels.launching.prepared import planned
from kernels.rotary import Rotary

_FLASH_PLANS: dict[tuple, Plan] = {}
_LATENT_PLANS: dict[tuple, Plan | hopper_latent.Plan] = {}


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the kernels can run here, else the reason."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return "runs on a CUDA device; TRITON_INTERPRET=1 runs it on a CPU, slowly"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8,):
        return "bfloat16 needs a GPU of compute capability 8.0 or higher"
    return None


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
    plan = _FLASH_PLANS.get(key)
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
        plan = planned(
            _FLASH_PLANS, plan_flash, key, call, q, k_new, v_new, k_cache, v_cache,
            lengths if block_table is None else block_table, lengths if cos is None else cos, out,
            interleaved, num_splits, tiles,
        )  # fmt: skip
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    plan(
        q, k_new, v_new, k_cache, v_cache, lengths,
        # What a kernel is not compiled to read it gets as well.
        lengths if block_table is None else block_table,
        lengths if cos is None else cos, lengths if sin is None else sin, out,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return out


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

    Unlike :func:`flash_decode` it appends nothing: the cache holds the T new tokens already, and
    ``lengths`` counts them.

    Args:
        q_latent: [B, H, T, R], queries multiplied by W_UK; float32, float16 or bfloat16.
        q_rope: [B, H, T, R_rope], rotated.
        latent_cache: [B, max_len, R + R_rope]; with a block table [blocks, block_size, R + R_rope].
        lengths: int32 [B], tokens in the cache with the new ones, T or more. New token t sees
            the first lengths - T + 1 + t; a query that sees none has output zero.
        block_table: int32 [B, max_blocks].
        scale: of the scores; 1/sqrt of the width of a query before absorption.
        num_splits, out, tiles: as in :func:`flash_decode`.
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
        latent_cache.data_ptr() % hopper_latent.ALIGNMENT,
        *(num_splits, tiles, implementation),
    )
    table = lengths if block_table is None else block_table
    plan = _LATENT_PLANS.get(key)
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
            shares = workers(call, num_splits, hopper_latent.TILES, appends=0)
            plan = planned(
                _LATENT_PLANS, hopper_latent.plan, key, call, latent_cache, table, out, *shares
            )  # fmt: skip
        else:
            plan = planned(
                _LATENT_PLANS, plan_latent, key, call, q_latent, q_rope, latent_cache, table, out,
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
        reason = hopper_latent.why_not(call, cache)
    if reason is not None and implementation == "hopper":
        raise ValueError(f"implementation is hopper: {reason}")
    return reason is None


def check_here(call: Call, num_splits: int | None) -> None:
    """ValueError if no kernel of this package can run a call on its device."""
    reason = why_not(call.device, call.dtype)
    if reason is not None:
        raise ValueError(f"the Triton decode kernels: {reason}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}: must be 1 or more, or None")
