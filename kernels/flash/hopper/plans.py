"""Plans of the Hopper kernels' launches: everything except addresses and the scale.

It follows from the problem and the tensors' shapes and strides, and is kept in plans.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem
from kernels.flash.hopper import backward_schedule, forward_schedule, schedule
from kernels.flash.hopper.program_size import ProgramSize
from kernels.flash.hopper.schedule import (
    BACKWARD,
    FORWARD,
    NARROW_BACKWARD,
    NARROW_FORWARD,
    NARROW_PANELS,
    PROGRAM_ROWS,
    ROWS,
    block_d,
    block_v,
)
from kernels.launching.prepared import Descriptors, PreparedLaunch

_ALIGNMENT = 16
"""Bytes: what TMA needs, and what Triton compiles for if it finds it."""

FORWARD_SIZE: ProgramSize | None = None
"""Of every forward program planned from now on; None leaves it to ``schedule``.

For measurements and tests, which have to forget the plans made before (``FORWARD_PLANS``).
"""

FORWARD_PLANS: dict[tuple, PreparedLaunch] = {}


def forward_key(call: ForwardPass) -> tuple:
    """All that the forward plan depends on."""
    q, k = call.q, call.k
    # The problem holds all shapes except the number of tokens of a packed batch.
    strides = q.stride(), k.stride(), call.v.stride(), call.o.stride()
    return call.problem, q.shape[2], k.shape[2], *strides


def plan_forward(call: ForwardPass) -> PreparedLaunch:
    """The launch of a call whose tensors TMA can address."""
    # Gluon, which old versions of Triton lack: why_not has been asked before.
    from kernels.flash.hopper.forward import flash_forward
    from kernels.flash.hopper.forward_small import flash_forward_small

    problem, q, o = call.problem, call.q, call.o
    size = FORWARD_SIZE or forward_schedule.size_of_program(problem)
    width, panels, chosen = block_d(problem), 1, FORWARD[block_d(problem)]
    key_tile = chosen.tile if width > 128 else size.key_tile
    if problem.value_dim is not None:
        width, panels, chosen = schedule.PANEL_COLUMNS, NARROW_PANELS, NARROW_FORWARD
        key_tile = chosen.tile
    program: dict[str, Any] = {}
    if not size.is_small:
        program = {
            "CONSUMERS": size.consumers,
            "TILES": size.tiles,
            "BLOCK_V": block_v(problem),
            "PANELS": panels,
        }
    return PreparedLaunch(
        flash_forward_small if size.is_small else flash_forward,
        grid(problem, q.shape[2], size.tiles * size.consumers * ROWS),
        {
            "BLOCK_K": key_tile,
            "STAGES": chosen.stages,
            "VALUE_DIM": problem.v_dim,
            **program,
            **_constants(problem),
            "BLOCK_D": panels * width,
        },
        integers=(
            *o.stride()[:3],
            problem.batch_size,
            problem.num_heads,
            problem.group_size,
            forward_schedule.heads_at_once(problem),
            problem.q_len,
            problem.kv_len,
            q.shape[2],
            *_edges(problem),
        ),
        descriptors=(
            _tiles(q, ROWS, width),
            _tiles(call.k, key_tile, width),
            _tiles(call.v, key_tile, block_v(problem)),
        ),
    )


Workspace = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of tensors that a pass needs besides its arguments."""


class BackwardPlan(NamedTuple):
    """The launches of a backward pass, in their order, and the memory that they need besides."""

    workspace: Workspace
    """lse in units of log2, and rowsum(o * do) - dlse: [2, B * H, S padded]; counts of programs and
    sums of dq, one or more of each line; and where programs share a tile of keys, counts of them
    and sums of dk and dv."""
    row_statistics: PreparedLaunch
    main: PreparedLaunch
    finish_dq: PreparedLaunch


