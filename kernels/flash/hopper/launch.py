"""Launches the Hopper kernels, with the functions that :mod:`kernels.flash.any_gpu.launch` has.

They read q, k, v and do through the tensor memory accelerator, which addresses rows that are
multiples of 16 bytes apart; a tensor that is not laid out so is copied. What they do not do,
the plain kernels do: float32, accumulators, head dims above 128, and empty tensors.

Everything about a launch but the addresses follows from the problem and the tensors' shapes and
strides, and is kept in a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.flash.any_gpu import launch as plain
from kernels.flash.hopper import pairing
from kernels.flash.problem import Problem
from kernels.launching.prepared import MAX_PLANS, Descriptors, Launch, planned
from kernels.problem import Packing

ROWS = 64
"""Rows of one consumer warpgroup, and of what each reads once."""

PROGRAM_ROWS = 2 * ROWS
"""Queries, or keys, of one program: those of its two consumers."""

_MAX_GRID_Y = 65535

_ALIGNMENT = 16
"""Bytes: what TMA needs, and what Triton compiles for if it finds it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """How a kernel is cut up."""

    tile: int
    """Rows of the tiles that stream by: keys, or in the backward pass queries."""
    stages: int
    """Slots of the ring they stream through."""
    resident: bool = False
    """Whether the backward pass keeps keys and values in registers."""


# By padded head dim. Measured on an H200: results/README.md says what else was tried.
FORWARD = {64: Schedule(tile=128, stages=2), 128: Schedule(tile=128, stages=2)}
BACKWARD = {
    64: Schedule(tile=64, stages=4, resident=True),
    # dK and dV alone take half of the registers.
    128: Schedule(tile=64, stages=2),
}

FORWARD_TILES: int | None = None
"""Query tiles of every forward program planned from now on; None leaves it to ``pairing``.

For measurements and tests, which have to forget the plans made before (``_FORWARD_PLANS``).
"""


