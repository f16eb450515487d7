"""How full the order of the Hopper backward programs keeps a GPU, by a simulation.

Run as ``python -m benchmarks.backward_order``, on any machine: nothing is measured. Time is in
turns: what a program takes for 128 queries and its 128 keys. Programs start in the order of their
indices, each on the first processor that is free, and add to dQ of a turn one after another: the
next one can once it has been told, a part of a turn later. Of each shape a row gives the time of
the last program over that of evenly divided work,

    last first   the last keys first: the shortest programs, each a turn behind the one before
    turned       the last heads by the first keys, the longest programs first, each from its last
                 queries to its first, if these heads fill the GPU
    in part      where that is all heads, each in its first keys, after the programs of the others,
                 and with sums of their own
    divided      where all programs would start at once, the turns of each tile of keys divided
                 among programs, with sums of their own (backward_schedule.bands_of)
    sections     where the queries of a head do not fit the L2 cache, the turns of each head divided
                 (backward_schedule.sections_of)

so that in the second order a GPU empties on short programs, and in the third one, besides, fewer
programs wait for each other. The fourth one leaves less of a GPU idle. The last one is for memory:
with --cache-mib a row gives instead the share of turns that do not find q, do and dQ of their
queries in a cache of this size, which keeps what was used last. docs/kernels.md holds them against
what was measured.
"""

from __future__ import annotations

import argparse
import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.flash.hopper.backward_schedule import (
    FEWEST_KEYS_TURNED,
    Division,
    Grid,
    bands_of,
    division_of,
)

KEYS = 128
"""Of a program, and queries of a turn."""
PROCESSORS = 132
"""Of an H200, one program each."""
CACHE_BYTES = 50 * 2**20
START, END = 0.3, 1.0
"""Turns that a program takes besides: until its first tiles are there, and for dQ of its last turn
and its dK and dV."""
SHARED = 0.7
"""Turns to add dK and dV to sums, or to read them, once the program before has: an assumption."""


