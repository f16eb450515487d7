"""How large a program of the Hopper forward kernels is: its consumers, and its tiles.

A multiprocessor runs one program at a time, and each begins with set-up and first copies that
nothing hides. A program of several tiles pays that once; but fewer long programs may leave more
multiprocessors idle at the end. Three consumers keep a multiprocessor busier than two, but their
tiles of 192 queries fit short sequences less well. Of small programs, three or four run on a
multiprocessor beside each other, and hide each other's beginnings; but each reads all keys for 64
queries alone. So the schedules are simulated as the hardware runs them, each program in order on
the first multiprocessor that has room (list scheduling), with a cost for each program, each query
tile, and each key tile that one visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

ROWS = 64
"""Queries of a consumer."""

KEY_TILE_ROWS = 128
"""Keys of a key tile."""


class ProgramSize(NamedTuple):
    """Warpgroups that compute, and query tiles, of 64 queries for each of these, one by one.

    One consumer stands for a program of :mod:`kernels.flash.hopper.forward_small`.
    """

    consumers: int
    tiles: int
    key_tile: int = KEY_TILE_ROWS
    """Keys of a key tile."""

    @property
    def is_small(self) -> bool:
        return self.consumers == 1

    @property
    def name(self) -> str:
        """Consumers x query tiles, or of a small program k and the keys of a key tile."""
        return f"k{self.key_tile}" if self.is_small else f"{self.consumers}x{self.tiles}"


TILES = (1, 2, 4)
"""Query tiles of a program; of 8 and 16 none was more than 1% faster than the best of these."""

RESIDENTS = {(64, 64): 4, (64, 128): 3, (128, 64): 3}
"""Small programs that a multiprocessor has registers and shared memory for, by padded head dim and
keys of a key tile."""

MARGIN = 0.03
"""The next size is taken if it is predicted to save this share of the time."""

MARGIN_OF_THREE = 0.02
"""Likewise, of three consumers with one tile: of eight long calls on an H200 they took 0.97 to 1.01
of the share of 2x1's time that was predicted (docs/kernels.md)."""

MAX_SIMULATED = 4096
"""Query tiles of all heads beyond which the time is taken from the mean load.

A simulation of as many programs takes 1 ms, of small ones 3 ms, once for each size and problem."""


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


@dataclass(kw_only=True, slots=True, frozen=True)
class SmallCosts:
    """Microseconds of a small program while its multiprocessor has no room for one more."""

    launch: float
    """Once for the kernel."""
    program: float
    key_tile: float
    speedup: float
    """By which a program beside fewer others is faster, at most."""


# Fitted on an H200 to 23 times of 16 to 96 heads of 512 to 16,384 tokens with a causal mask, as
# ratios to the times that COSTS predicts of programs of one tile of 128 queries: within 10%, in the
# median 2%. In windows only of 128 and 1,024 keys, as ratios to programs of four tiles; how much
# faster few small programs are there is taken from plain masks, and for five calls that were
# measured later it chose the best (benchmarks.program_size; docs/kernels.md).
SMALL_COSTS = {
    (64, 64): SmallCosts(launch=1.4, program=3.0, key_tile=1.06, speedup=1.74),
    (64, 128): SmallCosts(launch=2.8, program=2.8, key_tile=1.46, speedup=1.9),
    (128, 64): SmallCosts(launch=1.5, program=0.8, key_tile=1.35, speedup=1.45),
}
"""Costs by padded head dim and keys of a key tile."""

UNMASKED = 0.95
"""Share of their predicted time that small programs take without a mask: 0.94 in the median of
twelve times at 64, each as a ratio to 2x1's, and 0.98 of four at 128. With 0.95 the choice was
within 2% of the best for all of six calls at 64, within 5% for four at 128 (docs/kernels.md)."""

PACKED = {64: 1.0, 128: 1.05}
"""By padded head dim, share of their predicted time that small programs take in packed batches, all
sequences taken to be the longest. Of six batches each they took 0.86 to 1.01 of it at 64 and 0.96
to 1.13 at 128, as ratios to 2x1's. The choice was within 3% of the best for thirteen of fourteen;
with forty sequences of 300 tokens beside one of 8,192 it took 1.15 of it (docs/kernels.md)."""

SMALL_COSTS_IN_WINDOWS = {
    (64, 64): SmallCosts(launch=1.5, program=5.6, key_tile=1.19, speedup=1.74),
    (64, 128): SmallCosts(launch=1.5, program=5.1, key_tile=1.71, speedup=1.9),
    (128, 64): SmallCosts(launch=1.5, program=5.4, key_tile=1.28, speedup=1.45),
}