def why_not(problem: Problem) -> str | None:
    """None if these kernels can run ``problem`` here, else the reason."""
    if plain.INTERPRETED:
        return "Triton's interpreter does not run Gluon"
    if problem.device.type != "cuda":
        return "runs on a CUDA device of compute capability 9.0"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability != (9, 0):
        return f"needs compute capability 9.0; this GPU has {capability[0]}.{capability[1]}"
    if find_spec("triton.experimental.gluon") is None:
        return f"triton {triton.__version__} has no Gluon; install triton 3.6 or newer"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "computes in bfloat16 and float16 only"
    if problem.head_dim > 128 or problem.head_dim % 8:
        return f"head_dim {problem.head_dim}: must be a multiple of 8, at most 128"
    if problem.accumulates:
        return "does not continue from an accumulator"
    if problem.batch_size * problem.num_heads > _MAX_GRID_Y:
        return f"more than {_MAX_GRID_Y} heads in a batch"
    return None


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill o [B, H, S, D] and lse [B, H, S] (contiguous)."""
    # The running maximum is of the raw scores, which a scale below zero turns around.
    if q.numel() == 0 or k.numel() == 0 or scale <= 0:
        plain.forward(problem, q, k, v, o, lse, scale=scale, packing=packing)
        return
    launch = _FORWARD_PLANS.get(_forward_key(problem, q, k, v, o))
    if launch is None or not _are_aligned(q, k, v):
        described = (problem, _addressable(q), _addressable(k), _addressable(v), o)
        launch = planned(_FORWARD_PLANS, _plan_forward, _forward_key(*described), *described)
        _, q, k, v, _ = described
    _run(_forward_steps(launch, q, k, v, o, lse, scale=scale, packing=packing))


Step = tuple[Launch, tuple[Tensor, ...], tuple[float, ...]]
"""A launch, and the tensors and floats that it is called with."""


def _run(steps: list[Step]) -> None:
    for launch, tensors, floats in steps:
        launch(*tensors, floats=floats)


def _forward_steps(
    launch: Launch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> list[Step]:
    tensors = (q, k, v, o, lse, *_cu_seqlens(packing, q))
    return [(launch, tensors, (scale * math.log2(math.e),))]


def planned_forward(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> list[Step] | None:
    """What :func:`forward` launches for a dense batch and a scale of 1, whose floats are products.

    None if it has not launched it yet, or does more than launch.
    """
    launch = _FORWARD_PLANS.get(_forward_key(problem, q, k, v, o))
    if launch is None or not _are_aligned(q, k, v):
        return None
    return _forward_steps(launch, q, k, v, o, lse, scale=1.0, packing=None)


_FORWARD_PLANS: dict[tuple, Launch] = {}


def _forward_key(problem: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> tuple:
    # The problem has all of the shapes but the tokens of a packed batch.
    return problem, q.shape[2], k.shape[2], q.stride(), k.stride(), v.stride(), o.stride()


def _plan_forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Launch:
    from kernels.flash.hopper.forward import flash_forward

    block_d = _block_d(problem)
    chosen = FORWARD[block_d]
    tiles = FORWARD_TILES or _tiles_of_program(problem)
    return Launch(
        flash_forward,
        _grid(problem.q_len, problem.batch_size * problem.num_heads, tiles),
        {
            "BLOCK_K": chosen.tile,
            "STAGES": chosen.stages,
            "TILES": tiles,
            **_constants(problem),
        },
        integers=(
            *o.stride()[:3],
            problem.num_heads,
            problem.group_size,
            problem.q_len,
            problem.kv_len,
            q.shape[2],
        ),
        descriptors=(
            _tiles(q, ROWS, block_d),
            _tiles(k, chosen.tile, block_d),
            _tiles(v, chosen.tile, block_d),
        ),
    )


def _tiles_of_program(problem: Problem) -> int:
    """How many query tiles a forward program takes one after another.

    The lengths of a packed batch are known to the GPU alone, and so is what its programs cost.
    """
    if problem.packed:
        return 1
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    return pairing.tiles_of_program(
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        heads=problem.batch_size * problem.num_heads,
        block_d=_block_d(problem),
        causal=problem.causal,
        processors=processors,
    )


def backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    scale: float,
    packing: Packing | None,
) -> None:
    """Fill dq, dk, dv; lse and dlse are contiguous [B, H, S].

    Needs, besides, the float32 sums of dq, 4 bytes for each of its elements; and where programs
    share grouped queries (:func:`_num_parts`), as many parts of dk and dv, for so many key heads at
    a time as keep them within _PARTS_BYTES.
    """
    if q.numel() == 0 or k.numel() == 0:
        plain.backward(problem, do, q, k, v, o, lse, dlse, dq, dk, dv, scale=scale, packing=packing)
        return
    heads_of_slice = _key_heads_of_slice(problem, k.shape[0] * k.shape[2])
    if heads_of_slice < problem.num_kv_heads:
        for start in range(0, problem.num_kv_heads, heads_of_slice):
            keys = slice(start, min(start + heads_of_slice, problem.num_kv_heads))
            queries = slice(keys.start * problem.group_size, keys.stop * problem.group_size)
            backward(
                _of_key_heads(problem, keys.stop - keys.start),
                do[:, queries],
                q[:, queries],
                k[:, keys],
                v[:, keys],
                o[:, queries],
                lse[:, queries].contiguous(),
                None if dlse is None else dlse[:, queries].contiguous(),
                dq[:, queries],
                dk[:, keys],
                dv[:, keys],
                scale=scale,
                packing=packing,
            )
        return
    key = _backward_key(problem, q, k, v, do, o, dq, dk, dv, dlse is not None)
    plan = _BACKWARD_PLANS.get(key)
    if plan is None or not _are_aligned(q, k, v, do, o, lse):
        q, k, v, do = _addressable(q), _addressable(k), _addressable(v), _addressable(do)
        # Triton compiled for the alignment that torch allocates with.
        o, lse = _aligned(o), _aligned(lse)
        described = (problem, q, k, v, do, o, dq, dk, dv, dlse is not None)
        plan = planned(_BACKWARD_PLANS, _plan_backward, _backward_key(*described), *described)
    workspace = [q.new_empty(shape, dtype=dtype) for shape, dtype in plan.workspace]
    _run(
        _backward_steps(
            plan, do, q, k, v, o, lse, dlse, dq, dk, dv, workspace, scale=scale, packing=packing
        )
    )


class _Backward(NamedTuple):
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    """Shapes and dtypes. lse in units of log2, and rowsum(o * do) - dlse: [2, B * H, S padded];
    counts of programs; sums of dq; and where programs share a group, parts of dk and dv."""
    row_statistics: Launch
    launch: Launch
    finish_dq: Launch
    sum_parts: Launch | None
    """None where one program has all query heads of a group."""


def _backward_steps(
    plan: _Backward,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    workspace: Sequence[Tensor],
    *,
    scale: float,
    packing: Packing | None,
) -> list[Step]:
    statistics, counts, dq_sums, *parts = workspace
    dk_out, dv_out = parts or (dk, dv)
    cu_q, cu_k = _cu_seqlens(packing, q)
    dlse = lse if dlse is None else _aligned(dlse)
    before = (o, do, lse, dlse, statistics, counts, cu_q)
    streamed = (q, do, k, v, statistics, dq_sums, counts, dk_out, dv_out, cu_q, cu_k)
    steps: list[Step] = [
        (plan.row_statistics, before, ()),
        (plan.launch, streamed, (scale, scale * math.log2(math.e))),
    ]
    if plan.sum_parts is not None:
        steps.append((plan.sum_parts, (dk_out, dv_out, dk, dv), ()))
    steps.append((plan.finish_dq, (dq_sums, dq, cu_q, cu_k), (scale,)))
    return steps


class PlannedBackward(NamedTuple):
    """What :func:`backward` launches for a dense batch, no dlse, and a scale of 1."""

    steps: list[Step]
    workspace: list[Tensor]
    """Stands for memory, as large but without any."""
    copies_do: bool
    """Whether the launches are given a contiguous copy of do."""


def planned_backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> PlannedBackward | None:
    """None if it has not launched it yet, or does more than launch and copy do."""
    for given in (do, torch.empty(do.shape, dtype=do.dtype, device="meta")):
        key = _backward_key(problem, q, k, v, given, o, dq, dk, dv, has_dlse=False)
        plan = _BACKWARD_PLANS.get(key)
        if plan is not None:
            break
    else:
        return None
    if not _are_aligned(q, k, v, do, o, lse):
        return None
    workspace = [
        torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in plan.workspace
    ]  # fmt: skip
    steps = _backward_steps(
        plan, do, q, k, v, o, lse, None, dq, dk, dv, workspace, scale=1.0, packing=None
    )
    return PlannedBackward(steps, workspace, copies_do=given is not do)


_BACKWARD_PLANS: dict[tuple, _Backward] = {}


def _backward_key(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    has_dlse: bool,
) -> tuple:
    return (
        *(problem, q.shape[2], k.shape[2], o.dtype, has_dlse),
        *(q.stride(), k.stride(), v.stride(), do.stride(), o.stride()),
        *(dq.stride(), dk.stride(), dv.stride()),
    )


def _plan_backward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    o: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    has_dlse: bool,
) -> _Backward:
    from kernels.flash.hopper.backward import flash_backward
    from kernels.flash.hopper.rows import finish_dq, row_statistics, sum_parts

    block_d = _block_d(problem)
    chosen = BACKWARD[block_d]
    num_lines, lse_len = q.shape[0] * q.shape[1], q.shape[2]
    # Each sequence of a packed batch begins at a multiple of a program's rows.
    rows = lse_len if not problem.packed else lse_len + PROGRAM_ROWS * problem.batch_size
    num_blocks = -(-rows // PROGRAM_ROWS)
    padded_len = num_blocks * PROGRAM_ROWS
    by_query = _grid(problem.q_len, problem.batch_size * problem.num_heads)
    num_parts = _num_parts(problem)
    num_key_tiles = -(-problem.kv_len // PROGRAM_ROWS)
    parts_shape = (k.shape[0], problem.num_kv_heads * num_parts, k.shape[2], problem.head_dim)
    dk_strides, dv_strides = dk.stride()[:3], dv.stride()[:3]
    rowwise = {"HEAD_DIM": problem.head_dim, "BLOCK_D": block_d, "BLOCK_Q": PROGRAM_ROWS}
    parts = ((parts_shape, torch.float32),) * 2
    return _Backward(
        workspace=(
            ((2, num_lines, padded_len), torch.float32),
            ((num_lines, num_blocks), torch.int32),
            ((num_lines, padded_len, block_d), torch.float32),
            *(() if num_parts == 1 else parts),
        ),
        row_statistics=Launch(
            row_statistics,
            by_query,
            {**rowwise, "HAS_DLSE": has_dlse, "PACKED": problem.packed},
            integers=(
                *o.stride()[:3],
                *do.stride()[:3],
                problem.num_heads,
                problem.q_len,
                lse_len,
                padded_len,
                num_lines * padded_len,
            ),
        ),
        launch=Launch(
            flash_backward,
            (num_key_tiles * problem.batch_size * problem.num_kv_heads * num_parts, 1, 1),
            {"STAGES": chosen.stages, "RESIDENT": chosen.resident, **_constants(problem)},
            integers=(
                *(dk_strides if num_parts == 1 else _contiguous_strides(parts_shape)),
                *(dv_strides if num_parts == 1 else _contiguous_strides(parts_shape)),
                problem.num_heads,
                problem.group_size,
                problem.group_size // num_parts,
                _heads_at_once(problem),
                problem.q_len,
                problem.kv_len,
                num_lines,
                padded_len,
            ),
            descriptors=(
                _tiles(q, chosen.tile, block_d),
                _tiles(do, chosen.tile, block_d),
                _tiles(k, ROWS, block_d),
                _tiles(v, ROWS, block_d),
                _lines(2 * num_lines, padded_len, chosen.tile),
            ),
        ),
        finish_dq=Launch(
            finish_dq,
            by_query,
            {**rowwise, "CAUSAL": problem.causal, "PACKED": problem.packed},
            integers=(
                *dq.stride()[:3],
                problem.num_heads,
                problem.q_len,
                problem.kv_len,
                padded_len,
            ),
        ),
        sum_parts=None
        if num_parts == 1
        else Launch(
            sum_parts,
            _grid(k.shape[2], k.shape[0] * problem.num_kv_heads),
            {"HEAD_DIM": problem.head_dim, "BLOCK_D": block_d, "BLOCK_K": PROGRAM_ROWS},
            integers=(*dk_strides, *dv_strides, problem.num_kv_heads, num_parts, k.shape[2]),
        ),
    )


def _num_parts(problem: Problem) -> int:
    """How many programs share the query heads of a group.

    Under a causal mask all that there are. A program's length depends on its keys, the longest
    come last, and many short programs end more evenly than few long ones; and programs that take
    several heads in turn spread over all of them, whose queries and sums of dq do not fit the L2
    cache. Without a mask programs are as long as each other, and run in rounds, the last of which
    should be nearly full.
    """
    if problem.causal:
        return problem.group_size
    processors = torch.cuda.get_device_properties(problem.device).multi_processor_count
    programs = -(-problem.kv_len // PROGRAM_ROWS) * problem.batch_size * problem.num_kv_heads
    divisors = [n for n in range(1, problem.group_size + 1) if problem.group_size % n == 0]
    busy = {n: n * programs / (processors * -(-n * programs // processors)) for n in divisors}
    return next((n for n in divisors if busy[n] > 0.9), max(divisors, key=lambda n: busy[n]))


_PARTS_BYTES = 1 << 30
"""Bytes of the parts of dk and dv, beyond which the backward pass takes the heads in slices."""


@lru_cache(maxsize=MAX_PLANS)
def _key_heads_of_slice(problem: Problem, num_keys: int) -> int:
    """Key heads whose parts of dk and dv stay within _PARTS_BYTES; all if there are no parts.

    Args:
        num_keys: of one key head, over the whole batch.
    """
    num_parts = _num_parts(problem)
    if num_parts == 1:
        return problem.num_kv_heads
    one_head = 2 * num_parts * num_keys * problem.head_dim * torch.float32.itemsize
    return min(problem.num_kv_heads, max(1, _PARTS_BYTES // one_head))


def backward_workspace(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    causal: bool,
) -> int:
    """Bytes that :func:`backward` allocates, here or elsewhere, with enough heads to fill rounds.

    The sums of dq and two statistics of each row, and under a causal mask the parts of dk and dv,
    of as many heads as one slice has.
    """
    one_head = batch_size * q_len * (64 if head_dim <= 64 else 128) * 4 + 8 * batch_size * q_len
    group_size = num_heads // num_kv_heads
    if group_size == 1 or not causal:
        return num_heads * one_head
    parts = 2 * group_size * batch_size * kv_len * head_dim * 4
    key_heads = min(num_kv_heads, max(1, _PARTS_BYTES // parts))
    return key_heads * (group_size * one_head + parts)


@lru_cache(maxsize=MAX_PLANS)
def _of_key_heads(problem: Problem, num_kv_heads: int) -> Problem:
    """The problem of so many of its key heads and their queries; the same one each time."""
    num_heads = num_kv_heads * problem.group_size
    return replace(problem, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _heads_at_once(problem: Problem) -> int:
    """How many heads' backward programs take turns (hopper_backward.place_in_order).

    Under a causal mask the programs of a head are spread over its queries, so that those of all
    of these heads, with do and the sums of dq, should stay in the L2 cache: two thirds of it
    leave room for the keys, a power of two divides what there is of heads. Without a mask all
    programs follow one another closely through the queries.
    """
    if not problem.causal:
        return 8
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    one_head = problem.q_len * _block_d(problem) * (2 * problem.dtype.itemsize + 4)
    return 1 << max(0, (2 * cache // (3 * one_head)).bit_length() - 1)


def _contiguous_strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """The first three strides of a contiguous tensor, in elements."""
    return shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3]


def _constants(problem: Problem) -> dict[str, Any]:
    """What the Gluon kernels are compiled for, as the last of their parameters."""
    return {
        "HEAD_DIM": problem.head_dim,
        "BLOCK_D": _block_d(problem),
        "CAUSAL": problem.causal,
        "PACKED": problem.packed,
        "num_warps": 4,
    }


def _grid(rows: int, heads: int, tiles: int = 1) -> tuple[int, int, int]:
    """Programs of ``tiles`` times PROGRAM_ROWS rows of one head."""
    return -(-rows // (tiles * PROGRAM_ROWS)), heads, 1


def _block_d(problem: Problem) -> int:
    """Columns of a tile: whole 128-byte swizzles of 16-bit numbers; TMA fills up with zeros."""
    return 64 if problem.head_dim <= 64 else 128


def _cu_seqlens(packing: Packing | None, any_tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Where sequences begin; a dense batch passes tensors that nobody reads."""
    if packing is None:
        return any_tensor, any_tensor
    return packing.cu_seqlens_q, packing.cu_seqlens_k


