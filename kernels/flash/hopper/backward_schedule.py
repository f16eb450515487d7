"""The programs of the Hopper backward kernels: who shares a group of heads, and in which order.

docs/kernels.md says what each order was worth.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernels.flash.call.problem import Problem
from kernels.flash.hopper.schedule import (
    Columns,
    backward_rows,
    block_d,
    block_v,
    columns,
    mask_kind,
)

CACHE_BYTES = 50 << 20
"""Of the L2 cache of the H100, for predictions; the H200's is larger."""


def is_narrow(window: int | None, kv_len: int) -> bool:
    """Whether a window leaves nearly all backward programs as long as each other, and short.

    The fewer turns a program has, the more it pays to have the query heads of a group in one: on an
    H100 it takes 0.88 of the time of a program for each with 1,024 of 65,536 keys, 0.85 of 8,192,
    0.79 with 512 of 4,096, 0.98 with 2,048 of 65,536, but 1.03 with 4,096 of these.
    """
    return window is not None and window <= min(2048, kv_len // 8)


def num_parts(problem: Problem) -> int:
    """The number of programs that share the query heads of a group."""
    # Of a packed batch the lengths are those of the longest sequences, whose ratio says little.
    num_queries = problem.kv_len if problem.packed else problem.q_len
    return num_parts_of(
        key_tiles=-(-problem.kv_len // backward_rows(problem)) * problem.batch_size,
        num_heads=problem.num_heads,
        num_kv_heads=problem.num_kv_heads,
        fewest=fewest_parts(
            problem.group_size, num_queries, problem.kv_len, problem.causal, problem.window
        ),
        processors=torch.cuda.get_device_properties(problem.device).multi_processor_count,
    )


def fewest_parts(
    group_size: int, num_queries: int, num_keys: int, causal: bool, window: int | None
) -> int:
    """As many programs as a group has at least.

    Without a mask, or in a narrow window, programs are as long as each other, and one for a group
    saves the sums of dK and dV. Under a causal mask a program's length depends on its keys, the
    longest come last, and many short programs end more evenly than few long ones; and programs that
    take several heads in turn spread over all of them, whose queries and sums of dq do not fit the
    L2 cache. The more keys there are for each query, the more even are programs: with eight, one
    program for four heads takes 0.79 to 1.02 of the time of four on an H100, most often 0.89; with
    four and five, two take 0.88 to 0.99, most often 0.93.
    """
    if not causal or is_narrow(window, num_keys):
        return 1
    if window is None and num_keys >= 8 * num_queries:
        return 1
    if window is None and num_keys >= 4 * num_queries:
        return min(2, group_size)
    return group_size


def num_parts_of(
    *, key_tiles: int, num_heads: int, num_kv_heads: int, fewest: int, processors: int
) -> int:
    """As :func:`num_parts`: so many that the last round of programs is nearly full.

    Args:
        key_tiles: of the whole batch and one key head.
        fewest: of :func:`fewest_parts`.
    """
    group_size = num_heads // num_kv_heads
    programs = key_tiles * num_kv_heads
    divisors = [n for n in range(fewest, group_size + 1) if group_size % n == 0]
    busy = {n: n * programs / (processors * -(-n * programs // processors)) for n in divisors}
    return next((n for n in divisors if busy[n] > 0.9), max(divisors, key=lambda n: busy[n]))


def heads_at_once(problem: Problem) -> int:
    """The number of heads whose backward programs take turns (backward_order.place_in_order).

    Or of heads that a program takes one after another. Under a causal mask the programs of a head
    are spread over its queries, so that those of all of these heads, with do and the sums of dq,
    should stay in the L2 cache: two thirds of it leave room for the keys, a power of two divides
    what there is of heads. In a narrow window neighbours alone have queries in common, and one head
    after another keeps these in the cache.
    Without a mask all programs follow one another closely through the queries, eight heads at once
    up to head_dim 64, and above it, where each program adds more to dq, four: with eight it takes
    1.00 to 1.04 of the time at 128 on an H200, and 4.56 ms for 3.80 with 8 heads of 8,192 tokens
    and 256.
    """
    if is_narrow(problem.window, problem.kv_len):
        return 1
    if not problem.causal:
        return 8 if block_d(problem) <= 64 else 4
    return causal_heads_at_once(
        queries=problem.q_len * (problem.group_size // num_parts(problem)),
        row_bytes=_bytes_of_query(block_d(problem), block_v(problem)),
        cache_bytes=torch.cuda.get_device_properties(problem.device).L2_cache_size,
    )


def causal_heads_at_once(*, queries: int, row_bytes: int, cache_bytes: int) -> int:
    """As :func:`heads_at_once`, of programs that loop over so many ``queries``."""
    fitting = 2 * cache_bytes // (3 * queries * row_bytes)
    return 1 << max(0, fitting.bit_length() - 1)


def _bytes_of_query(stored: int, stored_values: int) -> int:
    """Of q and do, of 16 bits each, and of the sums of dq."""
    return (2 + 4) * stored + 2 * stored_values


FEW_ROUNDS = 8
"""Backward programs for each processor, up to which it counts how long one waits for another."""

FEWEST_KEYS_TURNED = 3
"""Tiles of keys: of heads with fewer to turn, the others are too many for their rounds. By the
simulation 8 x 12 heads of 512 tokens and 64 then take 1.04 to 1.07 of the time; measured they were
no better, either (docs/kernels.md)."""


class Grid(NamedTuple):
    """The programs of a backward pass, and what each of them goes through."""

    heads: int
    """Of the batch: of key heads, as many times as programs share one."""
    num_key_tiles: int
    """Of a head: its programs, unless their turns are divided."""
    q_len: int
    kv_len: int
    members: int
    """Query heads that a program takes one after another."""
    stored: int
    """Columns in shared memory."""
    stored_values: int
    """The same of values and do."""
    processors: int

    @property
    def rounds(self) -> float:
        """Programs for each processor."""
        return self.heads * self.num_key_tiles / self.processors

    @property
    def row_bytes(self) -> int:
        """Of a query's q and do, and of its sums of dq."""
        return _bytes_of_query(self.stored, self.stored_values)


def backward_grid(problem: Problem) -> Grid:
    """The grid of a problem on its GPU."""
    parts = num_parts(problem)
    return Grid(
        heads=problem.batch_size * problem.num_kv_heads * parts,
        num_key_tiles=-(-problem.kv_len // backward_rows(problem)),
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        members=problem.group_size // parts,
        stored=block_d(problem),
        stored_values=block_v(problem),
        processors=torch.cuda.get_device_properties(problem.device).multi_processor_count,
    )


class Division(NamedTuple):
    """How turns are divided among more backward programs than there are tiles of keys."""

    order: Literal["bands", "halves", "sections"]
    """Of the programs (backward_order.place_in_bands): what is divided are the turns of a tile of
    keys, or in sections those of a head."""
    turns: int
    """Of each part; the last one has what is left."""
    number: int
    """Parts of the longest tile, or of a head."""

    def programs(self, num_key_tiles: int) -> int:
        """The number of programs of one head."""
        return sum(num_key_tiles - part * self.turns for part in range(self.number))

    @property
    def sums(self) -> int:
        """The number of sums of dq."""
        return 1 if self.order == "sections" else self.number


def division(problem: Problem) -> Division | None:
    """How turns are divided; None if each tile of keys has one program.

    The parts need sums of dk and dv. They are for a causal mask that hides nothing else, where
    queries and keys are as many as each other, so that a tile's turns begin at the diagonal.
    """
    if not problem.causal or not problem.mask.is_plain or problem.packed:
        return None
    return division_of(backward_grid(problem))


def division_of(grid: Grid) -> Division | None:
    """As :func:`division`, of a causal mask that hides nothing else and a batch not packed."""
    return bands_of(grid) or sections_of(grid)


MOST_BANDS = 4
"""As many sums of dq are added up in the end, and no more."""

FEWEST_TILES_IN_BANDS = 8
"""A head with fewer tiles of keys has no bands. A guess: none with fewer was measured. One of eight
takes 0.77 to 0.79 of the time (docs/kernels.md); the simulation finds 0.75 for six and seven."""


def bands_of(grid: Grid) -> Division | None:
    """The bands of each tile of keys, where all programs can start at once.

    The longest program then takes twice the mean time, and most of the GPU idles in the end. So the
    turns of a tile are divided: into the shortest bands whose programs can all start at once, too;
    or if these are longer than half of the longest tile's turns, in halves, of which the second
    ones are turned: they start one after another as the short ones of the first kind end, the
    longest first, and all end at about the same time. Bands need several sums of dq, too, all of
    which are small here.
    """
    tiles = grid.num_key_tiles
    if grid.stored > 128 or grid.q_len != grid.kv_len or tiles < FEWEST_TILES_IN_BANDS:
        return None
    if grid.rounds > 1:
        return None
    half = -(-tiles // 2)
    for turns in range(-(-tiles // MOST_BANDS), half + 1):
        found = Division("bands", turns, -(-tiles // turns))
        if grid.heads * found.programs(tiles) <= grid.processors:
            return found
    found = Division("halves", half, 2)
    # Of few turns, those of the last heads start too late to end with the others. Both numbers are
    # guesses: 14 heads of 9 tiles would take 0.88 of the time by the simulation, and no such was
    # measured.
    many = grid.heads * found.programs(tiles) > 1.25 * grid.processors
    return None if many and tiles < 12 else found


MANY_ROUNDS = 12
"""Backward programs for each processor, beyond which one head's last ones are little beside all. A
guess: four heads of 65,536 tokens and 128, of 15.5 rounds, take 0.98 of the time in sections, five
0.95, and heads of fewer rounds were not measured so."""


def sections_of(grid: Grid) -> Division | None:
    """The sections of each head, where its queries do not fit the L2 cache.

    Programs of a head that start one after another, each a little longer than the one before, come
    to be as far apart as its queries go. Where these, with do and the sums of dq, do not fit the L2
    cache, each turn reads them from memory and writes the sums there: 32 heads of 65,536 tokens and
    128 ran at 554 TFLOP/s, and 16 of 16,384 at 586. So the queries of such a head are divided into
    parts of about two thirds of the cache, with which the 32 heads take 0.94 of the time on an
    H200, and 16 of 32,768 tokens and 256 take 0.87; with half as long ones, whose programs probably
    wait for each other more often, the 32 take 1.00. Up to 64 columns nothing is gained, and at 96
    only 0.04 with 32 heads and nothing with four or eight. Rounds are many, as the last head is
    not turned.
    """
    if grid.stored <= 64 or grid.q_len != grid.kv_len or grid.members > 1:
        return None
    if grid.rounds <= MANY_ROUNDS:
        return None
    # Not this GPU's cache: predictions of memory ask, too.
    number = round(1.5 * (grid.q_len * grid.row_bytes) / CACHE_BYTES)
    if number < 2:
        return None
    turns = -(-grid.num_key_tiles // number)
    return Division("sections", turns, -(-grid.num_key_tiles // turns))


def halves_apart(problem: Problem) -> bool:
    """Whether dQ of a turn is opened and closed by halves (backward_order.open_turns).

    Of values narrower than keys it always is, and not asked here (backward_narrow).
    With 65 to 128 columns the consumers add dQ of a turn's first half before that of the second. A
    program that may do so apart waits half a turn less for the one before. One head of 16,384
    tokens takes 0.96 of the time, but 16 heads take 1.02 on an H100 at its power limit.
    """
    grid = backward_grid(problem)
    return 64 < grid.stored <= 128 and grid.rounds <= FEW_ROUNDS


def halves_rolled(problem: Problem) -> bool:
    """Whether halves of a turn run the same code, of 97 to 128 columns.

    It is half as long. On an H100 it takes 0.94 to 1.03 of the time under windows and of grouped
    queries under a causal mask, mostly 0.97, and likewise where tiles have bands; on an H200 0.96
    to 0.98 where heads of many rounds are turned, and 1.00 to 1.02 if the batch is packed. Where
    heads are turned in part it takes 1.00 to 1.05, and under a full mask 1.03 to 1.06 on an H100.
    In sections nothing else was measured.
    """
    if columns(problem.head_dim) != Columns(main=128, tail=0, stored=128):
        return False
    if mask_kind(problem) == "window" or num_parts(problem) > 1:
        return True
    divided = division(problem)
    if divided is not None and divided.order == "sections":
        return True
    if halves_apart(problem):
        return keys_turned(problem) == 0
    return heads_turned(problem) > 0


def heads_turned(problem: Problem) -> int:
    """How many of the last heads start with their first keys (backward_order.place_in_order).

    Under a causal mask as many groups of :func:`heads_at_once` as fill the GPU, whose last
    programs are then short ones. None where all programs start at once, as there is no end to even
    out, and each would wait for those before it at its first turn.
    """
    if not problem.causal or not problem.mask.is_plain:
        return 0
    return heads_turned_of(backward_grid(problem), group=heads_at_once(problem))


def heads_turned_of(grid: Grid, *, group: int) -> int:
    """As :func:`heads_turned`, of heads that take turns in groups of ``group``."""
    filling = grid.processors // grid.num_key_tiles + 1
    groups_before = max(0, grid.heads - filling) // group
    turned = grid.heads - groups_before * group
    return turned if turned >= filling else 0


def keys_turned(problem: Problem) -> int:
    """How many tiles of each head's first keys are turned, if heads are turned in part.

    Heads are where :func:`heads_turned` has all of them: their programs that start at once would
    wait for each other, each until the one before has done its last turn, and those that follow
    would have to do it again. The programs of the last keys, which start first, wait for nobody;
    they end one after another, the shortest first, and so those of the first keys start one after
    another, the longest first. Each round of these makes up for a round of those: a round for each,
    and of an odd number one more or less, whatever is nearer. The two kinds need sums of their own,
    which are small where rounds are few and queries no more than keys. All heads take turns:
    programs that run at the same time are at turns near each other, whose queries need less of the
    cache than whole heads.
    """
    if not problem.causal or not problem.mask.is_plain:
        return 0
    return keys_turned_of(backward_grid(problem))


def keys_turned_of(grid: Grid) -> int:
    """As :func:`keys_turned`, of a causal mask that hides nothing else."""
    if grid.q_len > grid.kv_len or grid.rounds > FEW_ROUNDS:
        return 0
    # Not this GPU's cache: predictions of memory ask, too.
    group = causal_heads_at_once(
        queries=grid.q_len * grid.members, row_bytes=grid.row_bytes, cache_bytes=CACHE_BYTES
    )
    turned = heads_turned_of(grid, group=group)
    if turned < grid.heads:
        return 0
    # No more than fill these rounds: a few more would be another one.
    found = max(1, int(grid.rounds / 2 + 0.5)) * grid.processors // grid.heads
    return found if found >= FEWEST_KEYS_TURNED else 0
