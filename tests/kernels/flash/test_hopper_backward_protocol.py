"""Barriers and sums of the Hopper backward kernels, on a model that runs them in random orders."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import accumulate, product

import pytest
from gluon_backward_model import KEY_SUMS, BackwardMachine, Call, Pair, Rows, run_call
from gluon_numbers import backward_functions

from kernels.flash.hopper import backward_schedule, plans, schedule

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def size_of(columns: int, *, narrow: bool = False) -> int:
    """Keys of a program, and queries of a turn."""
    return 64 if columns == 256 and not narrow else 128


def random_call(rng: random.Random, *, narrow: bool = False) -> tuple[Call, list[tuple[int, int]]]:
    """A call, and the lengths of its sequences; with values narrower than keys or not."""
    columns = 256 if narrow else rng.choice((64, 128, 128, 256))
    causal = rng.random() < 0.7
    q_len, kv_len = rng.randint(1, 500), rng.randint(1, 500)
    window, prefix_len, shift, mask = 0, 0, 0, "plain"
    if rng.random() < 0.3:
        shift = rng.choice((0, rng.randint(-600, 600)))
        window, mask = rng.choice((1, 64, rng.randint(1, 600))), "window"
        if causal and rng.random() < 0.4:
            window, prefix_len, mask = 0, rng.randint(0, 600), "prefix"
    lengths = [(q_len, kv_len)]
    cu_seqlens: tuple[list[int], list[int]] | None = None
    if rng.random() < 0.3:
        lengths += [(rng.randint(0, q_len), rng.randint(0, kv_len)) for _ in range(2)]
        rng.shuffle(lengths)
        q_lens, kv_lens = zip(*lengths, strict=True)
        cu_seqlens = [0, *accumulate(q_lens)], [0, *accumulate(kv_lens)]
    group_size = rng.choice((1, 1, 2, 4))
    num_members = rng.choice([n for n in (1, 2, 4) if n <= group_size])
    num_heads = group_size * rng.choice((1, 2))
    heads = len(lengths) * num_heads // num_members
    num_key_tiles = -(-kv_len // size_of(columns, narrow=narrow))
    programs, order, order_count = heads * num_key_tiles, "none", 0
    heads_at_once = rng.randint(1, heads)
    if causal and mask == "plain":
        orders = ["none", "heads", "keys", "sections", *(("bands",) if columns <= 128 else ())]
        order = rng.choice(orders)
    if order == "heads":
        order_count = heads - rng.randrange(heads) // heads_at_once * heads_at_once
    if order == "keys":
        order_count, heads_at_once = rng.randint(1, num_key_tiles), heads
    if order == "bands" and cu_seqlens is None:
        # Queries and keys are as many as each other.
        lengths, q_len = [(kv_len, kv_len)], kv_len
        turned = rng.random() < 0.5
        order_count = -(-num_key_tiles // 2) if turned else rng.randint(1, num_key_tiles)
        number = -(-num_key_tiles // order_count)
        order = "halves" if turned and number == 2 else "bands"
        found = backward_schedule.Division(order, order_count, number)
        programs, heads_at_once = heads * found.programs(num_key_tiles), heads
    elif order == "sections" and cu_seqlens is None and num_members == 1:
        lengths, q_len = [(kv_len, kv_len)], kv_len
        order_count = rng.randint(1, num_key_tiles)
        divided = backward_schedule.Division(
            "sections", order_count, -(-num_key_tiles // order_count)
        )
        programs, heads_at_once = heads * divided.programs(num_key_tiles), heads
    elif order in ("bands", "sections"):
        order = "none"
    if cu_seqlens and order != "keys":
        slots = plans.slots(cu_seqlens[1][-1], len(lengths), size_of(columns, narrow=narrow))
        programs = num_heads // num_members * slots
    tail = rng.choice((0, 32)) if columns == 128 else 0
    if narrow or (columns == 256 and kv_len % 2):
        tail = 64
    main = 64 if tail else rng.choice((16, 32, 64)) if columns == 64 else columns
    call = Call(
        q_len=q_len,
        kv_len=kv_len,
        cu_seqlens=cu_seqlens,
        num_heads=num_heads,
        group_size=group_size,
        num_members=num_members,
        causal=causal,
        mask=mask,
        edges=(window, prefix_len, shift),
        unmasked=columns == 256 or schedule.has_unmasked_turns(causal, window or None),
        order=order,
        order_count=order_count,
        heads_at_once=heads_at_once,
        programs=programs,
        at_once=rng.randint(1, 5),
        columns=columns,
        main=128 if tail == 64 else main,
        tail=tail,
        softcap=rng.choice((0.0, 0.0, 5.0)),
        apart=columns == 128 and rng.random() < 0.4,
        rolled=columns == 128 and not tail and rng.random() < 0.4,
        narrow=narrow,
    )
    return call, lengths


def check(seed: int, edit: tuple[str, str] | None = None, *, narrow: bool = False) -> None:
    """Each pair of a head's queries and keys that a turn has is in dQ, dK and dV once."""
    rng = random.Random(seed)
    call, lengths = random_call(rng, narrow=narrow)
    machine = run_call(call, rng.randrange(1 << 30), edit)
    pairs = wanted_pairs(call, lengths)
    check_gradients(machine, call, pairs)
    check_sums(machine, call, pairs)


