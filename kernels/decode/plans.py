"""Plans: what launches of the decode kernels have in common, but for addresses and the scale.

Deciding anew at every call what is refused, which tiles to take and what to compile for takes the
host longer than a short step takes the GPU. All of it follows from how the tensors lie and from
the options, under which a plan is kept.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.decode import configs, workspace
from kernels.decode.call import Call
from kernels.decode.dense.kernel import flash_decode_kernel
from kernels.decode.latent.kernel import latent_decode_kernel
from kernels.launching.device import on
from kernels.launching.prepared import Launch

INTERPRETED = not isinstance(flash_decode_kernel, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

_MIN_UNITS = 4
"""Tiles that make a share worth a program of its own: below, merging costs more than it spares."""

LOG2_E = math.log2(math.e)


def layouts(*tensors: Tensor | None) -> tuple:
    """How tensors lie: all of them that a plan depends on, and what is refused."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def copies_of_sparse(
    *tensors: Tensor | None, cos: Tensor | None = None, sin: Tensor | None = None
) -> list[Any] | None:
    """With copies of those that the kernels do not take as they lie; None if they take all.

    What is given comes back in its order, with the two tables last, of which kernels know one
    stride.
    """
    given = (*tensors, cos, sin)
    dense = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in given]
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        dense[-2:] = [cos.contiguous(), sin.contiguous()]
    changed = any(x is not y for x, y in zip(given, dense, strict=True))
    return dense if changed else None


class Plan(NamedTuple):
    """Of a kernel that merges by itself."""

    launch: Launch
    device: torch.device
    pieces: tuple[int, int, int]
    """Programs, and the rows and columns of what each may leave."""
    num_counters: int
    """One for each line and row tile."""

    def __call__(self, *tensors: Tensor, scale: float) -> None:
        """Launch with the tensors of a call, and memory of its own."""
        device = self.device
        with on(device):
            self.launch(
                *tensors,
                workspace.pieces(*self.pieces, device),
                workspace.counters(self.num_counters, device),
                floats=(scale * LOG2_E,),
            )


def plan_flash(
    call: Call,
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cos: Tensor,
    out: Tensor,
    interleaved: bool,
    num_splits: int | None,
    tiles: configs.Tiles | None,
) -> Plan:
    """For tensors that lie like these, as the kernel takes them."""
    tiles = tiles or configs.choose("flash", call, interpreted=INTERPRETED)
    return _plan(
        flash_decode_kernel,
        call,
        flash_constants(call, tiles, interleaved),
        workers(call, num_splits, tiles, appends=1),
        (
            *q.stride()[:3], *k_new.stride()[:3], *v_new.stride()[:3],
            *k_cache.stride()[:3], *v_cache.stride()[:3], *out.stride()[:3],
            block_table.stride(0), cos.stride(0),
            call.batch_size, call.capacity, cos.shape[0],
        ),
    )  # fmt: skip


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
    """For tensors that lie like these, as the plain kernel takes them."""
    tiles = tiles or configs.choose("latent", call, interpreted=INTERPRETED)
    return _plan(
        latent_decode_kernel,
        call,
        latent_constants(call, tiles),
        workers(call, num_splits, tiles, appends=0),
        (
            *q_latent.stride()[:3], *q_rope.stride()[:3], *latent_cache.stride()[:2],
            *out.stride()[:3], block_table.stride(0), call.batch_size,
        ),
    )  # fmt: skip


def _plan(
    kernel: Any,
    call: Call,
    constants: dict[str, Any],
    shares: tuple[int, int],
    integers: tuple[int, ...],
) -> Plan:
    """``integers`` are the kernel's before those of ``shares``, as :func:`workers` gives them."""
    row_tiles = constants["ROW_TILES"]
    num_programs = shares[0] * row_tiles
    return Plan(
        launch=Launch(kernel, (num_programs, 1, 1), constants, integers=(*integers, *shares)),
        device=call.device,
        pieces=(num_programs, constants["BLOCK_M"], call.block_d),
        num_counters=call.batch_size * call.num_kv_heads * row_tiles,
    )


@lru_cache(maxsize=1024)
def flash_constants(call: Call, tiles: configs.Tiles, interleaved: bool) -> dict[str, Any]:
    """What the flash kernel is compiled for."""
    return {
        "NUM_KV_HEADS": call.num_kv_heads,
        "GROUP_SIZE": call.group_size,
        "HEAD_DIM": call.head_dim,
        "ROTARY_DIM": call.rotary_dim,
        "INTERLEAVED": interleaved,
        "BLOCK_T": power_of_two(call.new),
        **_shared_constants(call, tiles, merge_values=32),
    }


@lru_cache(maxsize=1024)
def latent_constants(call: Call, tiles: configs.Tiles) -> dict[str, Any]:
    """What the plain latent kernel is compiled for."""
    return {
        "NUM_HEADS": call.num_heads,
        "RANK": call.head_dim,
        "ROPE_DIM": call.rope_dim,
        "BLOCK_ROPE": power_of_two(call.rope_dim),
        **_shared_constants(call, tiles, merge_values=64),
    }


def _shared_constants(call: Call, tiles: configs.Tiles, *, merge_values: int) -> dict[str, Any]:
    """Of both kernels; ``merge_values`` are the float32 values of a thread while it merges."""
    block_m = min(tiles.block_m, power_of_two(call.num_rows))
    merge_rows = triton.next_power_of_2(min(block_m, call.num_rows))
    budget = 32 * tiles.num_warps * merge_values
    merge_columns = min(call.block_d, max(16, budget // (merge_rows * 4)))
    return {
        "NEW": call.new,
        "BLOCK_D": call.block_d,
        "PAGE": call.page,
        "BLOCK_B": power_of_two(call.batch_size),
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


def workers(
    call: Call, num_splits: int | None, tiles: configs.Tiles, *, appends: int
) -> tuple[int, int]:
    """Shares of the work, and the units below which a share is not worth a program.

    No value of ``lengths`` is used; ``appends`` are the units of a line beyond its cached tiles.
    """
    lines = call.batch_size * call.num_kv_heads
    if num_splits is not None:
        return num_splits * lines, 1
    _, multiprocessors, _ = configs.device_facts(call.device)
    row_tiles = triton.cdiv(call.num_rows, min(tiles.block_m, power_of_two(call.num_rows)))
    # Rounded down: one program too many would take the time of a whole share once more.
    programs = multiprocessors * tiles.programs_per_sm // row_tiles
    most = lines * (triton.cdiv(call.capacity, tiles.block_n) + appends)
    return max(1, min(programs, most // _MIN_UNITS)), _MIN_UNITS


def power_of_two(count: int) -> int:
    """The next one, and at least the 16 that a matmul needs."""
    return max(16, triton.next_power_of_2(count))
