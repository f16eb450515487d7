"""How large a program of the Hopper forward kernel is: its consumers, and its tiles of queries.

A multiprocessor runs one program at a time, and each begins with set-up and first copies that
nothing hides. A program of several tiles pays that once; but fewer long programs may leave more
multiprocessors idle at the end. Three consumers keep a multiprocessor busier than two, but their
tiles of 192 queries fit short sequences less well. So the schedules are simulated as the hardware
runs them, each program in order on the first multiprocessor that is free (list scheduling), with a
cost for each program, each query tile, and each key tile that one visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

ROWS = 64
"""Queries of a consumer."""

KEY_TILE_ROWS = 128
"""Keys of a key tile."""


class ProgramSize(NamedTuple):
    """Warpgroups that compute, and query tiles, of 64 queries for each of these, one by one."""

    consumers: int
    tiles: int


TILES = (1, 2, 4)
"""Query tiles of a program; of 8 and 16 none was more than 1% faster than the best of these."""

MARGIN = 0.03
"""The next size is taken if it is predicted to save this share of the time."""

MAX_SIMULATED = 4096
"""Query tiles of all heads beyond which the time is taken from the mean load.

A simulation of as many programs takes 2 ms, once for each problem."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Costs:
    """Microseconds on one multiprocessor."""

    launch: float
    """Once for the kernel, before its first program and after its last."""
    program: float
    """Until the first keys have come, and from the last stores until the next program."""
    tile: float
    """Once for a query tile: softmax and matmul that run alone at its ends, and its stores."""
    key_tile: float
    key_tile_of_several: float
    """Of a program of several query tiles, whose consumers probably run less evenly: their loops
    have the same instructions."""


# Fitted to all sizes on an H100, 16 to 96 heads of 512 to 16,384 tokens, with and without a causal
# mask (benchmarks.program_size): they predict times within 4% to 6%, and what they choose was the
# best for 18 of 23 calls, and at most 4% slower for the others (docs/kernels.md).
COSTS = {
    (64, 2): Costs(launch=2.4, program=2.0, tile=1.6, key_tile=1.06, key_tile_of_several=1.13),
    (64, 3): Costs(launch=2.1, program=1.9, tile=3.7, key_tile=1.39, key_tile_of_several=1.37),
    (128, 2): Costs(launch=2.0, program=0.35, tile=1.0, key_tile=1.78, key_tile_of_several=1.76),
}
"""Costs by padded head dim and consumers."""

# Fitted on an H200 to 16 heads of 65,536 tokens in causal windows of 128 to 4,096 keys, where times
# of single calls were measured. Called one behind another more tiles gain less than predicted, but
# where they are taken they are within 1% of the best (docs/kernels.md).
COSTS_IN_WINDOWS = {
    (64, 2): Costs(launch=3.0, program=3.2, tile=4.3, key_tile=1.08, key_tile_of_several=1.08),
    (128, 2): Costs(launch=2.3, program=4.0, tile=3.0, key_tile=1.41, key_tile_of_several=1.41),
}
"""Costs by padded head dim and consumers, of masked tiles at both ends of what a tile sees."""


def sizes(block_d: int, window: int | None) -> list[ProgramSize]:
    """The sizes whose costs are known, for a padded head dim."""
    costs = COSTS if window is None else COSTS_IN_WINDOWS
    return [
        ProgramSize(consumers, tiles)
        for width, consumers in costs
        if width == block_d
        for tiles in TILES
    ]


@lru_cache(maxsize=1024)
def size_of_program(
    *,
    q_len: int,
    kv_len: int,
    heads: int,
    heads_at_once: int,
    block_d: int,
    causal: bool,
    window: int | None,
    processors: int,
) -> ProgramSize:
    """The size of programs with which the forward pass should end sooner.

    Args:
        heads: query heads, over the whole batch.
        heads_at_once: as forward.place_in_order has them.
        block_d: padded head dim, one of COSTS.
        window: keys that a query sees, as :class:`kernels.problem.Mask` has it.
        processors: of the GPU.
    """
    best_us, best = math.inf, ProgramSize(2, 1)
    for size in sizes(block_d, window):
        us = predicted_us(
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            heads_at_once=heads_at_once,
            block_d=block_d,
            causal=causal,
            window=window,
            processors=processors,
            size=size,
        )
        if us < (1 - MARGIN) * best_us:
            best_us, best = us, size
    return best


def predicted_us(
    *,
    q_len: int,
    kv_len: int,
    heads: int,
    heads_at_once: int,
    block_d: int,
    causal: bool,
    window: int | None,
    processors: int,
    size: ProgramSize,
) -> float:
    """Microseconds of the forward pass with programs of this size."""
    costs = (COSTS if window is None else COSTS_IN_WINDOWS)[block_d, size.consumers]
    num_key_tiles = key_tile_counts(q_len, kv_len, causal, window, size.consumers * ROWS)
    key_tile = costs.key_tile if size.tiles == 1 else costs.key_tile_of_several
    durations = [
        costs.program + sum(costs.tile + key_tile * num_key_tiles[tile] for tile in program)
        for program in programs(len(num_key_tiles), size.tiles, causal)
    ]
    # By tiles, not by programs, so that all predictions are made alike.
    if len(num_key_tiles) * heads > MAX_SIMULATED:
        # Where heads take turns, the shortest programs are left for the end.
        last = min(durations) if heads_at_once > 1 else max(durations)
        return costs.launch + sum(durations) * heads / processors + last / 2
    return costs.launch + makespan(durations, heads, heads_at_once, processors)


def key_tile_counts(
    q_len: int, kv_len: int, causal: bool, window: int | None, rows: int
) -> list[int]:
    """How many key tiles each query tile of ``rows`` queries of a head visits."""
    counts = []
    for first in range(0, q_len, rows):
        last = min(first + rows, q_len) - 1
        start, stop = 0, kv_len
        if window is not None:
            start = max(0, first + kv_len - q_len - window + 1)
            stop = min(kv_len, last + kv_len - q_len + window)
        if causal:
            stop = min(stop, last + 1 + kv_len - q_len)
        counts.append(max(0, -(-stop // KEY_TILE_ROWS) - start // KEY_TILE_ROWS))
    return counts


def programs(num_tiles: int, tiles: int, causal: bool) -> list[list[int]]:
    """The query tiles of a head's programs, as :func:`forward.query_tile` has them."""
    num_programs = -(-num_tiles // tiles)
    found = []
    for program in range(num_programs):
        if causal:
            # Every other turn goes backwards through the programs, from the longest tile on.
            places = [
                turn * num_programs + (num_programs - 1 - program if turn % 2 else program)
                for turn in range(tiles)
            ]
            mine = [num_tiles - 1 - place for place in places]
        else:
            mine = [program * tiles + turn for turn in range(tiles)]
        found.append([tile for tile in mine if 0 <= tile < num_tiles])
    return found


def makespan(durations: list[float], heads: int, heads_at_once: int, processors: int) -> float:
    """When the last of the programs ends, which start in order (forward.place_in_order)."""
    ends = [0.0] * processors
    for first_head in range(0, heads, heads_at_once):
        width = min(heads_at_once, heads - first_head)
        for duration in durations:
            for _ in range(width):
                heapreplace(ends, ends[0] + duration)
    return max(ends)
