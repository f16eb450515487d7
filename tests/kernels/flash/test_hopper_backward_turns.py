"""Masks in the Hopper backward kernels: who visits which turn, in which order, and the gradients.

The kernels' arithmetic runs on Python's integers and PyTorch's tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate, product
from types import SimpleNamespace

import pytest
import torch
from gluon_model import Place
from gluon_numbers import backward_functions
from torch import Tensor

from kernels.flash.hopper import plans
from kernels.flash.hopper.backward_schedule import Division
from kernels.flash.hopper.schedule import PROGRAM_ROWS, has_unmasked_turns
from kernels.problem import Mask

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

ROWS = 64


def kind_of(mask: Mask) -> str:
    """The kernel's constant MASK."""
    if mask.window is not None:
        return "window"
    return "plain" if mask.is_plain else "prefix"


def is_seen(mask: Mask, position: int, key: int) -> bool:
    """Whether a query that stands at ``position`` sees a key, by the definition of the masks."""
    if key < mask.prefix_len:
        return True
    if mask.causal and key > position:
        return False
    return mask.window is None or abs(position - key) < mask.window


def masks(longest: int) -> Iterator[Mask]:
    """All masks whose numbers make a difference at lengths up to this one."""
    shifts = range(-longest - 1, longest + 2)
    yield Mask(causal=False)
    for prefix_len, shift in product(range(longest + 2), shifts):
        yield Mask(causal=True, prefix_len=prefix_len, shift=shift)
    for causal, window, shift in product((False, True), range(1, longest + 2), shifts):
        yield Mask(causal=causal, window=window, shift=shift)


def check_turns(
    kernel: SimpleNamespace, mask: Mask, q_len: int, kv_len: int, size: int, is_turned: bool
) -> None:
    """One head, with one tile of keys too many, as shorter sequences of a packed batch have."""
    edges = kernel.Edges(mask.window or 0, mask.prefix_len, mask.shift)
    constants = size, mask.causal, kind_of(mask)
    num_tiles, num_turns = -(-kv_len // size), -(-q_len // size)
    offset = kv_len - q_len + mask.shift
    programs_of = defaultdict(list)
    # In the order in which programs start.
    tiles = range(num_tiles + 1)
    for tile in tiles if is_turned else reversed(tiles):
        own = kernel.turns_of_keys(tile, q_len, kv_len, edges, is_turned, *constants)
        mask_end = own.first if is_turned else own.first + own.num_masked
        assert own.first <= mask_end <= own.unmasked_end <= own.end
        assert not is_turned or own.unmasked_end == own.end - own.num_masked
        steps = range(own.first, own.end)
        turns = [kernel.turn_of(step) for step in steps]
        assert turns == sorted(turns, reverse=is_turned)
        assert set(turns) <= set(range(num_turns))
        plain = {kernel.turn_of(step) for step in range(mask_end, own.unmasked_end)}
        keys = range(tile * size, tile * size + size)
        for turn in range(num_turns):
            queries = range(turn * size, turn * size + size)
            pairs = [is_seen(mask, query + offset, key) for query in queries for key in keys]
            visits = turns.count(turn)
            assert visits == (any(pairs) and tile < num_tiles)
            if visits:
                programs_of[turn].append(own)
                assert (turn in plain) == (all(pairs) and keys[-1] < kv_len)
    for turn in range(num_turns):
        orders = [kernel.programs_before(turn, own, *constants) for own in programs_of[turn]]
        assert orders == list(range(len(orders)))
        numbers = mask.window or 0, mask.prefix_len, mask.shift
        reached = kernel.is_reached(turn, q_len, kv_len, *numbers, *constants)
        assert reached == bool(orders)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 127, 128, 129, 253, 254, 255, 256, 600])
def test_only_long_windows_have_turns_without_a_mask(causal: bool, window: int) -> None:
    kernel = backward_functions(None)
    edges = kernel.Edges(window, 0, 0)
    # With 127 keys more the first query of a turn sees the last key of a program's and no other.
    tiles = [
        kernel.turns_of_keys(tile, 1024, kv_len, edges, False, PROGRAM_ROWS, causal, "window")
        for kv_len in (1024, 1024 + 127)
        for tile in range(8)
    ]
    found = any(tile.first + tile.num_masked < tile.unmasked_end for tile in tiles)
    assert found == has_unmasked_turns(causal, window)


