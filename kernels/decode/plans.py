"""Plans: everything about a launch except addresses and the scale, kept for each layout.

Deciding at every call what is refused, which tiles to take and what to compile for takes the host
longer than a short step takes the GPU. All of it follows from the layout of the tensors and from
the options; a plan is kept under both.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.decode import configs, workspace
from kernels.decode.cache_tiles import load_rows
from kernels.decode.call import Call
from kernels.launching.device import on
from kernels.launching.prepared import PreparedLaunch

INTERPRETED = not isinstance(load_rows, triton.JITFunction)
"""Whether triton was first imported under TRITON_INTERPRET=1; it cannot change later."""

_MIN_UNITS = 4
"""Fewest tiles in a share: with fewer, merging costs more than the parallel work saves."""

LOG2_E = math.log2(math.e)


def layouts(*tensors: Tensor | None) -> tuple:
    """Shapes, strides, dtypes and devices: what plans and checks depend on."""
    return tuple([None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors])


def copies_of_sparse(
    *tensors: Tensor | None, cos: Tensor | None = None, sin: Tensor | None = None
) -> list[Any] | None:
    """The tensors, copied where the kernels do not take their strides; None if none needs a copy.

    The result has the order of the arguments, then cos and sin, which must have equal strides.
    """
    given = (*tensors, cos, sin)
    dense = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in given]
    if cos is not None and sin is not None and cos.stride() != sin.stride():
        dense[-2:] = [cos.contiguous(), sin.contiguous()]
    changed = any(x is not y for x, y in zip(given, dense, strict=True))
    return dense if changed else None


class Plan(NamedTuple):
    """The plan of a kernel that merges partial results itself."""

    launch: PreparedLaunch
    device: torch.device
    pieces: tuple[int, int, int]
    """Programs, and the rows and columns of what each may leave."""
    num_counters: int
    """One for each line and row tile."""
    unit: float
    """Factor of the scale: 1 in natural units, log2 e in those of log2."""

    def __call__(self, *tensors: Tensor, scale: float) -> None:
        """Launch with the tensors of a call and newly allocated workspace."""
        device = self.device
        with on(device):
            self.launch(
                *tensors,
                workspace.pieces(*self.pieces, device),
                workspace.counters(self.num_counters, device),
                floats=(scale * self.unit,),
            )


def plan_of(
    kernel: Any,
    call: Call,
    constants: dict[str, Any],
    shares: tuple[int, int],
    integers: tuple[int, ...],
) -> Plan:
    """A kernel's plan; its integer arguments are ``integers``, then ``shares``."""
    row_tiles = constants["ROW_TILES"]
    num_programs = shares[0] * row_tiles
    return Plan(
        launch=PreparedLaunch(
            kernel, (num_programs, 1, 1), constants, integers=(*integers, *shares)
        ),
        device=call.device,
        pieces=(num_programs, constants["BLOCK_M"], call.block_d),
        num_counters=call.batch_size * call.num_kv_heads * row_tiles,
        unit=1.0 if constants["NATURAL"] else LOG2_E,
    )


def shared_constants(call: Call, tiles: configs.Tiles, *, merge_values: int) -> dict[str, Any]:
    """Constants of both kernels; ``merge_values`` float32 values per thread while it merges."""
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
        # log2 e has more digits than float32: a score of thousands would lose a thousandth by it.
        "NATURAL": call.dtype == torch.float32,
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


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if the kernels can run here, else the reason."""
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return "runs on a CUDA device; TRITON_INTERPRET=1 runs it on a CPU, slowly"
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) < (8,):
        return "bfloat16 needs a GPU of compute capability 8.0 or higher"
    return None


def check_here(call: Call, num_splits: int | None) -> None:
    """ValueError if no kernel of this package can run a call on its device."""
    reason = why_not(call.device, call.dtype)
    if reason is not None:
        raise ValueError(f"the Triton decode kernels: {reason}")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits is {num_splits}: must be 1 or more, or None")