def heads_at_once(length: int, head_dim: int) -> int:
    """As backward_schedule.heads_at_once has it under a causal mask."""
    one_head = length * head_dim * 8
    return 1 << max(0, (2 * CACHE_BYTES // (3 * one_head)).bit_length() - 1)


def heads_turned(heads: int, length: int, head_dim: int) -> int:
    """As backward_schedule.heads_turned has it."""
    group = heads_at_once(length, head_dim)
    filling = PROCESSORS // -(-length // KEYS) + 1
    turned = heads - max(0, heads - filling) // group * group
    return turned if turned >= filling else 0


def keys_turned(heads: int, length: int, head_dim: int) -> int:
    """As backward_schedule.keys_turned has it, but of any number of rounds."""
    tiles = -(-length // KEYS)
    if heads_turned(heads, length, head_dim) < heads:
        return 0
    rounds = heads * tiles / PROCESSORS
    found = max(1, int(rounds / 2 + 0.5)) * PROCESSORS // heads
    return found if found >= FEWEST_KEYS_TURNED else 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Order:
    """In which order programs start, of heads in turns of ``group``."""

    group: int
    heads_turned: int = 0
    """Of the last heads."""
    keys_turned: int = 0
    """Tiles of keys, of every head."""
    divided: Division | None = None


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """What one program does."""

    head: int
    tile: int
    """Of keys."""
    sums: int
    """To which sums of dQ it adds."""
    turns: range


def programs(heads: int, tiles: int, order: Order) -> Iterator[Program]:
    """All in the order of indices."""
    if order.divided is not None:
        by_order = in_sections if order.divided.order == "sections" else in_bands
        yield from by_order(heads, tiles, order.divided)
        return
    for first in range(0, heads, order.group):
        those = range(first, min(first + order.group, heads))
        turned = order.keys_turned or (tiles if first >= heads - order.heads_turned else 0)
        for tile in [*range(tiles - 1, turned - 1, -1), *range(turned)]:
            turns = range(tiles - 1, tile - 1, -1) if tile < turned else range(tile, tiles)
            for head in those:
                yield Program(head=head, tile=tile, sums=int(tile < turned), turns=turns)


def in_bands(heads: int, tiles: int, bands: Division) -> Iterator[Program]:
    """All where the turns of a tile are divided."""
    for band in range(bands.number):
        behind = band * bands.turns
        is_turned = bands.order == "halves" and band == 1
        those = range(tiles - behind) if is_turned else reversed(range(tiles - behind))
        for tile in those:
            turns = range(tile + behind, min(tile + behind + bands.turns, tiles))
            for head in range(heads):
                yield Program(
                    head=head, tile=tile, sums=band, turns=turns[::-1] if is_turned else turns
                )


def in_sections(heads: int, tiles: int, sections: Division) -> Iterator[Program]:
    """All where the turns of a head are divided, from the last ones on."""
    for head in range(heads):
        for stop in range(tiles, 0, -sections.turns):
            for tile in reversed(range(stop)):
                turns = range(max(tile, stop - sections.turns), stop)
                yield Program(head=head, tile=tile, sums=0, turns=turns)


@dataclass(kw_only=True, slots=True, frozen=True, order=True)
class Visit:
    """When a program has done one of its turns."""

    time: float
    head: int
    turn: int


def time_of_last(heads: int, tiles: int, order: Order, told_after: float) -> float:
    """Turns until the last program has ended, under a causal mask."""
    return simulate(heads, tiles, order, told_after)[0]


def simulate(
    heads: int, tiles: int, order: Order, told_after: float, *, keep_visits: bool = False
) -> tuple[float, list[Visit]]:
    """Turns until the last program has ended, and if wanted all visits of turns."""
    visits: list[Visit] = []
    free = [0.0] * PROCESSORS
    num_sums = order.divided.sums if order.divided else 2
    told = {(head, sums): [0.0] * tiles for head in range(heads) for sums in range(num_sums)}
    given = dict.fromkeys(((head, tile) for head in range(heads) for tile in range(tiles)), 0.0)
    for program in programs(heads, tiles, order):
        now = heapq.heappop(free) + START
        of_head = told[program.head, program.sums]
        before = None
        for turn in program.turns:
            now += 1
            if keep_visits:
                visits.append(Visit(time=now, head=program.head, turn=turn))
            # dQ of a turn is added during the turn after it.
            if before is not None:
                now = max(now, of_head[before])
                of_head[before] = now + told_after
            before = turn
        assert before is not None
        now = max(now + END / 2, of_head[before])
        of_head[before] = now + told_after
        now += END / 2
        if order.divided is not None:
            now = max(now, given[program.head, program.tile]) + SHARED
            given[program.head, program.tile] = now
        heapq.heappush(free, now)
    return max(free), visits


def share_missed(visits: list[Visit], most: int) -> float:
    """Of the visits, in order of time, those to none of the ``most`` turns that were used last."""
    kept: OrderedDict[tuple[int, int], None] = OrderedDict()
    missed = 0
    for visit in sorted(visits):
        place = visit.head, visit.turn
        missed += place not in kept
        kept[place] = None
        kept.move_to_end(place)
        if len(kept) > most:
            kept.popitem(last=False)
    return missed / len(visits)


ORDERS = ("last first", "turned", "in part", "divided", "sections")


def order_of(name: str, heads: int, length: int, head_dim: int) -> Order:
    tiles = -(-length // KEYS)
    few = name in ("in part", "divided", "sections")
    keys = keys_turned(heads, length, head_dim) if few else 0
    grid = Grid(
        heads=heads,
        num_key_tiles=tiles,
        q_len=length,
        kv_len=length,
        members=1,
        stored=head_dim,
        stored_values=head_dim,
        processors=PROCESSORS,
    )
    divide = {"divided": bands_of, "sections": division_of}.get(name)
    return Order(
        group=heads if keys else min(heads, heads_at_once(length, head_dim)),
        heads_turned=heads_turned(heads, length, head_dim) if name != "last first" else 0,
        keys_turned=keys,
        divided=divide(grid) if divide else None,
    )


def missed_of(
    heads: int, length: int, head_dim: int, told_after: float, order: str, cache_mib: int
) -> float:
    """The share of turns whose queries are not in a cache of so many MiB."""
    of_turn = KEYS * head_dim * (2 * 2 + 4)
    found = order_of(order, heads, length, head_dim)
    _, visits = simulate(heads, -(-length // KEYS), found, told_after, keep_visits=True)
    return share_missed(visits, (cache_mib << 20) // of_turn)


def over_even(heads: int, length: int, head_dim: int, told_after: float, order: str) -> float:
    """Time of the last program over that of the same turns divided evenly."""
    tiles = -(-length // KEYS)
    even = heads * tiles * (tiles + 1) / 2 / PROCESSORS
    last = time_of_last(heads, tiles, order_of(order, heads, length, head_dim), told_after)
    return last / even


SHAPES = [
    *((1, 1024), (1, 2048), (1, 4096), (1, 8192), (1, 16384), (2, 8192), (4, 4096), (8, 2048)),
    *((12, 1024), (6, 2048)),
    *((1, 24576), (1, 32768), (1, 49152), (1, 65536), (2, 16384), (4, 8192), (4, 16384)),
    *((3, 16384), (5, 8192), (8, 8192), (8, 16384), (12, 2048), (16, 4096)),
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
    parser.add_argument("--cache-mib", type=int, metavar="MIB", help="print misses, not times")
    parser.add_argument("--shape", type=int, nargs=2, action="append", metavar=("HEADS", "TOKENS"))
    arguments = parser.parse_args()
    delays = arguments.told_after
    columns = "".join(f"{f'{order} ({delay})':>17}" for delay in delays for order in ORDERS)
    print(f"heads  tokens{columns}")
    for heads, length in arguments.shape or SHAPES:
        line = f"{heads:5}{length:8}"
        for delay in delays:
            for order in ORDERS:
                call = heads, length, arguments.head_dim, delay, order
                mib = arguments.cache_mib
                line += f"{missed_of(*call, mib) if mib else over_even(*call):17.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