def check_all(longest: int, size: int, edit: tuple[str, str] | None = None) -> None:
    kernel = backward_functions(edit)
    for mask in masks(longest):
        # Heads are turned under causal masks that hide nothing else.
        for is_turned in {False, mask == Mask(causal=True)}:
            for q_len, kv_len in product(range(1, longest + 1), repeat=2):
                check_turns(kernel, mask, q_len, kv_len, size, is_turned)


@pytest.mark.parametrize(
    ("longest", "size"),
    [
        (5, 2),
        pytest.param(7, 2, marks=pytest.mark.exhaustive),
        pytest.param(9, 3, marks=pytest.mark.exhaustive),
    ],
)
def test_programs_count_those_before_them(longest: int, size: int) -> None:
    """Each program waits for as many as add before it, all of which start before it."""
    check_all(longest, size)


@pytest.mark.parametrize(
    "edit",
    [
        ("last_key - start + SIZE", "last_key - start"),
        ("gl.maximum(first - offset, 0) // SIZE", "0"),
        ("gl.where(first < edges.prefix_len", "gl.where(last_key < edges.prefix_len"),
        ("gl.where(last_key < edges.prefix_len", "gl.where(first < edges.prefix_len"),
        ("first_turn = gl.minimum(first_turn, end)", "pass"),
        ("if first + SIZE > kv_len", "if first > kv_len"),
        ("if first >= kv_len", "if False"),
        ("first + 1 - start", "first - start"),
        ("unmasked_end = gl.maximum(past, first_turn + num_masked)", "unmasked_end = past"),
        ("last_key = gl.maximum(last_key, turns.prefix_len - 1)", "pass"),
        ("last = gl.minimum(last, last_key // SIZE)", "pass"),
        ("gl.where(is_turned > 0, 1 - end,", "gl.where(is_turned > 0, -end,"),
        ("gl.where(is_turned > 0, 1 - end,", "gl.where(False, 1 - end,"),
        ("end=gl.where(is_turned > 0, 1 - first_turn, end)", "end=end"),
        ("1 - first_turn - num_masked", "1 - first_turn"),
        ("gl.where(turns.is_turned > 0, turns.key_tile, last", "gl.where(False, 0, last"),
        ("gl.abs(step)", "step"),
        ("first += shift", "pass"),
        ("last += window - 1", "pass"),
        ("reached & (first - window + 1 < tl", "reached & (first - window < tl"),
        ("last = tl.maximum(last, prefix_len - 1)", "pass"),
        ("reached = reached & (last >= 0)", "pass"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_a_wrong_edge(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_all(5, 2, edit)


@pytest.mark.parametrize("turned_as", ["none", "heads"])
@pytest.mark.parametrize(("heads_at_once", "group"), [(1, 1), (2, 1), (4, 3), (16, 7)])
def test_programs_of_later_keys_start_first(heads_at_once: int, group: int, turned_as: str) -> None:
    """Those of earlier keys in the last heads that take turns, if these are turned."""
    kernel = backward_functions()
    for num_turned in (0, group):
        started = defaultdict(list)
        turned = set()
        for program in range(7 * 5):
            head, tile, is_turned = kernel.place_in_order(
                program, 7, 0, heads_at_once, num_turned, 5, turned_as
            )
            started[head].append(tile)
            turned.add((head, is_turned))
        first_turned = 7 - num_turned if turned_as == "heads" else 7
        assert turned == {(head, head >= first_turned) for head in range(7)}
        later_first = [4, 3, 2, 1, 0]
        assert started == {
            head: later_first[::-1] if head >= first_turned else later_first for head in range(7)
        }


@pytest.mark.parametrize("heads_at_once", [1, 2, 16])
@pytest.mark.parametrize("num_turned", [1, 3, 5])
def test_first_keys_start_last_where_heads_are_turned_in_part(
    heads_at_once: int, num_turned: int
) -> None:
    """And the last ones add to sums of dQ of their own, behind those of all lines."""
    kernel = backward_functions()
    started = defaultdict(list)
    for program in range(3 * 5):
        head, tile, is_turned = kernel.place_in_order(
            program, 3, 0, heads_at_once, num_turned, 5, "keys"
        )
        started[head].append(tile)
        assert is_turned == (tile < num_turned)
        assert kernel.lines_before(is_turned, 0, 12, "keys") == (0 if is_turned else 12)
        assert kernel.lines_before(is_turned, 0, 12, "heads") == 0
    order = [*range(4, num_turned - 1, -1), *range(num_turned)]
    assert started == {0: order, 1: order, 2: order}


def check_parts(longest: int, size: int, edit: tuple[str, str] | None = None) -> None:
    """Who adds to which sum of dQ, in which order, where heads are turned in part."""
    kernel = backward_functions(edit)
    edges = kernel.Edges(0, 0, 0)
    constants = size, True, "plain"
    for q_len, kv_len in product(range(1, longest + 1), repeat=2):
        num_tiles, num_turns = -(-kv_len // size), -(-q_len // size)
        # A packed batch's longer sequences may have more tiles, of which more are turned.
        for num_turned in range(1, num_tiles + 2):
            adders = defaultdict(list)
            for tile in [*range(num_tiles - 1, num_turned - 1, -1), *range(num_turned)]:
                is_turned = int(tile < num_turned)
                own = kernel.turns_of_keys(tile, q_len, kv_len, edges, is_turned, *constants)
                for step in range(own.first, own.end):
                    turn = kernel.turn_of(step)
                    before = kernel.programs_before(turn, own, *constants)
                    adders[turn, is_turned].append(before)
            for turn in range(num_turns):
                orders = [adders[turn, is_turned] for is_turned in (1, 0)]
                assert all(order == list(range(len(order))) for order in orders)
                first = kernel.is_reached(turn, q_len, kv_len, 0, 0, 0, *constants)
                later = kernel.is_reached_by_later(turn, q_len, kv_len, num_turned, size)
                assert [bool(order) for order in orders] == [first, later]


def test_parts_of_heads_add_to_sums_that_are_read() -> None:
    check_parts(9, 2)


@pytest.mark.parametrize(
    "edit",
    [
        ("return (last_key >= first) & (kv_len > first)", "return last_key >= first"),
        ("return (last_key >= first) & (kv_len > first)", "return kv_len > first"),
        ("turn * TURN + TURN - 1 + kv_len - q_len", "turn * TURN + kv_len - q_len"),
        ("gl.where(turns.is_turned > 0, turns.key_tile, last", "gl.where(False, 0, last"),
    ],
    ids=lambda edit: edit[1][:40],
)
def test_notices_a_wrong_part(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_parts(9, 2, edit)


def sharing_in_order(
    kernel: SimpleNamespace,
    head: int,
    heads: int,
    group: int,
    tile: int,
    part: int,
    num_parts: int,
    order: str,
) -> tuple[int, bool, bool]:
    """Of one program of a tile: how many add to its sums before, whether it adds, whether it ends.

    Args:
        part: the band or section of the program, of ``num_parts`` that the tile has.
    """
    sharing = kernel.sharing_of(
        0, 0, 0,
        SimpleNamespace(num_members=1, num_heads=heads, first_head=head, kv_head=head // group),
        group, tile, SimpleNamespace(batch=0, key_line_start=0), part, num_parts, 1, order,
    )  # fmt: skip
    return sharing.before, sharing.adds, sharing.ends


def assert_all_in_order(programs: list[tuple[int, bool, bool]]) -> None:
    """Each program of a tile, as they start, adds after those before; the last one ends."""
    last = len(programs) - 1
    assert programs == [(n, n < last, n == last) for n in range(last + 1)]


def check_bands(longest: int, size: int, edit: tuple[str, str] | None = None) -> None:
    """Four heads, two of which share a key head: which programs there are, and whom they wait for.

    Args:
        longest: length of a sequence, in rows.
    """
    kernel = backward_functions(edit)
    edges = kernel.Edges(0, 0, 0)
    constants = size, True, "plain"
    heads, group = 4, 2
    for length in range(1, longest + 1):
        num_tiles = -(-length // size)
        half = -(-num_tiles // 2)
        kinds = [Division("bands", n, -(-num_tiles // n)) for n in range(1, num_tiles + 1)]
        if num_tiles > 1:
            kinds.append(Division("halves", half, 2))
        for bands in kinds:
            seen, adders, sharers = defaultdict(list), defaultdict(list), defaultdict(list)
            for program in range(heads * bands.programs(num_tiles)):
                kernel.gl.program_id = lambda axis, program=program: program
                head, tile, band, is_turned = kernel.place_in_bands(
                    heads, bands.turns, num_tiles, bands.order
                )
                assert is_turned == (bands.order == "halves" and band == 1)
                assert kernel.lines_before(is_turned, band, 12, bands.order) == 12 * band
                every = kernel.turns_of_keys(tile, length, length, edges, 0, *constants)
                num_bands = -(-(every.end - every.first) // bands.turns)
                own = kernel.in_band(every, band, bands.turns, is_turned)
                assert 0 < own.end - own.first <= bands.turns
                assert own.first + own.num_masked <= own.unmasked_end == own.end
                for step in range(own.first, own.end):
                    turn = kernel.turn_of(step)
                    before = kernel.programs_before(turn, own, *constants)
                    adders[head, band, turn].append(before)
                    queries = range(turn * size, turn * size + size)
                    keys = range(tile * size, tile * size + size)
                    pairs = [key <= query for query in queries for key in keys]
                    is_masked = step < own.first + own.num_masked
                    assert is_masked == (not all(pairs) or keys[-1] >= length)
                    seen[head, tile].append(turn)
                sharing = sharing_in_order(
                    kernel, head, heads, group, tile, band, num_bands, bands.order
                )
                sharers[head // group, tile].append(sharing)
            assert seen.keys() == set(product(range(heads), range(num_tiles)))
            for (_, tile), turns in seen.items():
                assert sorted(turns) == list(range(tile, num_tiles))
            for head, band, turn in product(range(heads), range(bands.number), range(num_tiles)):
                orders = adders[head, band, turn]
                assert orders == list(range(len(orders)))
                first = bands.turns * band
                is_read = band == 0 or kernel.is_reached_by_later(turn, length, length, first, size)
                assert is_read == bool(orders)
            for programs in sharers.values():
                assert_all_in_order(programs)


def test_programs_of_bands_wait_for_those_that_start_before_them() -> None:
    check_bands(15, 2)


@pytest.mark.parametrize(
    "edit",
    [
        ("place -= num_tiles", "place -= num_key_tiles"),
        ("num_tiles -= band_turns", "pass"),
        ("key_tile = num_tiles - 1 - place", "key_tile = num_key_tiles - 1 - place"),
        ("key_tile = gl.where(is_turned > 0, place, key_tile)", "pass"),
        ("first = turns.first + band * band_turns", "first = turns.first"),
        ("gl.minimum(first + band_turns, turns.end)", "turns.end"),
        ("num_masked=gl.where(band > 0, 0, turns.num_masked)", "num_masked=turns.num_masked"),
        ("first=gl.where(is_turned > 0, 1 - end, first)", "first=first"),
        ("skipped=band * band_turns", "skipped=0"),
        ("last -= turns.skipped", "pass"),
        ("before += band * num_programs", "before += band"),
        ("num_programs *= num_bands", "pass"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_a_wrong_band(edit: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check_bands(15, 2, edit)


def check_sections(longest: int, size: int, edit: tuple[str, str] | None = None) -> None:
    """Four heads, two of which share a key head: which programs there are, and whom they wait for.

    Whoever a program waits for, at a turn's dQ or at sums of dK and dV, has started before it.

    Args:
        longest: length of a sequence, in rows.
    """
    kernel = backward_functions(edit)
    edges = kernel.Edges(0, 0, 0)
    constants = size, True, "plain"
    heads, group = 4, 2
    for length in range(1, longest + 1):
        num_tiles = -(-length // size)
        for section_turns in range(1, num_tiles + 1):
            sections = Division("sections", section_turns, -(-num_tiles // section_turns))
            num_programs = heads * sections.programs(num_tiles)
            kernel.gl.num_programs = lambda axis, number=num_programs: number
            adders, sharers, keys_of_head = defaultdict(list), defaultdict(list), defaultdict(list)
            for program in range(num_programs):
                kernel.gl.program_id = lambda axis, program=program: program
                head, tile, section, is_turned = kernel.place_in_bands(
                    heads, section_turns, num_tiles, "sections"
                )
                assert not is_turned
                assert kernel.lines_before(is_turned, section, 12, "sections") == 0
                every = kernel.turns_of_keys(tile, length, length, edges, 0, *constants)
                num_sections = -(-(every.end - every.first) // section_turns)
                own = kernel.in_section(every, section, section_turns)
                assert 0 < own.end - own.first <= section_turns
                assert own.end == num_tiles - section * section_turns
                assert own.first + own.num_masked <= own.unmasked_end == own.end
                for turn in range(own.first, own.end):
                    adders[head, turn].append(kernel.programs_before(turn, own, *constants))
                    keys_of_head[head, turn].append(tile)
                    last_key = tile * size + size - 1
                    is_masked = turn < own.first + own.num_masked
                    assert is_masked == (last_key > turn * size or last_key >= length)
                sharing = sharing_in_order(
                    kernel, head, heads, group, tile, section, num_sections, "sections"
                )
                sharers[head // group, tile].append(sharing)
            assert adders.keys() == set(product(range(heads), range(num_tiles)))
            for (head, turn), orders in adders.items():
                assert keys_of_head[head, turn] == list(range(turn, -1, -1))
                assert orders == list(range(len(orders)))
            assert sharers.keys() == set(product(range(heads // group), range(num_tiles)))
            for programs in sharers.values():
                assert_all_in_order(programs)


def test_programs_of_sections_wait_for_those_that_start_before_them() -> None:
    check_sections(15, 2)


@pytest.mark.parametrize(
    "edit",
    [
        ("head = gl.program_id(0) // programs_of_head", "pass"),
        ("place = gl.program_id(0) % programs_of_head", "pass"),
        ("num_tiles -= band_turns", "pass"),
        ("stop = turns.end - section * section_turns", "stop = turns.end"),
        ("gl.maximum(stop - section_turns, turns.first)", "turns.first"),
        ("gl.where(start > turns.first, 0, turns.num_masked)", "turns.num_masked"),
        ("before = before * num_bands + band", "before += band * num_programs"),
        ("num_programs *= num_bands", "pass"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_a_wrong_section(edit: tuple[str, str]) -> None:
    with pytest.raises((AssertionError, ZeroDivisionError)):
        check_sections(15, 2, edit)


def check_sharing(
    lengths: list[int] | None, num_members: int, edit: tuple[str, str] | None = None
) -> None:
    """Two sequences of 12 query heads on 2 key heads: who adds to the sums of dk and dv, and where.

    Args:
        lengths: of the keys of a packed batch; a dense one has 300 for each.
    """
    kernel = backward_functions(edit)
    heads, group, batch, width, size = 12, 6, 2, 8, PROGRAM_ROWS
    longest = max(lengths) if lengths else 300
    ends = list(accumulate(lengths or [], initial=0))
    rows = ends[-1] + size * batch if lengths else longest
    padded = -(-rows // size) * size
    num_tiles = -(-longest // size)
    per_sequence = heads // num_members
    grid = batch * per_sequence * num_tiles
    if lengths:
        grid = per_sequence * plans.slots(sum(lengths), batch, size)
    kernel.gl.num_programs = lambda axis: grid
    given = defaultdict(list)
    for program in range(grid):
        kernel.gl.program_id = lambda axis, program=program: program
        number, head, tile, _ = kernel.place_in_batch(
            Place(ends), batch, per_sequence, 4, 4, longest, size, "heads", lengths is not None
        )
        seq = kernel.sequence(
            Place(ends), Place(ends), number, longest, longest, lengths is not None
        )
        if tile * size >= seq.kv_len:
            # The kernels have returned.
            continue
        first_head = head * num_members
        own = kernel.sharing_of(
            0, 0, padded,
            SimpleNamespace(
                num_members=num_members,
                num_heads=heads,
                first_head=first_head,
                kv_head=first_head // group,
            ),
            group, tile * size, seq, 0, 1, 2 * width, False,
        )  # fmt: skip
        assert own.adds + own.ends == 1
        key = (number, first_head // group, tile)
        given[key].append((own.before, own.ends, own.count, own.sums))
    places = set()
    for programs in given.values():
        befores, last, counts, sums = zip(*programs, strict=True)
        assert list(befores) == list(range(group // num_members))
        assert list(last) == [False] * (len(last) - 1) + [True]
        assert len({*counts}) == len({*sums}) == 1
        # 128 keys: two counts, and dk and dv.
        taken = {("count", counts[0] + i) for i in range(2)}
        taken |= {("sum", sums[0] + i) for i in range(2 * size * width)}
        assert not places & taken
        places |= taken
    key_lines = 2 if lengths else 2 * batch
    limits = {"count": key_lines * padded // 64, "sum": key_lines * padded * 2 * width}
    assert all(0 <= place < limits[kind] for kind, place in places)
    tiles = [-(-n // size) for n in lengths or [longest] * batch]
    assert len(given) == 2 * sum(tiles)


@pytest.mark.parametrize("num_members", [1, 2, 3])
@pytest.mark.parametrize("lengths", [None, [300, 1], [1, 300], [0, 129], [256, 256]])
def test_programs_of_a_group_meet_in_order(lengths: list[int] | None, num_members: int) -> None:
    """Each adds after those that start before it, to sums of its keys and of no others."""
    check_sharing(lengths, num_members)


@pytest.mark.parametrize(
    "edit",
    [
        ("adds=before < num_programs - 1", "adds=before < num_programs"),
        ("before == num_programs - 1", "before == num_programs"),
        ("heads.first_head % group_size // heads.num_members", "heads.first_head % group_size"),
        ("seq.batch * (heads.num_heads // group_size) + heads.kv_head", "heads.kv_head"),
        ("seq.key_line_start + first_key", "first_key"),
        ("(k_start + PROGRAM_ROWS * batch) // PROGRAM_ROWS", "k_start // PROGRAM_ROWS"),
        ("row * COLUMNS", "row * (COLUMNS // 2)"),
        ("row // ROWS", "row // ROWS // 2"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_programs_that_meet_elsewhere(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for lengths in (None, [300, 1], [1, 300]):
            check_sharing(lengths, 2, edit)

    with pytest.raises(AssertionError):
        check_many()


def gradients(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor, do: Tensor, o: Tensor, lse: Tensor,
    *, scale: float, softcap: float, size: int, edit: tuple[str, str] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv by the kernels' functions, 64 by 64 scores at a time, of one head."""
    kernel = backward_functions(edit)
    q_len, kv_len = len(q), len(k)
    edges = kernel.Edges(mask.window or 0, mask.prefix_len, mask.shift)
    constants = mask.causal, kind_of(mask)
    lse = torch.where(lse == -torch.inf, torch.inf, lse * kernel.LOG2_E)
    lse = torch.nn.functional.pad(lse, (0, size), value=torch.inf)
    delta = torch.nn.functional.pad((o * do).sum(1), (0, size))
    q, do = (torch.nn.functional.pad(x, (0, 0, 0, size)) for x in (q, do))
    # Behind the keys of a packed sequence there are those of the next one.
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, size), value=1.0) for x in (k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for tile in reversed(range(-(-kv_len // size))):
        own = kernel.turns_of_keys(tile, q_len, kv_len, edges, False, size, *constants)
        for turn in range(own.first, own.end):
            is_masked = not own.first + own.num_masked <= turn < own.unmasked_end
            for row, key in product(range(0, size, ROWS), repeat=2):
                queries = slice(turn * size + row, turn * size + row + ROWS)
                keys = slice(tile * size + key, tile * size + key + ROWS)
                p = kernel.probabilities(
                    k[keys] @ q[queries].T, lse[queries], keys.start, queries.start, own, kv_len,
                    scale * kernel.LOG2_E, *constants, softcap, is_masked,
                )  # fmt: skip
                dp = v[keys] @ do[queries].T
                ds = p * (dp - delta[queries])
                if softcap:
                    ds = ds * kernel.slope_of_cap(p, lse[queries], softcap)
                dv[keys] += p @ do[queries]
                dk[keys] += ds @ q[queries] * scale
                dq[queries] += ds.T @ k[keys] * scale
    return dq[:q_len], dk[:kv_len], dv[:kv_len]


def check_gradients(size: int, softcap: float, edit: tuple[str, str] | None = None) -> None:
    generator = torch.Generator().manual_seed(3)
    for mask, (q_len, kv_len) in product(
        (
            Mask(causal=False),
            Mask(causal=True),
            Mask(causal=True, window=1),
            Mask(causal=True, window=70, shift=-30),
            Mask(causal=False, window=150),
            Mask(causal=False, window=20, shift=90),
            Mask(causal=True, prefix_len=140),
            Mask(causal=True, prefix_len=20, shift=-200),
        ),
        ((300, 300), (100, 333), (333, 100)),
    ):
        q, k, v, do = (
            torch.randn(n, 8, generator=generator, dtype=torch.float64)
            for n in (q_len, kv_len, kv_len, q_len)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        scores = q @ k.T * 0.9
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        first = kv_len - q_len + mask.shift
        seen = [[is_seen(mask, i + first, j) for j in range(kv_len)] for i in range(q_len)]
        scores = scores.masked_fill(~torch.tensor(seen), -torch.inf)
        lse = scores.logsumexp(1)
        p = (scores - lse.detach().masked_fill(lse == -torch.inf, 0.0)[:, None]).exp()
        # The sum of a row is 1, or 0: a quotient of it has the same gradient as softmax.
        o = p @ v / p.sum(1, keepdim=True).clamp_min(1e-30)
        wanted = torch.autograd.grad(o, leaves, do)
        with torch.no_grad():
            got = gradients(
                mask, q, k, v, do, o, lse, scale=0.9, softcap=softcap, size=size, edit=edit
            )
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, msg=str((mask, q_len, kv_len)))


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("size", [64, 128])
def test_gradients(size: int, softcap: float) -> None:
    """The kernels' two sizes, at lengths that do not divide, against autograd."""
    check_gradients(size, softcap)


@pytest.mark.parametrize(
    "edit",
    [
        ("first = gl.where(key < kv_len, first, ROWS)", "pass"),
        ("p = gl.where((key < kv_len)[:, None], p, 0.0)", "pass"),
        ("first = gl.where(key < turns.prefix_len, 0, first)", "pass"),
        ("key - (first_query + turns.offset)", "key - first_query"),
        ("last = key - (first_query + turns.start)", "last = key - first_query - turns.start + 1"),
        ("setp.gt.s32", "setp.ge.s32"),
        ("setp.lt.s32", "setp.le.s32"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_a_wrong_mask(edit: tuple[str, str]) -> None:
    with pytest.raises(AssertionError):
        check_gradients(128, 0.0, edit)


def test_slope_where_there_is_no_probability() -> None:
    """Keys out of sight, and queries that see none, whose lse is plus infinity: it is finite."""
    kernel = backward_functions()
    p = torch.tensor([[0.0, 0.0, 0.25, torch.nan]])
    lse = torch.tensor([3.0, torch.inf, 2.0, 0.0])
    slope = kernel.slope_of_cap(p, lse, 5.0)
    assert slope.isfinite().all()
    assert slope[0, 2] == 1.0
