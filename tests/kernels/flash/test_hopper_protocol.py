"""Barriers of the Hopper forward kernel, on a model that runs its source in random orders."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import accumulate

import pytest
from gluon_model import ProtocolError, run_program

from kernels.flash.hopper.pairing import key_tile_counts, programs

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def check(seed: int, edit: tuple[str, str] | None = None) -> None:
    """A random problem: every program stores, for its tiles, all visible keys, right to left."""
    rng = random.Random(seed)
    tiles, stages, causal = rng.choice((1, 2, 3)), rng.choice((2, 3, 4)), rng.random() < 0.7
    q_len, kv_len = rng.randint(1, 800), rng.randint(1, 800)
    tail = rng.choice((0, 32))
    cu_seqlens, lengths = None, [(q_len, kv_len)]
    if rng.random() < 0.3:
        lengths += [(rng.randint(0, q_len), rng.randint(0, kv_len)) for _ in range(2)]
        rng.shuffle(lengths)
        cu_seqlens = (
            [0, *accumulate(q for q, _ in lengths)],
            [0, *accumulate(k for _, k in lengths)],
        )
    num_tiles = -(-q_len // 128)
    for sequence, (own_q_len, own_kv_len) in enumerate(lengths):
        q_start, k_start = (x[sequence] for x in cu_seqlens) if cu_seqlens else (0, 0)
        counts = key_tile_counts(own_q_len, own_kv_len, causal)
        grid = programs(num_tiles, tiles, causal)
        assert sorted(tile for program in grid for tile in program) == list(range(num_tiles))
        for number, mine in enumerate(grid):
            stored = run_program(
                seed=rng.randrange(1 << 30),
                program=number,
                grid=len(grid),
                q_len=q_len,
                kv_len=kv_len,
                tiles=tiles,
                stages=stages,
                tail=tail,
                causal=causal,
                cu_seqlens=cu_seqlens,
                sequence=sequence,
                edit=edit,
            )
            got = {
                row: [((s.query - q_start), (s.key - k_start) // 128) for s in scores]
                for row, scores in stored.items()
            }
            assert got == dict(wanted(mine, counts, own_q_len))


def wanted(
    tiles: list[int], counts: list[int], q_len: int
) -> Iterable[tuple[int, list[tuple[int, int]]]]:
    """First row of each consumer, and the key tiles that it visits."""
    for tile in tiles:
        for row in (128 * tile, 128 * tile + 64):
            if row < q_len:
                yield row, [(row, key) for key in reversed(range(counts[tile]))]


# What is taken away below is noticed in the first ten.
@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 50), marks=pytest.mark.exhaustive)], ids=str
)
def test_no_order_of_events_breaks_it(seeds: range) -> None:
    for seed in seeds:
        check(seed)


@pytest.mark.parametrize(
    "edit",
    [
        # The last step of a query tile: keys that do not come, a slot that is not freed.
        ("elif TILES > 1:", "elif False:"),
        ("if TILES > 1:\n", "if False:\n"),
        # The first step: values that do not come.
        ("mbarrier.arrive(shared.v_ready.index(slot))", "pass"),
        # Waits.
        ("mbarrier.wait(shared.free.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.v_ready.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.k_ready.index(next_slot), phase, pred=more)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(turn), 0)", "pass"),
        # One buffer for the queries of all tiles.
        ("q_tiles.index(turn * CONSUMERS + ", "q_tiles.index("),
        # A ring that begins anew with each query tile.
        ("for turn in range(TILES):", "for turn in range(TILES):\n        slot = 0"),
        ("num_key_tiles + 1, 0)", "num_key_tiles + 1, 1)"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_what_is_taken_away(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in range(200):
            check(seed, edit)

    with pytest.raises(ProtocolError):
        check_many()