def _addressable(x: Tensor) -> Tensor:
    """x itself if TMA can address it, else a contiguous copy (aligned, as head_dim is by 8)."""
    if x.data_ptr() % _ALIGNMENT == 0 and _has_addressable_rows(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _are_aligned(*tensors: Tensor) -> bool:
    return not any(x.data_ptr() % _ALIGNMENT for x in tensors)


def _aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


@lru_cache(maxsize=4096)
def _has_addressable_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(shape[i] == 1 or (strides[i] > 0 and strides[i] % 8 == 0) for i in range(3))


@cache
def _gluon() -> tuple[Any, Any, Any]:
    """TensorDescriptor, and the shared-memory layouts of a tile and of a line of statistics."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    line = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor, tile, line


def _tiles(x: Tensor, rows: int, columns: int) -> Descriptors:
    """For copies of [1, 1, rows, columns] tiles; what lies outside of x comes as zero."""
    descriptor, layout, _ = _gluon()
    # The stride of a dimension of size 1 is never used, but has to be a valid one.
    row = x.stride(2) if x.shape[2] > 1 else x.shape[3]
    strides = [x.stride(i) if x.shape[i] > 1 else row for i in (0, 1)]
    return Descriptors(
        descriptor(x, list(x.shape), [*strides, row, 1], [1, 1, rows, columns], layout)
    )


def _lines(num_lines: int, padded_len: int, columns: int) -> Descriptors:
    """For copies of [1, columns] of the statistics, lse's lines first, then delta's."""
    descriptor, _, layout = _gluon()
    example = torch.empty(0)
    return Descriptors(
        descriptor(example, [num_lines, padded_len], [padded_len, 1], [1, columns], layout)
    )
