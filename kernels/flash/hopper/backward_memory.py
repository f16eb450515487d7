"""The memory of the Hopper backward pass: slices of heads, and what predictions of it take.

Predictions are made where there is no such GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kernels.flash.call.problem import Problem
from kernels.flash.hopper import backward_schedule
from kernels.flash.hopper.schedule import PROGRAM_ROWS, backward_rows_of, columns, stored_values
from kernels.launching.prepared import MAX_PLANS
from kernels.query_gradient import QueryBlock, QueryGradientMemory

SLICE_BYTES = 1 << 31
"""Bytes of workspace beyond which a backward pass of grouped queries takes its heads in slices."""

PROCESSORS = 132
"""Of the H100 (SXM) and the H200, for predictions."""


@lru_cache(maxsize=MAX_PLANS)
def key_heads_of_slice(problem: Problem, num_queries: int, num_keys: int) -> int:
    """Key heads whose sums, with those of their query heads, stay within SLICE_BYTES.

    Args:
        num_queries: of one head, over the whole batch.
        num_keys: likewise.
    """
    return _key_heads_of_slice(
        problem.num_kv_heads,
        problem.group_size,
        _bytes_of_key_head(
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            group_size=problem.group_size,
            num_queries=num_queries,
            num_keys=num_keys if backward_schedule.num_parts(problem) > 1 else 0,
        ),
    )


def _parts(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int | None,
    causal: bool,
    window: int | None = None,
) -> int:
    """As backward_schedule.num_parts, on a GPU of PROCESSORS."""
    rows = backward_rows_of(head_dim, value_dim)
    return backward_schedule.num_parts_of(
        key_tiles=-(-kv_len // rows) * batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        fewest=backward_schedule.fewest_parts(
            num_heads // num_kv_heads, q_len, kv_len, causal, window
        ),
        processors=PROCESSORS,
    )


def _key_heads_of_slice(num_kv_heads: int, group_size: int, one_head: int) -> int:
    if group_size == 1:
        return num_kv_heads
    return min(num_kv_heads, max(1, SLICE_BYTES // one_head))


def _bytes_of_key_head(
    *, head_dim: int, value_dim: int | None, group_size: int, num_queries: int, num_keys: int
) -> int:
    """The sums of dq and two statistics of each row of a group, and the sums of dk and dv."""
    row = 4 * columns(head_dim).stored
    return group_size * num_queries * (row + 8) + num_keys * _bytes_of_key(head_dim, value_dim)


def _bytes_of_key(head_dim: int, value_dim: int | None) -> int:
    """Bytes of a key's sums of dk and dv."""
    return 4 * (columns(head_dim).stored + stored_values(head_dim, value_dim))


def backward_workspace(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int | None = None,
    causal: bool,
    window: int | None = None,
    hides_more: bool = False,
    packed: bool = False,
) -> int:
    """Bytes that the backward pass allocates, here or elsewhere, on a GPU of PROCESSORS.

    Args:
        value_dim: of :class:`Problem`.
        hides_more: whether there is a prefix or a shift.
    """
    parts = _parts(
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=causal,
        window=window,
    )
    group_size = num_heads // num_kv_heads
    one_head = _bytes_of_key_head(
        head_dim=head_dim,
        value_dim=value_dim,
        group_size=group_size,
        num_queries=batch_size * q_len,
        num_keys=batch_size * kv_len if parts > 1 else 0,
    )
    allocated = _key_heads_of_slice(num_kv_heads, group_size, one_head) * one_head
    if causal and window is None and not hides_more:
        allocated += sum(
            _bytes_of_further_sums(
                batch_size=batch_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                q_len=q_len,
                kv_len=kv_len,
                head_dim=head_dim,
                value_dim=value_dim,
                packed=packed,
            )
        )
    return allocated


