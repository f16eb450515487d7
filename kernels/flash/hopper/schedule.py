"""The tiles of the Hopper kernels: their rows, columns and stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernels.flash.call.problem import Problem

ROWS = 64
"""Rows of one consumer warpgroup, and of what each reads once."""

PANEL_COLUMNS = 64
"""Columns of 16 bits that lie together in shared memory (tiles.PANEL_COLUMNS)."""

PROGRAM_ROWS = 2 * ROWS
"""Queries, or keys, of one program: those of its two consumers."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Schedule:
    """Tiles and stages of a kernel."""

    tile: int
    """Rows of the tiles that stream by: keys, or in the backward pass queries."""
    stages: int
    """Slots of the ring they stream through."""
    resident: bool = False
    """Whether the backward pass keeps keys and values in registers."""


# By columns in shared memory. Measured on an H200: docs/kernels.md says what else was tried.
FORWARD = {
    64: Schedule(tile=128, stages=2),
    128: Schedule(tile=128, stages=2),
    # O takes half of the registers, and shared memory holds no longer tiles.
    256: Schedule(tile=64, stages=2),
}
NARROW_FORWARD = Schedule(tile=128, stages=2)
"""Of values narrower than keys: as FORWARD[128], since O has as many columns. Others were not
tried."""

NARROW_PANELS = 3
"""Panels of queries and keys, there."""
NARROW_COLUMNS = 128
"""Columns of values, there, in shared memory."""

BACKWARD = {
    64: Schedule(tile=64, stages=4, resident=True),
    # dK and dV alone take half of the registers.
    128: Schedule(tile=64, stages=2),
    # Keys of 64, not 128, and their columns halved (backward_wide).
    256: Schedule(tile=64, stages=2),
}
NARROW_BACKWARD = Schedule(tile=64, stages=3)
"""Of values narrower than keys (backward_narrow)."""


class Columns(NamedTuple):
    """How the head dim is laid out: matmuls take ``main`` and ``tail`` columns, one after another.

    Both are powers of two, as Triton's tiles are, and together at least the head dim. Shared memory
    holds ``stored`` columns, which TMA fills up with zeros: whole swizzles of 64.
    """

    main: int
    tail: int
    stored: int


_COLUMNS = (
    Columns(main=16, tail=0, stored=64),
    Columns(main=32, tail=0, stored=64),
    Columns(main=64, tail=0, stored=64),
    Columns(main=64, tail=16, stored=128),
    Columns(main=64, tail=32, stored=128),
    Columns(main=128, tail=0, stored=128),
    Columns(main=128, tail=64, stored=256),
    Columns(main=256, tail=0, stored=256),
)


def columns(head_dim: int) -> Columns:
    """The fewest columns that hold a head dim of at most 256."""
    return next(found for found in _COLUMNS if head_dim <= found.main + found.tail)


def block_d(problem: Problem) -> int:
    """Columns of a tile in shared memory."""
    return columns(problem.head_dim).stored


def block_v(problem: Problem) -> int:
    """Columns of a tile of values in shared memory."""
    return stored_values(problem.head_dim, problem.value_dim)


def stored_values(head_dim: int, value_dim: int | None) -> int:
    """As :func:`block_v`, of values of ``value_dim`` columns; None stands for as many as keys."""
    return columns(head_dim).stored if value_dim is None else NARROW_COLUMNS


def why_not_narrow(head_dim: int, value_dim: int) -> str | None:
    """None if the kernels take values of fewer columns than keys, else the reason."""
    most = NARROW_PANELS * PANEL_COLUMNS
    if 128 < head_dim <= most and value_dim <= NARROW_COLUMNS and value_dim % 8 == 0:
        return None
    return (
        f"value_dim {value_dim} of head_dim {head_dim}: must be a multiple of 8 up to "
        f"{NARROW_COLUMNS} of a head_dim above 128 and up to {most}, or equal"
    )


def backward_rows(problem: Problem) -> int:
    """Keys of a program of the backward pass, and queries of its turns."""
    return backward_rows_of(problem.head_dim, problem.value_dim)


def backward_rows_of(head_dim: int, value_dim: int | None) -> int:
    """As :func:`backward_rows`; of values as wide as keys, value_dim is None."""
    return PROGRAM_ROWS if columns(head_dim).stored <= 128 or value_dim is not None else ROWS


def mask_kind(problem: Problem) -> str:
    """The constant MASK of the kernels (:class:`tiles.Edges`)."""
    if problem.window is not None:
        return "window"
    return "plain" if problem.mask.is_plain else "prefix"


def has_unmasked_turns(causal: bool, window: int | None) -> bool:
    """Whether 128 queries, of a turn, can see all of 128 keys, of a backward program.

    If not, one loop with a mask takes the place of two, and spills less: 1.67 ms for 1.87 in a
    causal window of 128 keys, 16 heads of 65,536 tokens and 128 on an H200.
    """
    farthest = 2 * PROGRAM_ROWS - 2 if causal else PROGRAM_ROWS - 1
    return window is None or window > farthest