@dataclass(frozen=True)
class Wanted:
    """64 queries and 64 keys that a turn has."""

    query: Rows
    key: Rows
    is_masked: bool
    has_keys: bool
    """Whether the first of the keys is one of the sequence's."""


def wanted_pairs(call: Call, lengths: list[tuple[int, int]]) -> list[Wanted]:
    kernel = backward_functions()
    edges, constants = kernel.Edges(*call.edges), (call.causal, call.mask)
    wanted = []
    size = size_of(call.columns, narrow=call.narrow)
    parts = range(0, size, 64)
    starts = call.cu_seqlens or ([0], [0])
    for number, (q_len, kv_len) in enumerate(lengths):
        for tile in range(-(-kv_len // size)):
            own = kernel.turns_of_keys(tile, q_len, kv_len, edges, False, size, *constants)
            for turn in range(own.first, own.end):
                whole = own.first + own.num_masked <= turn < own.unmasked_end
                for head, i, j in product(range(call.num_heads), parts, parts):
                    query, key = size * turn + i, size * tile + j
                    wanted.append(
                        Wanted(
                            query=(head, starts[0][number] + query),
                            key=(head // call.group_size, starts[1][number] + key),
                            is_masked=not (whole and call.unmasked),
                            has_keys=key < kv_len,
                        )
                    )
    return wanted


def check_gradients(machine: BackwardMachine, call: Call, wanted: list[Wanted]) -> None:
    """dK and dV of all keys, whose queries see some of them or not."""
    by_key: dict[Rows, dict[Rows, bool]] = defaultdict(dict)
    for pair in wanted:
        if pair.has_keys:
            by_key[pair.key][pair.query] = pair.is_masked
    columns = {0, 128} if call.columns == 256 else {0, 64} if call.tail else {0}
    places = {"dk": columns, "dv": {0} if call.narrow else columns}
    stored = {(head, first) for _, head, first, _ in machine.gradients}
    assert by_key.keys() <= stored
    assert machine.gradients.keys() == {
        (kind, *key, column) for key, kind in product(stored, places) for column in places[kind]
    }
    for (kind, head, first, _), pairs in machine.gradients.items():
        assert {pair.key for pair in pairs} <= {(head, first)}
        assert len({pair.query for pair in pairs}) == len(pairs)
        queries = by_key[head, first]
        assert {pair.query for pair in pairs} == queries.keys()
        if kind == "dv":
            assert all(pair.is_masked == queries[pair.query] for pair in pairs)


def check_sums(machine: BackwardMachine, call: Call, wanted: list[Wanted]) -> None:
    """dQ has each pair once for each 64 columns, and programs add in the order of their keys."""
    parts, used = call.columns // 64, -(-(call.main + call.tail) // 64)
    got: list[tuple[int, Pair]] = []
    for place, sums in machine.added.items():
        if place >= KEY_SUMS:
            continue
        part = place // 4096 % parts
        assert {one.column for one in sums} == {part}
        keys = [one.pairs[0].key for one in sums]
        assert keys in (sorted(keys), sorted(keys, reverse=True))
        got += [(part, pair) for one in sums for pair in one.pairs]
        assert len({pair.query for one in sums for pair in one.pairs}) == 1
    assert len(got) == len(set(got))
    assert {(part, pair.query, pair.key) for part, pair in got} == {
        (part, pair.query, pair.key) for part, pair in product(range(used), wanted)
    }


def test_programs() -> None:
    for seed in range(40):
        check(seed)


@pytest.mark.parametrize("order", ["bands", "halves", "sections"])
def test_packed_batches_are_not_divided(order: str) -> None:
    """Their programs would wait without end."""
    calls = (random_call(random.Random(seed))[0] for seed in range(100))
    call = next(
        call
        for call in calls
        if call.cu_seqlens and call.columns == 128 and call.causal and call.mask == "plain"
    )
    with pytest.raises(AssertionError) as raised:
        run_call(replace(call, order=order, order_count=1), 0)
    assert type(raised.value) is AssertionError, "not of a program that waits"


NARROW_SEEDS = (*range(12), 37, 73)
"""With sections at the end."""


def test_values_narrower_than_keys() -> None:
    for seed in NARROW_SEEDS:
        check(seed, narrow=True)


@pytest.mark.parametrize(
    "edit",
    [
        ("mbarrier.wait(shared.kv_ready, 0)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(0), 0)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(next_slot), phase, pred=now.more)", "pass"),
        ("mbarrier.wait(shared.q_free.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.do_ready.index(half), parity)", "pass"),
        ("mbarrier.wait(shared.do_free.index(half), parity)", "pass"),
        ("mbarrier.wait(shared.ds_ready, last, pred=now.has_dq)", "pass"),
        ("mbarrier.wait(shared.ds_ready, 1)", "pass"),
        ("mbarrier.wait(shared.opened, last, pred=now.has_dq)", "pass"),
        ("mbarrier.wait(shared.opened, 1)", "pass"),
        ("mbarrier.wait(shared.opened, 0, pred=sharing.adds | sharing.ends)", "pass"),
        ("if half == CONSUMER:", "if half == 0:"),
        ("first_query=turn * PROGRAM_ROWS + half * ROWS", "first_query=turn * PROGRAM_ROWS"),
        ("first_key=turns.first_key + CONSUMER * ROWS", "first_key=turns.first_key"),
        ('DIVIDED: gl.constexpr = ORDER == "sections"', "DIVIDED = False"),
        ('MASKED_LAST: gl.constexpr = ORDER == "heads" or ORDER == "keys"', "MASKED_LAST = False"),
        ("fence_async_shared()", "pass"),
        ("old_ds = 2 - new_ds", "old_ds = new_ds"),
        ("dq = warpgroup_mma_wait(2, deps=[dq])", "dq = warpgroup_mma_wait(3, deps=[dq])"),
        ("third = warpgroup_mma_wait(0, deps=[third])", "pass"),
        ("s = warpgroup_mma_wait(0, deps=[next_s])", "s = next_s"),
        ("warpgroup_mma_wait(0, deps=[dp, dv, a])", "warpgroup_mma_wait(1, deps=[dp, dv, a])"),
        (
            "warpgroup_mma_wait(2, deps=[dk, dk_tail, ds])",
            "warpgroup_mma_wait(3, deps=[dk, dk_tail, ds])",
        ),
        ("index = 2 * number + panel if panel < 2 else", "index = 3 * number + panel if True else"),
        ("me - CONSUMER + 2 * CONSUMERS, 1)", "me - CONSUMER + 1, 2)"),
        ("OF_TAIL: gl.constexpr = OF_DK + ROWS * PAIR", "OF_TAIL = OF_DK + ROWS * BLOCK_D"),
        ("BLOCK_D + BLOCK_V,", "BLOCK_D,"),
        ("OF_DV, 0, VALUE_DIM", "OF_DV, 0, HEAD_DIM"),
    ],
    ids=lambda edit: edit[0][:60],
)  # fmt: skip
def test_notices_with_narrower_values(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in (*NARROW_SEEDS, *range(12, 100)):
            check(seed, edit, narrow=True)

    with pytest.raises(AssertionError):
        check_many()


def is_wide(seed: int) -> bool:
    return random_call(random.Random(seed))[0].columns == 256


@pytest.mark.parametrize(
    "edit",
    [
        ("mbarrier.wait(shared.q_ready.index(0), 0)", "pass"),
        ("mbarrier.wait(shared.do_ready.index(0), 0)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(next_slot), next_phase, pred=now.more)", "pass"),
        ("mbarrier.wait(shared.do_ready.index(next_slot), next_phase, pred=now.more)", "pass"),
        ("more=(member + 1 < heads.num_members) | (step + 1 < turns.end)", "more=True"),
        ("warpgroup_mma_wait(EACH, deps=[dk, dv, p])", "warpgroup_mma_wait(2, deps=[dk, dv, p])"),
        ("warpgroup_mma_wait(EACH, deps=[dk, dv, ds])", "warpgroup_mma_wait(2, deps=[dk, dv, ds])"),
        # Of 64 columns in the second half.
        ("EACH: gl.constexpr = 2 if TAIL > 0 else 1", "EACH = 3 if TAIL > 0 else 1"),
        ("wait(3 if COLUMNS == 128 else 2, deps=[dq])", "wait(3, deps=[dq])"),
        ("product = warpgroup_mma_wait(0, deps=[product])", "pass"),
        ("product = warpgroup_mma_wait(0, deps=[first])", "product = first"),
        (
            "next_dq = warpgroup_mma_wait(0, deps=[next_dq])",
            "next_dq = warpgroup_mma_wait(1, deps=[next_dq])",
        ),
        (
            "next_dq = warpgroup_mma_wait(1, deps=[next_dq])",
            "next_dq = warpgroup_mma_wait(2, deps=[next_dq])",
        ),
    ],
    ids=lambda edit: edit[0][:60],
)  # fmt: skip
def test_notices_above_128_columns(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in filter(is_wide, range(400)):
            check(seed, edit)

    with pytest.raises(AssertionError):
        check_many()


def in_sections(seed: int, columns: int) -> bool:
    """Whether the call of a seed has several sections, with so many columns at least."""
    call, _ = random_call(random.Random(seed))
    num_key_tiles = -(-call.kv_len // size_of(call.columns, narrow=call.narrow))
    return call.order == "sections" and call.order_count < num_key_tiles and call.columns >= columns


WIDE_SECTIONS = [seed for seed in range(1200) if in_sections(seed, 256)]


def test_turns_of_heads_are_divided() -> None:
    seeds = [seed for seed in range(400) if in_sections(seed, 64)] + WIDE_SECTIONS
    assert len(seeds) >= 15
    assert len(WIDE_SECTIONS) >= 5
    for seed in seeds:
        check(seed)


@pytest.mark.parametrize(
    "edit",
    [
        ("turns = in_section(turns, program.part, order_count)", "pass"),
        ("num_parts = gl.cdiv(turns.end - turns.first, order_count)", "pass"),
        ('DIVIDED: gl.constexpr = ORDER == "sections"', "DIVIDED = False"),
        (
            "OF_DV, FIRST_COLUMN, HEAD_DIM, SHARED, False, DIVIDED)",
            "OF_DV, FIRST_COLUMN, HEAD_DIM, SHARED, False, False)",
        ),
    ],
    ids=lambda edit: edit[0][:60],
)  # fmt: skip
def test_notices_in_sections(edit: tuple[str, str]) -> None:
    def check_all() -> None:
        for seed in WIDE_SECTIONS:
            check(seed, edit)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.parametrize(
    "edit",
    [
        ("mbarrier.wait(shared.kv_ready, 0)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.q_ready.index(next_slot), next_phase, pred=now.more)", "pass"),
        ("mbarrier.wait(shared.do_ready.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.free.index(slot), phase)", "pass"),
        ("mbarrier.wait(shared.ds_ready, parity ^ 1, pred=now.has_dq)", "pass"),
        ("mbarrier.wait(shared.ds_ready, parity ^ 1)", "pass"),
        ("fence_async_shared()", "pass"),
        ("mbarrier.wait(shared.p_ready, parity)", "pass"),
        ("mbarrier.wait(shared.ds_ready, parity)", "pass"),
        ("mbarrier.wait(shared.done.index(new), phase ^ 1)", "pass"),
        ("new_ds = 4 * opaque(parity)", "new_ds = 0"),
        ("views.do_tiles.index(slot), dp, True", "views.do_tiles.index(slot), zeros, False"),
        (
            "program.key_tile * PROGRAM_ROWS >= seq.kv_len",
            "(program.key_tile + 1) * PROGRAM_ROWS > seq.kv_len",
        ),
        ("while gl.load(count, volatile=True) < before:", "while False:"),
        ("mbarrier.wait(shared.done.index((part + 1) & 1), ((part + 3) >> 1) & 1)", "pass"),
        ("mbarrier.wait(shared.closed.index(part & 1), ((part + 2) >> 1) & 1)", "pass"),
        ("mbarrier.wait(shared.done.index(part & 1), (part >> 1) & 1)", "pass"),
        ("mbarrier.wait(shared.opened, opened, pred=now.has_dq)", "pass"),
        (
            "warpgroup_mma_wait(1, deps=[dk, dv, ds, a])",
            "warpgroup_mma_wait(2, deps=[dk, dv, ds, a])",
        ),
        ("WHOLE: gl.constexpr = MAIN if MAIN < ROWS else ROWS", "WHOLE = ROWS"),
        ("columns(tile, 0, MAIN)", "columns(tile, 0, ROWS)"),
        ("columns(a, 0, MAIN)", "columns(a, 0, ROWS)"),
        ("k = columns(k.index(CONSUMER), 0, MAIN)", "k = columns(k.index(CONSUMER), 0, ROWS)"),
    ],
    ids=lambda edit: edit[0][:60],
)
def test_notices(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in range(200):
            check(seed, edit)

    with pytest.raises(AssertionError):
        check_many()
