"""Launches the Hopper kernel of absorbed latent attention, for the calls it is made for."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.decode import workspace
from kernels.decode.call import Call
from kernels.decode.configs import Tiles
from kernels.decode.plans import LOG2_E
from kernels.launching.device import on
from kernels.launching.gluon import why_no_gluon
from kernels.launching.prepared import Descriptors, PreparedLaunch

ROWS = 64
"""Queries of a program, and tokens of a tile."""

RANK, ROPE_DIM = 512, 64

TILES = Tiles(block_m=ROWS, block_n=ROWS, num_warps=4, num_stages=2, programs_per_sm=1)
"""Fixed: one program, of three roles, takes a multiprocessor's shared memory and registers."""

_HALF = 256
ALIGNMENT = 16
"""Bytes: what the tensor memory accelerator needs of addresses and of the stride of rows."""

_MERGE_ROWS = 4


def why_not(call: Call, cache: Tensor) -> str | None:
    """None if the kernel can run ``call`` here, else the reason."""
    if _as_rows(cache) is None:
        return "the cache's tokens are not evenly apart, by a multiple of 16 bytes"
    return _why_not(call)


@lru_cache(maxsize=1024)
def _why_not(call: Call) -> str | None:
    if call.device.type != "cuda" or torch.cuda.get_device_capability(call.device) != (9, 0):
        return "needs a GPU of compute capability 9.0"
    if reason := why_no_gluon():
        return reason
    if call.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 and float16 only"
    if (call.head_dim, call.rope_dim) != (RANK, ROPE_DIM):
        return f"rank {call.head_dim} + {call.rope_dim}: must be {RANK} + {ROPE_DIM}"
    if call.num_rows <= ROWS // 2:
        return f"{call.num_rows} queries of a sequence: a tile of {ROWS} would be half empty"
    if call.page % ROWS:
        return f"block size {call.page}: must be a multiple of {ROWS}"
    return None


class HopperPlan(NamedTuple):
    """The plan of one launch, or of two."""

    attend: PreparedLaunch
    merge: PreparedLaunch | None
    """None where each line is in one piece."""
    device: torch.device
    num_programs: int

    def __call__(
        self,
        q: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        out: Tensor,
        *,
        scale: float,
    ) -> None:
        """Fills out [B, H, T, R]; arguments as in :func:`~.launch.mla_decode`."""
        with on(self.device):
            pieces = workspace.pieces(self.num_programs, ROWS, RANK, self.device)
            self.attend(
                _aligned(q), _aligned(q_rope), cache, cache, lengths, block_table, out, pieces,
                floats=(scale * LOG2_E,),
            )  # fmt: skip
            if self.merge is not None:
                self.merge(lengths, out, pieces)


def plan(
    call: Call,
    cache: Tensor,
    block_table: Tensor,
    out: Tensor,
    num_workers: int,
    min_units: int,
) -> HopperPlan:
    """The plan for tensors with these layouts; queries are made contiguous."""
    # Gluon, which old versions of Triton lack: why_not has been asked before.
    from kernels.decode.latent.hopper_kernel import hopper_latent_kernel
    from kernels.decode.latent.merge_kernel import merge_kernel

    rows = _as_rows(cache)
    assert rows is not None
    row_tiles = triton.cdiv(call.num_rows, ROWS)
    num_programs = num_workers * row_tiles
    num_queries = call.batch_size * call.num_rows
    q, q_rope = (torch.empty(num_queries, n, dtype=call.dtype) for n in (RANK, ROPE_DIM))
    constants = {
        "NEW": call.new,
        "BLOCK_B": max(32, triton.next_power_of_2(call.batch_size)),
        "ROW_TILES": row_tiles,
    }
    attend = PreparedLaunch(
        hopper_latent_kernel,
        (num_programs, 1, 1),
        {"PAGE": call.page, "num_warps": 4, **constants},
        integers=(
            *out.stride()[:3], block_table.stride(0), call.capacity, call.num_rows,
            call.batch_size, num_workers, min_units,
        ),
        descriptors=(
            _tiles(q, _HALF), _tiles(q_rope, ROPE_DIM),
            _tiles(rows, _HALF), _tiles(rows, ROPE_DIM),
        ),
    )  # fmt: skip
    merge = PreparedLaunch(
        merge_kernel,
        (call.batch_size * row_tiles, ROWS // _MERGE_ROWS, 1),
        {
            "BLOCK_M": ROWS, "BLOCK_N": ROWS, "BLOCK_D": RANK, "MERGE_PIECES": 4,
            "MERGE_ROWS": _MERGE_ROWS, "num_warps": 4, **constants,
        },
        integers=(
            *out.stride()[:3], call.num_rows, call.batch_size, num_workers, min_units,
            num_programs,
        ),
    )  # fmt: skip
    return HopperPlan(attend, merge if num_workers > 1 else None, call.device, num_programs)


def _as_rows(cache: Tensor) -> Tensor | None:
    """A contiguous or paged cache as [tokens, R + R_rope], if TMA can address it so."""
    first, tokens, width = cache.shape
    stride_b, stride_n, _ = cache.stride()
    if first > 1 and stride_b != tokens * stride_n:
        return None
    if stride_n * cache.element_size() % ALIGNMENT or cache.data_ptr() % ALIGNMENT:
        return None
    return cache.as_strided((first * tokens, width), (stride_n, 1))


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, as TMA addresses it."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _tiles(x: Tensor, columns: int) -> Descriptors:
    """A descriptor for copies of [ROWS, columns] tiles; zero outside of x."""
    descriptor, layout = _gluon()
    return Descriptors(descriptor(x, list(x.shape), [x.stride(0), 1], [ROWS, columns], layout))


@cache
def _gluon() -> tuple[Any, Any]:
    """The descriptor's type, and how a tile lies in shared memory."""
    # Old versions of Triton lack Gluon.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