def _bytes_of_further_sums(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    q_len: int,
    kv_len: int,
    head_dim: int,
    value_dim: int | None,
    packed: bool,
) -> tuple[int, int]:
    """Bytes under a causal mask, on a GPU of PROCESSORS, of the sums that one program a tile lacks.

    Returns:
        Those of dq, where heads are turned in part or tiles have bands; and those of dk and dv,
        where bands or sections alone need them.
    """
    stored = columns(head_dim).stored
    parts = _parts(
        batch_size=batch_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=True,
    )
    grid = backward_schedule.Grid(
        heads=batch_size * num_kv_heads * parts,
        num_key_tiles=-(-kv_len // backward_rows_of(head_dim, value_dim)),
        q_len=q_len,
        kv_len=kv_len,
        members=num_heads // num_kv_heads // parts,
        stored=stored,
        stored_values=stored_values(head_dim, value_dim),
        processors=PROCESSORS,
    )
    one_sum = 4 * stored * batch_size * num_heads * q_len
    divided = None if packed else backward_schedule.division_of(grid)
    if divided is not None:
        of_keys = batch_size * num_kv_heads * kv_len * _bytes_of_key(head_dim, value_dim)
        return (divided.sums - 1) * one_sum, of_keys if parts == 1 else 0
    return one_sum if backward_schedule.keys_turned_of(grid) else 0, 0


_START = 256
"""Queries at whose multiples a block may begin: their counts, two for 128 of them, are then at a
multiple of 16 bytes, as everything is that a kernel is compiled for."""

_STOP = PROGRAM_ROWS
"""Queries at whose multiples a block may end before the last query: the kernels add to whole
turns, and rows behind a block's last one would get what is left of them there."""


def first_query(block: QueryBlock) -> int | None:
    """The query from which the kernels compute a block; None if they cannot add it to sums.

    Queries before a block's first one can be taken along if they see none of its keys.
    """
    start = block.start // _START * _START
    if start == block.start:
        return start
    sees_nothing_before = block.spec.causal and block.num_keys <= block.stop - block.start
    return start if sees_nothing_before else None


def are_whole_turns(blocks: Sequence[QueryBlock], num_queries: int) -> bool:
    """Whether the first block writes all sums, and the others add to whole turns of them."""
    first = blocks[0]
    sees_all = not first.spec.causal or first.num_keys >= first.stop
    if (first.start, first.stop) != (0, num_queries) or not sees_all:
        return False
    return all(
        block.spec.mask.is_plain
        and first_query(block) is not None
        and (block.stop % _STOP == 0 or block.stop == num_queries)
        and block.spec.scale == first.spec.scale
        for block in blocks
    )


def query_gradient_memory(
    *,
    batch_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    blocks: Sequence[QueryBlock],
) -> QueryGradientMemory | None:
    """Bytes of sums that go on from block to block, on a GPU of PROCESSORS; None if they cannot.

    Args:
        value_dim: of :class:`Problem`.
    """
    num_queries = blocks[0].stop
    if not are_whole_turns(blocks, num_queries):
        return None
    group_size = num_heads // num_kv_heads
    of_blocks = []
    for block in blocks:
        parts = _parts(
            batch_size=batch_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_len=block.stop - block.start,
            kv_len=block.num_keys,
            head_dim=head_dim,
            value_dim=value_dim,
            causal=block.spec.causal,
        )
        num_keys = batch_size * block.num_keys if parts > 1 else 0
        of_keys = num_keys * _bytes_of_key(head_dim, value_dim)
        of_queries = _bytes_of_key_head(
            head_dim=head_dim,
            value_dim=value_dim,
            group_size=group_size,
            num_queries=batch_size * (block.stop - block.start),
            num_keys=0,
        )
        if _key_heads_of_slice(num_kv_heads, group_size, of_queries + of_keys) < num_kv_heads:
            return None
        of_blocks.append(float(num_kv_heads * of_keys))
    kept = num_kv_heads * _bytes_of_key_head(
        head_dim=head_dim,
        value_dim=value_dim,
        group_size=group_size,
        num_queries=batch_size * num_queries,
        num_keys=0,
    )
    if blocks[0].spec.causal:
        of_queries, of_keys = _bytes_of_further_sums(
            batch_size=batch_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_len=num_queries,
            kv_len=blocks[0].num_keys,
            head_dim=head_dim,
            value_dim=value_dim,
            packed=False,
        )
        kept += of_queries
        of_blocks[0] += of_keys
    return QueryGradientMemory(float(kept), tuple(of_blocks))