FINISHED_ROWS = 16
"""Queries of a program of finish_dq. It loads all sums of a row at once: with 128 rows, four sums
of 128 columns were 512 numbers a thread, which spilled 10 KB; 2,048 queries took 100 microseconds,
and take 3 (results/h200-kernels/backward_order.txt)."""

BACKWARD_PLANS: dict[tuple, BackwardPlan] = {}


def backward_key(call: BackwardPass) -> tuple:
    """All that the backward plan depends on."""
    q, k, v = call.q, call.k, call.v
    return (
        *(call.problem, q.shape[2], k.shape[2], call.o.dtype, call.dlse is not None),
        *(q.stride(), k.stride(), v.stride(), call.do.stride(), call.o.stride()),
        *(call.dq.stride(), call.dk.stride(), call.dv.stride()),
    )


def plan_backward(call: BackwardPass) -> BackwardPlan:
    """The launches of a call whose tensors TMA can address."""
    # Gluon, which old versions of Triton lack: why_not has been asked before.
    from kernels.flash.hopper.rows import finish_dq, row_statistics

    problem, q, do, o, dq = call.problem, call.q, call.do, call.o, call.dq
    width, value_width = block_d(problem), block_v(problem)
    num_lines, lse_len = q.shape[0] * q.shape[1], q.shape[2]
    padded_len = _padded(lse_len, problem)
    of_keys = _key_workspace(call, onto=False)
    keys_turned = backward_schedule.keys_turned(problem)
    divided = backward_schedule.division(problem)
    num_sums = divided.sums if divided else 2 if keys_turned else 1
    return BackwardPlan(
        workspace=(
            ((2, num_lines, padded_len), torch.float32),
            ((num_sums * num_lines, padded_len // ROWS), torch.int32),
            ((num_sums * num_lines, padded_len, width), torch.float32),
            *of_keys,
        ),
        row_statistics=PreparedLaunch(
            row_statistics,
            grid(problem, lse_len, PROGRAM_ROWS),
            {
                "VALUE_DIM": problem.v_dim,
                "BLOCK_V": value_width,
                "BLOCK_Q": PROGRAM_ROWS,
                "PACKED": problem.packed,
                "num_warps": _num_warps(value_width),
                "HAS_DLSE": call.dlse is not None,
                "SUMS": num_sums,
            },
            integers=(
                *o.stride()[:3],
                *do.stride()[:3],
                problem.batch_size,
                problem.num_heads,
                problem.q_len,
                lse_len,
                padded_len,
                num_lines * padded_len,
                math.prod(of_keys[0][0]) if of_keys else 0,
            ),
        ),
        main=_plan_main(call, padded_len, onto=False),
        finish_dq=PreparedLaunch(
            finish_dq,
            grid(problem, lse_len, FINISHED_ROWS),
            {
                "HEAD_DIM": problem.head_dim,
                "BLOCK_D": width,
                "BLOCK_Q": FINISHED_ROWS,
                "PACKED": problem.packed,
                "num_warps": _num_warps(width),
                "TURN": schedule.backward_rows(problem),
                "CAUSAL": problem.causal,
                "MASK": schedule.mask_kind(problem),
                "SUMS": num_sums,
            },
            integers=(
                *dq.stride()[:3],
                problem.batch_size,
                problem.num_heads,
                problem.q_len,
                problem.kv_len,
                padded_len,
                num_lines * padded_len,
                divided.turns if divided else keys_turned,
                *_edges(problem),
            ),
        ),
    )


def _num_warps(width: int) -> int:
    """Warps of a program that has rows of so many columns."""
    return width // 32 if width > 128 else 4


class OntoPlan(NamedTuple):
    """The launch that adds to the sums of dq of other keys, and the memory that it needs besides.

    Where no programs share a group, there is none of it.
    """

    num_key_counts: int
    key_sums: tuple[int, ...]
    main: PreparedLaunch


ONTO_PLANS: dict[tuple, OntoPlan] = {}


def plan_onto(call: BackwardPass, padded_len: int) -> OntoPlan:
    """The launch of a call whose dq is added to sums, of lines of ``padded_len`` rows."""
    counts, sums = [shape for shape, _ in _key_workspace(call, onto=True)] or [(0,), (0,)]
    return OntoPlan(math.prod(counts), sums, _plan_main(call, padded_len, onto=True))


def _division(problem: Problem, *, onto: bool) -> backward_schedule.Division | None:
    """How turns are divided; not at all where dq goes on from other keys, as memory is counted."""
    return None if onto else backward_schedule.division(problem)


def _key_workspace(call: BackwardPass, *, onto: bool) -> Workspace:
    """Counts of programs that share a tile of keys, and sums of dk and dv; nothing if none do."""
    problem, k = call.problem, call.k
    divided = _division(problem, onto=onto)
    if backward_schedule.num_parts(problem) == 1 and divided is None:
        return ()
    tiles = k.shape[0] * problem.num_kv_heads, _padded(k.shape[2], problem) // ROWS
    numbers = ROWS * (block_d(problem) + block_v(problem))
    return (tiles, torch.int32), ((*tiles, numbers), torch.float32)


def _plan_main(call: BackwardPass, padded_len: int, *, onto: bool) -> PreparedLaunch:
    from kernels.flash.hopper.backward import flash_backward
    from kernels.flash.hopper.backward_narrow import flash_backward_narrow
    from kernels.flash.hopper.backward_wide import flash_backward_wide

    problem, q, k, dk, dv = call.problem, call.q, call.k, call.dk, call.dv
    width = block_d(problem)
    kernel, chosen = flash_backward if width <= 128 else flash_backward_wide, BACKWARD[width]
    num_lines = q.shape[0] * q.shape[1]
    num_parts = backward_schedule.num_parts(problem)
    keys_turned = 0 if onto else backward_schedule.keys_turned(problem)
    heads_turned = backward_schedule.heads_turned(problem)
    divided = _division(problem, onto=onto)
    grid = backward_schedule.backward_grid(problem)
    order = "keys" if keys_turned else "heads" if heads_turned else "none"
    num_programs = grid.heads * grid.num_key_tiles
    if divided is not None:
        order, num_programs = divided.order, grid.heads * divided.programs(grid.num_key_tiles)
    if problem.packed and order in ("none", "heads"):
        rows = schedule.backward_rows(problem)
        programs_of_slot = grid.heads // problem.batch_size
        num_programs = programs_of_slot * slots(k.shape[2], problem.batch_size, rows)
    constants: dict[str, Any] = _constants(problem)
    if problem.value_dim is not None:
        kernel, chosen = flash_backward_narrow, NARROW_BACKWARD
        width = schedule.PANEL_COLUMNS
        constants |= {"VALUE_DIM": problem.v_dim, "BLOCK_V": block_v(problem)}
        del constants["MAIN"], constants["TAIL"]
    elif width <= 128:
        constants |= {
            "RESIDENT": chosen.resident,
            "APART": backward_schedule.halves_apart(problem),
            "ROLLED": backward_schedule.halves_rolled(problem),
            "UNMASKED": schedule.has_unmasked_turns(problem.causal, problem.window),
        }
    return PreparedLaunch(
        kernel,
        (num_programs, 1, 1),
        {
            "STAGES": chosen.stages,
            "HEAD_DIM": problem.head_dim,
            "ORDER": order,
            "SHARED": num_parts > 1 or divided is not None,
            "ONTO": onto,
            **constants,
        },
        integers=(
            *dk.stride()[:3],
            *dv.stride()[:3],
            problem.batch_size,
            problem.num_heads,
            problem.group_size,
            problem.group_size // num_parts,
            grid.heads if keys_turned or divided else backward_schedule.heads_at_once(problem),
            divided.turns if divided else keys_turned or heads_turned,
            problem.q_len,
            problem.kv_len,
            num_lines,
            padded_len,
            _padded(k.shape[2], problem),
            *_edges(problem),
        ),
        descriptors=(
            _tiles(q, chosen.tile, width),
            _tiles(call.do, chosen.tile, block_v(problem)),
            _tiles(k, ROWS, width),
            _tiles(call.v, ROWS, block_v(problem)),
            _lines(2 * num_lines, padded_len, chosen.tile),
        ),
    )


def _padded(length: int, problem: Problem) -> int:
    """Rows with room for each sequence of a packed batch to begin at a multiple of a program's."""
    rows = length + PROGRAM_ROWS * problem.batch_size if problem.packed else length
    return -(-rows // PROGRAM_ROWS) * PROGRAM_ROWS


def _constants(problem: Problem) -> dict[str, Any]:
    """Compile-time arguments of both Gluon kernels, the last of their parameters."""
    columns = schedule.columns(problem.head_dim)
    return {
        "BLOCK_D": columns.stored,
        "MAIN": columns.main,
        "TAIL": columns.tail,
        "CAUSAL": problem.causal,
        "MASK": schedule.mask_kind(problem),
        # A number of the model, which few calls differ in.
        "SOFTCAP": problem.softcap or 0.0,
        "PACKED": problem.packed,
        "num_warps": 4,
    }


def _edges(problem: Problem) -> tuple[int, int, int]:
    """The numbers of :class:`tiles.Edges`."""
    return problem.window or 0, problem.prefix_len, problem.shift


def grid(problem: Problem, num_queries: int, program_rows: int) -> tuple[int, int, int]:
    """Programs of ``program_rows`` queries: how many each head has, and the heads.

    Of a packed batch, which has ``num_queries`` in all, each head has :func:`slots`; a program
    finds out whose rows it has (tiles.sequence_of_program).
    """
    if problem.packed:
        return slots(num_queries, problem.batch_size, program_rows), problem.num_heads, 1
    return -(-problem.q_len // program_rows), problem.batch_size * problem.num_heads, 1


def slots(num_rows: int, num_sequences: int, program_rows: int) -> int:
    """Enough for programs of ``program_rows`` rows that each belong to one sequence."""
    return num_rows // program_rows + num_sequences


def addressable(x: Tensor) -> Tensor:
    """x itself if TMA can address it, else a contiguous copy (aligned, as head_dim is by 8)."""
    if x.data_ptr() % _ALIGNMENT == 0 and _has_addressable_rows(x.shape, x.stride()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def are_aligned(*tensors: Tensor) -> bool:
    return not any(x.data_ptr() % _ALIGNMENT for x in tensors)


def aligned(x: Tensor) -> Tensor:
    return x if x.data_ptr() % _ALIGNMENT == 0 else x.clone()


@lru_cache(maxsize=4096)
def _has_addressable_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return all(shape[i] == 1 or (strides[i] > 0 and strides[i] % 8 == 0) for i in range(3))


@cache
def _gluon() -> tuple[Any, Any, Any]:
    """TensorDescriptor, and the shared-memory layouts of a tile and of a line of statistics."""
    # Old versions of Triton lack Gluon.
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    tile = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    line = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor, tile, line


def _tiles(x: Tensor, rows: int, columns: int) -> Descriptors:
    """A descriptor for copies of [1, 1, rows, columns] tiles; zero outside of x."""
    descriptor, layout, _ = _gluon()
    # The stride of a dimension of size 1 is never used, but has to be a valid one.
    row = x.stride(2) if x.shape[2] > 1 else x.shape[3]
    strides = [x.stride(i) if x.shape[i] > 1 else row for i in (0, 1)]
    return Descriptors(
        descriptor(x, list(x.shape), [*strides, row, 1], [1, 1, rows, columns], layout)
    )


def _lines(num_lines: int, padded_len: int, columns: int) -> Descriptors:
    """A descriptor for copies of [1, columns] of lines of lse, and then of minus delta."""
    descriptor, _, layout = _gluon()
    example = torch.empty(0)
    return Descriptors(
        descriptor(example, [num_lines, padded_len], [padded_len, 1], [1, columns], layout)
    )