def sizes(block_d: int, window: int | None) -> list[ProgramSize]:
    """The sizes whose costs are known, for a padded head dim."""
    costs = COSTS if window is None else COSTS_IN_WINDOWS
    large = [
        ProgramSize(consumers, tiles)
        for width, consumers in costs
        if width == block_d
        for tiles in TILES
    ]
    return large + [ProgramSize(1, 1, tile) for width, tile in SMALL_COSTS if width == block_d]


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
    packed: bool = False,
    small: bool = True,
) -> ProgramSize:
    """The size of programs with which the forward pass should end sooner.

    Args:
        heads: query heads, over the whole batch.
        heads_at_once: as forward_tile.place_in_order has them.
        block_d: padded head dim, one of COSTS.
        window: keys that a query sees, as :class:`kernels.problem.Mask` has it.
        processors: of the GPU.
        packed: whether the lengths are those of the longest sequences of a packed batch.
        small: whether small programs may be taken.
    """
    best_us, best = math.inf, ProgramSize(2, 1)
    for size in sizes(block_d, window):
        if size.is_small and not small:
            continue
        us = predicted_us(
            q_len=q_len,
            kv_len=kv_len,
            heads=heads,
            heads_at_once=heads_at_once,
            block_d=block_d,
            causal=causal,
            window=window,
            processors=processors,
            packed=packed,
            size=size,
        )
        margin = MARGIN_OF_THREE if size == ProgramSize(3, 1) else MARGIN
        if us < (1 - margin) * best_us:
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
    packed: bool = False,
) -> float:
    """Microseconds of the forward pass with programs of this size."""
    if size.is_small:
        small_costs = SMALL_COSTS if window is None else SMALL_COSTS_IN_WINDOWS
        share = 1.0 if causal or window is not None else UNMASKED
        if packed:
            share *= PACKED[block_d]
        return share * _small_us(
            small_costs[block_d, size.key_tile],
            key_tile_counts(q_len, kv_len, causal, window, ROWS, size.key_tile),
            heads,
            heads_at_once,
            processors,
            RESIDENTS[block_d, size.key_tile],
        )
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


def _small_us(
    costs: SmallCosts,
    num_key_tiles: list[int],
    heads: int,
    heads_at_once: int,
    processors: int,
    residents: int,
) -> float:
    """Microseconds of the forward pass with small programs, of a head's query tiles in order."""
    # The last ones first: under a causal mask the longest.
    durations = [costs.program + costs.key_tile * count for count in reversed(num_key_tiles)]
    if len(durations) * heads > MAX_SIMULATED:
        # Where heads take turns, the end is less uneven; simulations agree with the mean to 6%.
        last = sum(durations) / len(durations) if heads_at_once > 1 else max(durations)
        share = sum(durations) * heads / (processors * residents)
        return costs.launch + share + last / costs.speedup / 2
    return costs.launch + shared_makespan(
        durations, heads, heads_at_once, processors, residents, costs.speedup
    )


def key_tile_counts(
    q_len: int,
    kv_len: int,
    causal: bool,
    window: int | None,
    rows: int,
    key_tile: int = KEY_TILE_ROWS,
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
        counts.append(max(0, -(-stop // key_tile) - start // key_tile))
    return counts


def programs(num_tiles: int, tiles: int, causal: bool) -> list[list[int]]:
    """The query tiles of a head's programs, as :func:`forward_tile.query_tile` has them."""
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
    """When the last of the programs ends, which start in order (forward_tile.place_in_order)."""
    ends = [0.0] * processors
    for first_head in range(0, heads, heads_at_once):
        width = min(heads_at_once, heads - first_head)
        for duration in durations:
            for _ in range(width):
                heapreplace(ends, ends[0] + duration)
    return max(ends)


def shared_makespan(
    durations: list[float],
    heads: int,
    heads_at_once: int,
    processors: int,
    residents: int,
    speedup: float,
) -> float:
    """As :func:`makespan`, of programs of which a processor runs several beside each other.

    Args:
        durations: of a head's programs while a processor runs ``residents`` of them. With fewer
            each is faster, as they share what a processor can do.
        speedup: how many times as fast a program is at most.
    """
    waiting = [
        duration
        for first_head in range(0, heads, heads_at_once)
        for duration in durations
        for _ in range(min(heads_at_once, heads - first_head))
    ]
    num_started = min(len(waiting), processors * residents)
    # Work, in microseconds of a full processor, that each of a processor's programs has done since
    # the start; and of each that runs, what that is when it ends.
    done = [0.0] * processors
    running = [waiting[place:num_started:processors] for place in range(processors)]
    for ends in running:
        heapify(ends)

    def time_left(place: int) -> float:
        ends = running[place]
        return (ends[0] - done[place]) / min(residents / len(ends), speedup)

    events = [(time_left(place), place) for place in range(processors) if running[place]]
    heapify(events)
    now = 0.0
    while events:
        now, place = events[0]
        ends = running[place]
        done[place] = heappop(ends)
        if num_started < len(waiting):
            heappush(ends, done[place] + waiting[num_started])
            num_started += 1
        if ends:
            heapreplace(events, (now + time_left(place), place))
        else:
            heappop(events)
    return now
