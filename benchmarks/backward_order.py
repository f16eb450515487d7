"""How full the order of the Hopper backward programs keeps a GPU, by a simulation.

Run as ``python -m benchmarks.backward_order``, on any machine: nothing is measured. Time is in
turns: what a program takes for 128 queries and its 128 keys. Programs start in the order of their
indices, each on the first processor that is free, and add to dQ of a turn one after another: the
next one can once it has been told, a part of a turn later. Of each shape a row gives the time of
the last program over that of evenly divided work,

    last first   the last keys first: the shortest programs, each a turn behind the one before
    turned       the last heads by the first keys, the longest programs first, each from its last
                 queries to its first, if these heads fill the GPU

so that in the second order a GPU empties on short programs. docs/kernels.md holds both against what
was measured.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator

KEYS = 128
"""Of a program, and queries of a turn."""
PROCESSORS = 132
"""Of an H200, one program each."""
CACHE_BYTES = 50 * 2**20
START, END = 0.3, 1.0
"""Turns that a program takes besides: until its first tiles are there, and for dQ of its last turn
and its dK and dV."""


def heads_at_once(length: int, head_dim: int) -> int:
    """As :func:`kernels.flash.hopper.schedule.heads_at_once` has it under a causal mask."""
    one_head = length * head_dim * 8
    return 1 << max(0, (2 * CACHE_BYTES // (3 * one_head)).bit_length() - 1)


def heads_turned(heads: int, length: int, head_dim: int) -> int:
    """As :func:`kernels.flash.hopper.schedule.heads_turned` has it, but of any number of rounds."""
    group = heads_at_once(length, head_dim)
    filling = PROCESSORS // -(-length // KEYS) + 1
    turned = heads - max(0, heads - filling) // group * group
    return turned if turned >= filling else 0


def programs(heads: int, tiles: int, group: int, turned: int) -> Iterator[tuple[int, int, bool]]:
    """(head, tile of keys, whether its head is turned) in the order of indices."""
    for first in range(0, heads, group):
        those = range(first, min(first + group, heads))
        is_turned = first >= heads - turned
        for place in range(tiles):
            for head in those:
                yield head, place if is_turned else tiles - 1 - place, is_turned


def time_of_last(heads: int, tiles: int, group: int, told_after: float, turned: int) -> float:
    """Turns until the last program has ended, under a causal mask."""
    free = [0.0] * PROCESSORS
    told = [[0.0] * tiles for _ in range(heads)]
    for head, tile, is_turned in programs(heads, tiles, group, turned):
        now = heapq.heappop(free) + START
        of_head = told[head]
        before = None
        for turn in range(tiles - 1, tile - 1, -1) if is_turned else range(tile, tiles):
            now += 1
            # dQ of a turn is added during the turn after it.
            if before is not None:
                now = max(now, of_head[before])
                of_head[before] = now + told_after
            before = turn
        assert before is not None
        now = max(now + END / 2, of_head[before])
        of_head[before] = now + told_after
        heapq.heappush(free, now + END / 2)
    return max(free)


def over_even(heads: int, length: int, head_dim: int, told_after: float, *, turned: bool) -> float:
    """Time of the last program over that of the same turns divided evenly."""
    tiles = -(-length // KEYS)
    group = min(heads, heads_at_once(length, head_dim))
    even = heads * tiles * (tiles + 1) / 2 / PROCESSORS
    last_heads = heads_turned(heads, length, head_dim) if turned else 0
    return time_of_last(heads, tiles, group, told_after, last_heads) / even


SHAPES = [
    *((1, 32768), (1, 65536), (2, 16384), (4, 16384), (8, 8192), (8, 16384), (16, 4096)),
    *((16, 8192), (16, 16384), (16, 65536), (32, 8192), (64, 4096), (96, 1024), (96, 2048)),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.backward_order",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128)
    parser.add_argument(
        "--told-after",
        type=float,
        nargs="+",
        default=(0.6, 1.1),
        metavar="TURNS",
        help="turns from an addition to the next (0.6 1.1)",
    )
    arguments = parser.parse_args()
    delays = arguments.told_after
    columns = "".join(f"{f'last first ({x})':>19}{f'turned ({x})':>14}{'ratio':>8}" for x in delays)
    print(f"heads  tokens{columns}")
    for heads, length in SHAPES:
        line = f"{heads:5}{length:8}"
        for delay in delays:
            last_first, turned = (
                over_even(heads, length, arguments.head_dim, delay, turned=turned)
                for turned in (False, True)
            )
            line += f"{last_first:19.2f}{turned:14.2f}{turned / last_first:8.2f}"
        print(line)


if __name__ == "__main__":
    main()
