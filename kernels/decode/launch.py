"""The two entry points: attention of the new tokens over a cache, in one launch or two.

Neither reads ``lengths`` on the host, and no grid depends on them, so that a captured CUDA graph
stays right when lengths, block tables and cache contents change between replays. Run a call
once before capturing it: Triton compiles and loads a kernel at its first launch.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.decode import configs, hopper_latent, workspace
from kernels.decode.call import Call, describe_flash
from kernels.decode.flash_kernel import flash_decode_kernel
from kernels.decode.latent_call import describe_latent
from kernels.decode.latent_kernel import latent_decode_kernel
from kernels.decode.rotary import Rotary

INTERPRETED = not isinstance(flash_decode_kernel, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

_MIN_UNITS = 4
"""Tiles that make a share worth a program of its own: below, merging costs more than it spares."""


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
    call = describe_flash(q, k_new, v_new, k_cache, v_cache, lengths, block_table, rotary, out)
    _check_here(call, num_splits)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return out
    tiles = tiles or configs.choose("flash", call, interpreted=INTERPRETED)
    constants = flash_constants(call, tiles, rotary is not None and rotary.interleaved)
    num_workers, min_units = _workers(call, num_splits, tiles, appends=1)
    grid = num_workers * constants["ROW_TILES"]
    q, k_new, v_new = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k_new, v_new))
    cos, sin = (lengths, lengths) if rotary is None else _dense(rotary.cos, rotary.sin)
    lengths, block_table = _dense(lengths, lengths if block_table is None else block_table)
    with _on(call.device):
        flash_decode_kernel[(grid,)](
            q, k_new, v_new, k_cache, v_cache, lengths, block_table, cos, sin, out,
            *_workspace(call, constants, grid),
            *q.stride()[:3], *k_new.stride()[:3], *v_new.stride()[:3],
            *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:3],
            block_table.stride(0), cos.stride(0),
            call.batch_size, call.capacity, cos.shape[0], num_workers, min_units,
            (call.head_dim**-0.5 if scale is None else scale) * math.log2(math.e),
            **constants,
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
    call = describe_latent(q_latent, q_rope, latent_cache, lengths, block_table, out)
    _check_here(call, num_splits)
    if out is None:
        out = torch.empty_like(q_latent, memory_format=torch.contiguous_format)
    if q_latent.numel() == 0:
        return out
    lengths, block_table = _dense(lengths, lengths if block_table is None else block_table)
    if tiles is None and _use_hopper(call, latent_cache, implementation):
        num_workers, min_units = _workers(call, num_splits, hopper_latent.TILES, appends=0)
        with _on(call.device):
            hopper_latent.launch(
                call, q_latent, q_rope, latent_cache, lengths, block_table, out, scale=scale,
                num_workers=num_workers, min_units=min_units,
            )  # fmt: skip
        return out
    tiles = tiles or configs.choose("latent", call, interpreted=INTERPRETED)
    constants = latent_constants(call, tiles)
    num_workers, min_units = _workers(call, num_splits, tiles, appends=0)
    grid = num_workers * constants["ROW_TILES"]
    q_latent, q_rope = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_latent, q_rope))
    with _on(call.device):
        latent_decode_kernel[(grid,)](
            q_latent, q_rope, latent_cache, lengths, block_table, out,
            *_workspace(call, constants, grid),
            *q_latent.stride()[:3], *q_rope.stride()[:3], *latent_cache.stride()[:2],
            *out.stride()[:3], block_table.stride(0),
            call.batch_size, num_workers, min_units, scale * math.log2(math.e), **constants,
        )  # fmt: skip
    return out


@lru_cache(maxsize=1024)
def flash_constants(call: Call, tiles: configs.Tiles, interleaved: bool) -> dict[str, Any]:
    """What the flash kernel is compiled for."""
    return {
        "NUM_KV_HEADS": call.num_kv_heads,
        "GROUP_SIZE": call.group_size,
        "HEAD_DIM": call.head_dim,
        "ROTARY_DIM": call.rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_T": _power_of_two(call.new),
        **_shared_constants(call, tiles, merge_values=32),
    }


@lru_cache(maxsize=1024)
def latent_constants(call: Call, tiles: configs.Tiles) -> dict[str, Any]:
    """What the plain latent kernel is compiled for."""
    return {
        "NUM_HEADS": call.num_heads,
        "RANK": call.head_dim,
        "ROPE_DIM": call.rope_dim,
        "BLOCK_ROPE": _power_of_two(call.rope_dim),
        **_shared_constants(call, tiles, merge_values=64),
    }


def _shared_constants(call: Call, tiles: configs.Tiles, *, merge_values: int) -> dict[str, Any]:
    """Of both kernels; ``merge_values`` are the float32 values of a thread while it merges."""
    block_m = min(tiles.block_m, _power_of_two(call.num_rows))
    merge_rows = triton.next_power_of_2(min(block_m, call.num_rows))
    budget = 32 * tiles.num_warps * merge_values
    merge_columns = min(call.block_d, max(16, budget // (merge_rows * 4)))
    return {
        "NEW": call.new,
        "BLOCK_D": call.block_d,
        "PAGE": call.page,
        "BLOCK_B": _power_of_two(call.batch_size),
        "BLOCK_M": block_m,
        "BLOCK_N": tiles.block_n,
        "ROW_TILES": triton.cdiv(call.num_rows, block_m),
        "MERGE_PIECES": min(16, max(1, budget // (merge_rows * merge_columns))),
        "MERGE_ROWS": merge_rows,
        "MERGE_COLUMNS": merge_columns,
        "PRECISION": "tf32x3" if call.dtype == torch.float32 else "ieee",
        "UPCAST": INTERPRETED and call.dtype == torch.bfloat16,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **({"maxnreg": tiles.max_registers} if tiles.max_registers else {}),
    }


def _workspace(call: Call, constants: dict[str, Any], grid: int) -> tuple[Tensor, Tensor]:
    """Slots for pieces, and a counter for each line and row tile."""
    num_counters = call.batch_size * call.num_kv_heads * constants["ROW_TILES"]
    return (
        workspace.pieces(grid, constants["BLOCK_M"], call.block_d, call.device),
        workspace.counters(num_counters, call.device),
    )


def _workers(
    call: Call, num_splits: int | None, tiles: configs.Tiles, *, appends: int
) -> tuple[int, int]:
    """Shares of the work, and the units below which a share is not worth a program.

    No value of ``lengths`` is used; ``appends`` are the units of a line beyond its cached tiles.
    """
    lines = call.batch_size * call.num_kv_heads
    if num_splits is not None:
        return num_splits * lines, 1
    _, multiprocessors, _ = configs.device_facts(call.device)
    row_tiles = triton.cdiv(call.num_rows, min(tiles.block_m, _power_of_two(call.num_rows)))
    # Rounded down: one program too many would take the time of a whole share once more.
    programs = multiprocessors * tiles.programs_per_sm // row_tiles
    most = lines * (triton.cdiv(call.capacity, tiles.block_n) + appends)
    return max(1, min(programs, most // _MIN_UNITS)), _MIN_UNITS


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


def _check_here(call: Call, num_splits: int | None) -> None:
    reason = why_not(call.device, call.dtype)
    if reason is not None:
        raise ValueError(f"the Triton decode kernels: {reason}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}: must be 1 or more, or None")


def _power_of_two(count: int) -> int:
    """The next one, and at least the 16 that a matmul needs."""
    return max(16, triton.next_power_of_2(count))


def _dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """With a last stride of 1; these are small."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def _on(device: torch.device) -> AbstractContextManager[None]:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
