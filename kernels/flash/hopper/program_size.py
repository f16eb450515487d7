"""How many tiles of queries a program of the Hopper forward kernel takes: one, two or four.

A multiprocessor runs one program at a time, and each begins with set-up and first copies that
nothing hides. A program of several tiles pays that once; but fewer long programs may leave more
multiprocessors idle at the end. So the schedules are simulated as the hardware runs them, each
program in order on the first multiprocessor that is free (list scheduling), with a cost for each
program, each query tile, and each key tile that one visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace

TILE_ROWS = 128
"""Queries of a query tile, and keys of a key tile."""

SIZES = (1, 2, 4)
"""Query tiles of a program; of 8 and 16 none was more than 1% faster than the best of these."""

MARGIN = 0.02
"""The next size is taken if it is predicted to save this share of the time."""

MAX_SIMULATED = 4096
"""Query tiles of all heads beyond which the time is the mean load and half of the longest program.

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


# Fitted to one and two tiles on an H200, 16 to 96 heads of 512 to 4,096 tokens, with and without a
# causal mask (benchmarks.program_size): ratios of the two within 10% of the measured ones. At 8,192
# and 16,384 tokens they hold for two and four within 3% (docs/kernels.md).
COSTS = {
    64: Costs(launch=3.0, program=1.3, tile=2.0, key_tile=1.08),
    128: Costs(launch=2.3, program=0.5, tile=1.7, key_tile=1.67),
}
"""Costs by padded head dim."""

# Fitted on an H200 to 16 heads of 65,536 tokens in causal windows of 128 to 4,096 keys, where times
# of single calls were measured. Called one behind another more tiles gain less than predicted, but
# where they are taken they are within 1% of the best (docs/kernels.md).
COSTS_IN_WINDOWS = {
    64: Costs(launch=3.0, program=3.2, tile=4.3, key_tile=1.08),
    128: Costs(launch=2.3, program=4.0, tile=3.0, key_tile=1.41),
}
"""Costs by padded head dim, of masked tiles at both ends of what a query tile sees."""


@lru_cache(maxsize=1024)
def tiles_of_program(
    *,
    q_len: int,
    kv_len: int,
    heads: int,
    block_d: int,
    causal: bool,
    window: int | None,
    processors: int,
) -> int:
    """Of SIZES: the query tiles of a program with which the forward pass should end sooner.

    Args:
        heads: query heads, over the whole batch.
        block_d: padded head dim, 64 or 128.
        window: keys that a query sees, as :class:`kernels.problem.Mask` has it.
        processors: of the GPU.
    """
    best_us, best = math.inf, 1
    for tiles in SIZES:
        us = predicted_us(
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            block_d=block_d,
            causal=causal,
            window=window,
            processors=processors,
            tiles=tiles,
        )
        if us < (1 - MARGIN) * best_us:
            best_us, best = us, tiles
    return best


def predicted_us(
    *,
    q_len: int,
    kv_len: int,
    heads: int,
    block_d: int,
    causal: bool,
    window: int | None,
    processors: int,
    tiles: int,
) -> float:
    """Microseconds of the forward pass with programs of ``tiles`` query tiles."""
    costs = (COSTS if window is None else COSTS_IN_WINDOWS)[block_d]
    num_key_tiles = key_tile_counts(q_len, kv_len, causal, window)
    durations = [
        costs.program + sum(costs.tile + costs.key_tile * num_key_tiles[tile] for tile in program)
        for program in programs(len(num_key_tiles), tiles, causal)
    ]
    # By tiles, not by programs, so that both predictions are made alike.
    if len(num_key_tiles) * heads > MAX_SIMULATED:
        return costs.launch + sum(durations) * heads / processors + max(durations) / 2
    return costs.launch + makespan(durations, heads, processors)


def key_tile_counts(q_len: int, kv_len: int, causal: bool, window: int | None) -> list[int]:
    """How many key tiles each query tile of a head visits."""
    counts = []
    for first in range(0, q_len, TILE_ROWS):
        last = min(first + TILE_ROWS, q_len) - 1
        start, stop = 0, kv_len
        if window is not None:
            start = max(0, first + kv_len - q_len - window + 1)
            stop = min(kv_len, last + kv_len - q_len + window)
        if causal:
            stop = min(stop, last + 1 + kv_len - q_len)
        counts.append(max(0, -(-stop // TILE_ROWS) - start // TILE_ROWS))
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


def makespan(durations: list[float], heads: int, processors: int) -> float:
    """When the last of the programs ends, which start in order: those of a head, head by head."""
    ends = [0.0] * processors
    for _ in range(heads):
        for duration in durations:
            heapreplace(ends, ends[0] + duration)
    return max(ends)
