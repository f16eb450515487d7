"""Rotates new tokens and appends them to a cache of latents, in one launch.

As in :mod:`kernels.decode.dense.launch`, no length is read on the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.decode.call import Call
from kernels.decode.latent.append_kernel import latent_append_kernel
from kernels.decode.latent.call import describe_append
from kernels.decode.plans import check_here, copies_of_sparse, layouts, power_of_two
from kernels.launching.device import on
from kernels.launching.prepared import PreparedLaunch, planned
from kernels.rotary import Rotary

_BLOCK_M = 16
"""Queries of a program: few, since a small batch has to fill the device as well."""

_BLOCK_T = 4
"""New tokens of a program at most."""


def latent_append(
    q_rope: Tensor,
    c_new: Tensor,
    k_rope: Tensor,
    latent_cache: Tensor,
    lengths: Tensor,
    *,
    block_table: Tensor | None = None,
    rotary: Rotary | None = None,
    lengths_after: Tensor | None = None,
) -> Tensor:
    """Rotates q_rope and k_rope and appends [c_new, k_rope] to the cache.

    To be called before :func:`~kernels.decode.latent.launch.mla_decode`; new token t of a sequence
    stands at position lengths + t.

    Args:
        q_rope: [B, H, T, R_rope], not yet rotated; float32, float16 or bfloat16.
        c_new: [B, T, R], compressed new tokens.
        k_rope: [B, T, R_rope], the part of their keys that all heads share, not yet rotated.
        latent_cache: [B, max_len, R + R_rope]; with a block table [blocks, block_size, R + R_rope].
            Written at positions lengths .. lengths + T - 1.
        lengths: int32 [B], tokens in the cache before this call; left as they are. The caller
            sees to it that lengths + T fit: tokens beyond the capacity are not written.
        block_table: int32 [B, max_blocks]; entries up to position lengths + T - 1 are used.
        rotary: angles for the positions, float32 or float64 (the rotation is in float32); none
            if q_rope and k_rope are as they should be.
        lengths_after: int32 [B] to be filled with lengths + T, and not lengths itself.

    Returns:
        Rotated queries, contiguous [B, H, T, R_rope] in q_rope's dtype; q_rope without rotary.

    Raises:
        ValueError: one line on what does not fit, before anything is written.
    """
    cos, sin, interleaved = (None, None, False) if rotary is None else rotary
    key = (
        layouts(q_rope, c_new, k_rope, latent_cache, lengths, block_table, cos, sin, lengths_after),
        interleaved,
    )
    plan = _PLANS.get(key)
    if plan is None:
        call = describe_append(
            q_rope, c_new, k_rope, latent_cache, lengths, block_table, rotary, lengths_after
        )
        check_here(call, None)
        if call.batch_size == 0:
            return torch.empty_like(q_rope) if call.rotary_dim else q_rope
        dense = copies_of_sparse(q_rope, c_new, k_rope, lengths, block_table, cos=cos, sin=sin)
        if dense is not None:
            given = q_rope
            q_rope, c_new, k_rope, lengths, block_table, cos, sin = dense
            turned = latent_append(
                q_rope, c_new, k_rope, latent_cache, lengths, block_table=block_table,
                rotary=None if rotary is None else Rotary(cos, sin, interleaved),
                lengths_after=lengths_after,
            )  # fmt: skip
            return turned if call.rotary_dim else given
        plan = planned(
            _PLANS, _plan, key, call, q_rope, c_new, k_rope, latent_cache,
            lengths if block_table is None else block_table, lengths if cos is None else cos,
            append_constants(call, interleaved, lengths_after is not None),
        )  # fmt: skip
    launch, device, turns = plan
    out = torch.empty_like(q_rope, memory_format=torch.contiguous_format) if turns else q_rope
    with on(device):
        launch(
            q_rope, c_new, k_rope, latent_cache, lengths,
            # Any tensor stands for an argument that the kernel was compiled not to read.
            lengths if block_table is None else block_table,
            lengths if cos is None else cos, lengths if sin is None else sin, out,
            lengths if lengths_after is None else lengths_after,
        )  # fmt: skip
    return out


class _Plan(NamedTuple):
    launch: PreparedLaunch
    device: torch.device
    turns: bool
    """Whether queries are rotated."""


_PLANS: dict[tuple, _Plan] = {}


def _plan(
    call: Call,
    q_rope: Tensor,
    c_new: Tensor,
    k_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    cos: Tensor,
    constants: dict[str, Any],
) -> _Plan:
    grid = call.batch_size * (constants["ROW_TILES"] + constants["TOKEN_TILES"])
    integers = (
        *q_rope.stride()[:3], *c_new.stride()[:2], *k_rope.stride()[:2],
        *latent_cache.stride()[:2], block_table.stride(0), cos.stride(0),
        call.capacity, cos.shape[0],
    )  # fmt: skip
    launch = PreparedLaunch(latent_append_kernel, (grid, 1, 1), constants, integers=integers)
    return _Plan(launch, call.device, bool(call.rotary_dim))


@lru_cache(maxsize=1024)
def append_constants(call: Call, interleaved: bool, counts: bool) -> dict[str, Any]:
    """Compile-time constants of the kernel; without rotary no program rotates queries."""
    block_t = min(_BLOCK_T, triton.next_power_of_2(call.new))
    return {
        "NUM_HEADS": call.num_heads,
        "NEW": call.new,
        "RANK": call.head_dim,
        "BLOCK_D": call.block_d,
        "ROPE_DIM": call.rope_dim,
        "BLOCK_ROPE": power_of_two(call.rope_dim),
        "ROTARY_DIM": call.rotary_dim,
        "INTERLEAVED": interleaved,
        "PAGE": call.page,
        "BLOCK_M": _BLOCK_M,
        "BLOCK_T": block_t,
        "ROW_TILES": triton.cdiv(call.num_rows, _BLOCK_M) if call.rotary_dim else 0,
        "TOKEN_TILES": triton.cdiv(call.new, block_t),
        "COUNTS": counts,
        "num_warps": 4,
    }
