"""Barriers of the Hopper forward kernels, on a model that runs its source in random orders."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from gluon_model import ProtocolError, Scores, run_program
from gluon_numbers import forward_functions

from kernels.flash.hopper import plans
from kernels.flash.hopper.program_size import key_tile_counts, programs
from kernels.problem import Mask

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def check(
    seed: int,
    edit: tuple[str, str] | None = None,
    window: int | None = None,
    *,
    small: bool = False,
    panels: int = 1,
) -> None:
    """A random problem: every program stores, for its tiles, all visible keys, right to left.

    Args:
        small: with the kernel of small programs.
        panels: of queries and keys; three where values are narrower.
    """
    rng = random.Random(seed)
    tiles, stages, causal = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 3, 4)), rng.random() < 0.7
    consumers, key_tile = rng.choice((2, 3)), 128
    if small:
        consumers, tiles, key_tile = 1, 1, rng.choice((64, 128))
    rows = 64 * consumers
    q_len, kv_len = rng.randint(1, 800), rng.randint(1, 800)
    tail = rng.choice((0, 32))
    mask = random_mask(rng, causal) if rng.random() < 0.5 else Mask(causal=causal)
    if window is not None:
        mask = Mask(causal=causal, window=window)
    cu_seqlens, lengths = None, [(q_len, kv_len)]
    if rng.random() < 0.3:
        lengths += [(rng.randint(0, q_len), rng.randint(0, kv_len)) for _ in range(2)]
        rng.shuffle(lengths)
        cu_seqlens = (
            [0, *accumulate(q for q, _ in lengths)],
            [0, *accumulate(k for _, k in lengths)],
        )
    num_programs = len(programs(-(-q_len // rows), tiles, causal))
    if cu_seqlens:
        num_programs = plans.slots(cu_seqlens[0][-1], len(lengths), rows * tiles)
    results = [
        run_program(
            seed=rng.randrange(1 << 30),
            program=program,
            grid=num_programs,
            q_len=q_len,
            kv_len=kv_len,
            consumers=consumers,
            tiles=tiles,
            key_tile=key_tile,
            stages=stages,
            tail=tail,
            panels=panels,
            causal=causal,
            mask=kind_of_mask(mask),
            edges=(mask.window or 0, mask.prefix_len, mask.shift),
            cu_seqlens=cu_seqlens,
            edit=edit,
        )
        for program in range(num_programs)
    ]
    # The model cuts no tiles: where a second matmul takes the tail, both begin at the first column.
    columns = (0, 64, 128) if panels == 3 else (0, 0) if tail else (0,)
    all_scores = [s for stored in results for scores in stored.values() for s in scores]
    assert all(s.columns == columns for s in all_scores)
    # Those that store nothing lie between the sequences of a packed batch.
    in_order = iter([stored for stored in results if stored])
    for sequence, (own_q_len, own_kv_len) in enumerate(lengths):
        q_start, k_start = (x[sequence] for x in cu_seqlens) if cu_seqlens else (0, 0)
        num_tiles = -(-own_q_len // rows)
        grid = programs(num_tiles, tiles, causal) if num_tiles else []
        assert sorted(tile for program in grid for tile in program) == list(range(num_tiles))
        for mine in grid:
            stored = next(in_order, {})
            if not mask.prefix_len and not mask.shift:
                lengths_of_tiles = own_q_len, own_kv_len, causal, mask.window, rows, key_tile
                counts = key_tile_counts(*lengths_of_tiles)
                assert {row: len(scores) for row, scores in stored.items()} == {
                    row: counts[row // rows] for row in stored
                }
            lengths_and_starts = (own_q_len, own_kv_len), (q_start, k_start)
            check_program(stored, mine, mask, *lengths_and_starts, consumers, key_tile)
    assert next(in_order, None) is None


def random_mask(rng: random.Random, causal: bool) -> Mask:
    """One with a window, or with a prefix."""
    shift = rng.choice((0, rng.randint(-900, 900)))
    if causal and rng.random() < 0.3:
        return Mask(causal=True, prefix_len=rng.choice((0, rng.randint(0, 900))), shift=shift)
    return Mask(causal=causal, window=rng.choice((1, 64, rng.randint(1, 900))), shift=shift)


def kind_of_mask(mask: Mask) -> str:
    if mask.window is not None:
        return "window"
    return "plain" if mask.is_plain else "prefix"


def check_program(
    stored: dict[int, list[Scores]],
    tiles: list[int],
    mask: Mask,
    lengths: tuple[int, int],
    starts: tuple[int, int],
    consumers: int,
    key_tile: int,
) -> None:
    """Each consumer visited what its program's queries see, and masked what they see in part.

    Args:
        stored: by each consumer's first row, scores in their order.
        tiles: query tiles of the program.
        lengths: of queries and keys, which begin at ``starts`` in the tensors.
    """
    q_len, kv_len = lengths
    tile_rows = 64 * consumers
    rows = [
        row
        for tile in tiles
        for row in range(tile_rows * tile, tile_rows * (tile + 1), 64)
        if row < q_len
    ]
    assert sorted(stored) == sorted(rows)
    for row, scores in stored.items():
        first = row // tile_rows * tile_rows
        stop = min(first + tile_rows, q_len)
        ranges = [mask.keys(query, *lengths) for query in range(first, stop)]
        wanted = [
            tile for tile in range(-(-kv_len // key_tile)) if sees_any(ranges, tile, key_tile)
        ]
        assert all(s.query - starts[0] == row for s in scores)
        got = [(s.key - starts[1]) // key_tile for s in scores]
        # Queries that are shifted behind the last key may look at its tile, and see nothing.
        assert got == wanted[::-1] or (not wanted and len(got) == 1)
        for number, (tile, s) in enumerate(zip(got, scores, strict=True)):
            first_key = key_tile * tile
            whole = all(start <= first_key <= stop - key_tile for start, stop in ranges)
            # The first one is always masked.
            assert s.masked_as == (tile if number == 0 or not whole else None)


def sees_any(ranges: list[tuple[int, int]], tile: int, key_tile: int) -> bool:
    first = key_tile * tile
    return any(max(start, first) < min(stop, first + key_tile) for start, stop in ranges)


@pytest.mark.parametrize("heads_at_once", [1, 3, 4, 16])
def test_heads_take_turns(heads_at_once: int) -> None:
    """Of 10 heads of 5 programs each computes each once, in turns of ``heads_at_once`` heads."""
    kernel = forward_functions()
    places = [kernel.place_in_order(index, 10, 5, heads_at_once) for index in range(50)]
    wanted = [
        (head, program)
        for first in range(0, 10, heads_at_once)
        for program in range(5)
        for head in range(first, min(first + heads_at_once, 10))
    ]
    assert places == wanted


def check_many(
    edit: tuple[str, str],
    windows: tuple[int | None, ...] = (None,),
    *,
    small: bool = False,
    panels: int = 1,
) -> None:
    for seed in range(200):
        check(seed, edit, windows[seed % len(windows)], small=small, panels=panels)


# What is taken away below is noticed in the first ten.
@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(25, 50), marks=pytest.mark.exhaustive)], ids=str
)
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
def test_no_order_of_events_breaks_it(seeds: range, small: bool) -> None:
    for seed in seeds:
        check(seed, small=small)


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
        ("mbarrier.wait(shared.q_ready.index(place), filled // Q_SLOTS & 1)", "pass"),
        # One place for the queries of all tiles, and one too few.
        ("(STAGES + 2) // 2", "(STAGES + 1) // 2"),
        ("place * CONSUMERS + ", ""),
        # A ring that begins anew with each query tile.
        ("for turn in range(TILES):", "for turn in range(TILES):\n        slot = 0"),
        ("num_key_tiles + 1, 0)", "num_key_tiles + 1, 1)"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_what_is_taken_away(edit: tuple[str, str]) -> None:
    with pytest.raises(ProtocolError):
        check_many(edit)


def test_queries_and_keys_in_panels() -> None:
    for seed in range(25):
        check(seed, panels=3)


@pytest.mark.parametrize(
    "edit",
    [
        ("CONSUMERS * PANELS * inputs", "CONSUMERS * inputs"),
        ("PANELS * inputs.k", "inputs.k"),
        ("slot * PANELS + panel", "slot + panel"),
        ("(place * CONSUMERS + consumer) * PANELS", "(place * CONSUMERS + consumer)"),
        ("row, panel * PANEL_COLUMNS]", "row, 0]"),
        ("first = PANELS * place", "first = place"),
        ("tiles.index(first + 2)", "tiles.index(first + 1)"),
        ("gl.static_range(1, PANELS)", "gl.static_range(2, PANELS)"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_wrong_panels(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_many(edit, panels=3)


@pytest.mark.parametrize(
    "edit",
    [
        ("step + 1 < num_plain + num_left", "step + 1 < num_plain"),
        ("num_left = left - tiles.start", "num_left = 0"),
        ("left - 1 - step,", "left - step,"),
        ("gl.minimum(tiles.unmasked_start, tiles.stop - 1)", "tiles.unmasked_start"),
        ("row = seq.k_start + (tiles.stop - 1", "row = seq.k_start + (num_key_tiles - 1"),
        ("num_key_tiles = tiles.stop - tiles.start", "num_key_tiles = tiles.stop"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_wrong_tiles_of_windows(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_many(edit, windows=(40, 300))


@pytest.mark.parametrize(
    "edit",
    [
        # Waits, and phases of places.
        ("mbarrier.wait(q_ready.index(0), 0)", "pass"),
        ("mbarrier.wait(places.k_ready.index(0), 0)", "pass"),
        ("mbarrier.wait(places.k_ready.index(slot), step // STAGES & 1)", "pass"),
        ("mbarrier.wait(places.v_ready.index(0), (step - 1) & 1)", "pass"),
        ("(step - 1) & 1", "step & 1"),
        # Copies ahead of the matmuls that read their places, and of other steps.
        ("step + STAGES, step + 1, STAGES", "step + STAGES, step + 2, STAGES"),
        ("step + STAGES, step + 1, STAGES", "step + STAGES - 1, step + 1, STAGES"),
        ("1 if early == 1 else 0", "early"),
        ("STAGES, 0, STAGES, BLOCK_K", "STAGES, 2, STAGES, BLOCK_K"),
        ("o, p, s, shrink = warpgroup_mma_wait(0,", "o, p, s, shrink = warpgroup_mma_wait(1,"),
        ("s = warpgroup_mma_wait(0, deps=[s])", "pass"),
        # Keys and values that no step takes, and some that never come.
        ("keys_of < num_key_tiles", "keys_of <= num_key_tiles"),
        ("values_of <= num_key_tiles", "values_of < num_key_tiles"),
        ("tiles.stop - values_of", "tiles.stop - 1 - values_of"),
    ],
    ids=lambda edit: edit[1][:60],
)
def test_notices_what_small_programs_lack(edit: tuple[str, str]) -> None:
    with pytest.raises(ProtocolError):
        check_many(edit, small=True)


@pytest.mark.parametrize(
    "edit",
    [
        ("gl.maximum(tiles.stop - tiles.unmasked_start, 1)", "num_key_tiles"),
        ("gl.maximum(tiles.stop - tiles.unmasked_stop, 1)", "1"),
        ("tile = tiles.stop - 1 - step", "tile = tiles.stop - step"),
        ("tiles.stop - 1 - keys_of", "num_key_tiles - 1 - keys_of"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_wrong_tiles_of_small_programs(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_many(edit, windows=(40, 300), small=True)
