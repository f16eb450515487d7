"""The Hopper kernels: compiled for sm_90a anywhere, run against float64 where there is one."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import backward_order
from kernels.backends import flash_triton
from kernels.flash import dispatch, operator
from kernels.flash.call.arguments import BackwardPass, FlashCall, FlashOptions, ForwardPass
from kernels.flash.call.problem import PRECISIONS, Problem, describe
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans, program_size, schedule
from kernels.flash.hopper.program_size import ProgramSize
from kernels.problem import AttentionSpec, Packing

ROOT = Path(__file__).parents[3]

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(
    not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0"
)


@pytest.mark.parametrize(
    ("head_dim", "spilled_bytes"),
    # What is spilled at head_dim 128 is used where masks are, in a few tiles of many. At 256 the
    # backward pass took a third longer while addresses of its loop were spilled, 300 bytes.
    [
        (128, 512),
        (256, 128),
        *(
            pytest.param(head_dim, spilled, marks=pytest.mark.exhaustive)
            for head_dim, spilled in ((64, 16), (96, 512), (192, 64))
        ),
    ],
)
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_compiles_without_serialised_matmuls(
    kernel: str, head_dim: int, spilled_bytes: int
) -> None:
    """In a process of its own, since this one may have Triton's interpreter."""
    pytest.importorskip("triton.experimental.gluon")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_hopper", kernel, str(head_dim)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    rows = [line for line in run.stdout.splitlines() if line.startswith(kernel)]
    # Programs of more than one query tile do not fit beside 256 columns.
    assert len(rows) == ((2 if head_dim > 128 else 4) if kernel == "forward" else 7)
    for row in rows:
        spilled = re.search(r"(\d+) bytes spill stores", row)
        assert spilled is not None
        # With turned heads what bounds the loops is spilled, and read between them.
        is_turned = "turned" in row or "in part" in row
        assert int(spilled[1]) <= (max(spilled_bytes, 48) if is_turned else spilled_bytes), row


class TestWhatItLeavesToThePlainKernels:
    def reason(self, monkeypatch: pytest.MonkeyPatch, **changes: object) -> str | None:
        """hopper.why_not as a Hopper GPU would hear it."""
        monkeypatch.setattr(hopper.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16)
        problem = replace(describe(q, q, q, causal=True), device=torch.device("cuda", 0))
        return hopper.why_not(replace(problem, **changes))  # type: ignore[arg-type]

    def test_runs_what_it_is_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.reason(monkeypatch) is None
        assert self.reason(monkeypatch, head_dim=80, packed=True) is None
        assert self.reason(monkeypatch, head_dim=256) is None

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"dtype": torch.float32}, "bfloat16 and float16"),
            ({"head_dim": 264}, "at most 256"),
            ({"head_dim": 36}, "multiple of 8"),
            ({"accumulates": True}, "accumulator"),
            ({"batch_size": 20_000}, "65535"),
            ({"device": torch.device("cpu")}, "9.0"),
        ],
    )
    def test_says_why_not(
        self, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
    ) -> None:
        reason = self.reason(monkeypatch, **changes)
        assert reason is not None
        assert words in reason
        assert "\n" not in reason

    def test_older_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hopper.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
        problem = replace(describe(q, q, q, causal=True), device=torch.device("cuda", 0))
        assert "8.0" in str(hopper.why_not(problem))

    def test_is_asked_first(self) -> None:
        assert ("auto", *dispatch.IMPLEMENTATIONS) == flash_triton.IMPLEMENTATIONS

    def test_names_of_precisions(self) -> None:
        assert PRECISIONS == flash_triton.PRECISIONS

    def test_an_unknown_one_is_refused_before_anything_runs(self) -> None:
        with pytest.raises(ValueError, match="=hoper: must be one of auto, hopper"):
            flash_triton.FlashTriton(name="flash_triton", implementation="hoper")


class TestSchedule:
    """How many programs there are of the backward pass, and in which order."""

    @pytest.fixture(autouse=True)
    def _h200(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def problem(
        self,
        heads: tuple[int, int],
        tokens: int,
        *,
        head_dim: int = 128,
        causal: bool = True,
        window: int | None = None,
    ) -> Problem:
        q, k = (
            torch.empty(1, n, tokens, head_dim, dtype=torch.bfloat16, device="meta") for n in heads
        )
        return describe(q, k, k, causal=causal, window=window)

    def test_under_a_mask_every_query_head_has_programs_of_its_own(self) -> None:
        assert schedule.num_parts(self.problem((32, 8), 8192)) == 4
        assert schedule.num_parts(self.problem((8, 8), 8192)) == 1

    def test_in_a_narrow_window_one_program_has_all_heads_of_a_group(self) -> None:
        narrow = self.problem((32, 8), 65536, window=1024)
        assert schedule.num_parts(narrow) == schedule.heads_at_once(narrow) == 1
        assert schedule.num_parts(self.problem((32, 8), 65536, window=4096)) == 4
        assert schedule.num_parts(self.problem((32, 8), 4096, window=1024)) == 4
        # Too few programs to fill the GPU.
        assert schedule.num_parts(self.problem((4, 1), 8192, window=1024)) == 2

    @pytest.mark.parametrize(
        ("times", "parts", "at_once"), [(1, 4, 16), (2, 4, 16), (4, 2, 8), (5, 2, 8), (8, 1, 4)]
    )
    def test_the_more_keys_for_each_query_the_fewer_programs(
        self, times: int, parts: int, at_once: int
    ) -> None:
        """Heads that programs take one after another share the cache's room."""
        q = torch.empty(1, 32, 2048, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, 8, 2048 * times, 128, dtype=torch.bfloat16, device="meta")
        problem = describe(q, k, k, causal=True)
        assert schedule.num_parts(problem) == parts
        assert schedule.heads_at_once(problem) == at_once
        # Of a packed batch the longest sequences alone are known.
        assert schedule.num_parts(replace(problem, packed=True)) == 4

    @pytest.mark.parametrize(
        ("heads", "tokens", "window", "head_dim", "rolled"),
        [
            ((32, 8), 8192, None, 128, True),
            ((16, 16), 16384, None, 128, False),
            ((8, 8), 8192, None, 128, True),
            ((16, 16), 65536, 1024, 128, True),
            ((16, 16), 65536, 1024, 104, True),
            ((16, 16), 65536, 1024, 96, False),
            ((32, 8), 8192, None, 64, False),
            ((32, 8), 8192, None, 256, False),
        ],
    )
    def test_which_halves_run_the_same_code(
        self, heads: tuple[int, int], tokens: int, window: int | None, head_dim: int, rolled: bool
    ) -> None:
        problem = self.problem(heads, tokens, window=window, head_dim=head_dim)
        assert schedule.halves_rolled(problem) == rolled

    @pytest.mark.parametrize(
        ("heads", "causal", "window"),
        [
            ((64, 64), True, None),
            ((64, 16), True, None),
            ((64, 16), False, None),
            ((64, 16), True, 64),
            # Too few programs of whole groups to fill the GPU.
            ((8, 2), False, None),
            ((8, 2), True, 64),
            # Turned in part.
            ((10, 10), True, None),
            ((12, 4), True, None),
        ],
    )
    def test_workspace_is_as_predicted(
        self, heads: tuple[int, int], causal: bool, window: int | None
    ) -> None:
        """But for the counts, of 4 bytes for 64 rows."""
        pytest.importorskip("triton.experimental.gluon")
        q, k = (torch.empty(2, n, 1024, 96, dtype=torch.bfloat16) for n in heads)
        lse = torch.empty(2, heads[0], 1024)
        problem = describe(q, k, k, causal=causal, window=window)
        plan = plans.plan_backward(
            BackwardPass(
                problem=problem, do=q, q=q, k=k, v=k, o=q, lse=lse, dlse=None, dq=q, dk=k, dv=k,
                scale=1.0,
            )
        )  # fmt: skip
        allocated = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.workspace)
        predicted = schedule.backward_workspace(
            batch_size=2, num_heads=heads[0], num_kv_heads=heads[1], q_len=1024, kv_len=1024,
            head_dim=96, causal=causal, window=window,
        )  # fmt: skip
        assert predicted < allocated < 1.001 * predicted
        num_sums = 2 if schedule.keys_turned(problem) else 1
        assert plan.workspace[2][0][0] == num_sums * 2 * heads[0]
        assert num_sums == (2 if heads[0] in (10, 12) else 1)

    @pytest.mark.parametrize("tokens", [128, 2048, 3072, 4096, 8192])
    def test_parts_divide_the_group(self, tokens: int) -> None:
        assert 4 % schedule.num_parts(self.problem((32, 8), tokens, causal=False)) == 0

    @pytest.mark.parametrize("tokens", [8192, 65536, 1 << 18])
    def test_heads_come_in_slices_whose_sums_stay_small(self, tokens: int) -> None:
        """Of each key head float32 sums of 128 numbers: dq of four heads, dk and dv."""
        heads = schedule.key_heads_of_slice(self.problem((32, 8), tokens), tokens, tokens)
        in_slice = heads * tokens * 6 * 128 * 4
        assert heads == 1 or in_slice <= schedule.SLICE_BYTES
        assert heads == 8 or (heads + 1) * tokens * (6 * 128 * 4 + 32) > schedule.SLICE_BYTES
        every = schedule.key_heads_of_slice(self.problem((32, 32), tokens), tokens, tokens)
        assert every == 32

    @pytest.mark.parametrize("tokens", [1024, 8192, 16384])
    def test_heads_that_take_turns_fit_the_cache(self, tokens: int) -> None:
        """8 bytes of q, do and the sums of dq for each of 128 columns."""
        heads = schedule.heads_at_once(self.problem((32, 32), tokens))
        assert heads * tokens * 128 * 8 <= 50 << 20
        # The simulation's own, which asks no device.
        assert heads == backward_order.heads_at_once(tokens, 128)

    @pytest.mark.parametrize(
        ("heads", "tokens", "head_dim", "turned"),
        [
            ((16, 16), 16384, 64, 4),  # Groups of four fit the cache.
            ((15, 15), 16384, 64, 3),
            ((13, 13), 16384, 64, 5),  # One alone has 128 programs, for 132 processors.
            ((8, 2), 8192, 128, 4),
            ((16, 16), 16384, 128, 0),  # Of 16 rounds the last does not count.
            ((8, 8), 2048, 128, 0),
            ((9, 9), 2048, 128, 9),
            ((1, 1), 16384, 64, 0),
            ((1, 1), 32768, 64, 1),
        ],
    )
    def test_the_last_heads_are_turned_if_they_fill_the_gpu(
        self, heads: tuple[int, int], tokens: int, head_dim: int, turned: int
    ) -> None:
        assert schedule.heads_turned(self.problem(heads, tokens, head_dim=head_dim)) == turned
        if turned:
            # The simulation's own.
            assert turned == backward_order.heads_turned(heads[0], tokens, head_dim)

    @pytest.mark.parametrize(
        ("heads", "tokens", "head_dim", "turned"),
        [
            ((1, 1), 16384, 64, 0),  # All programs start at once.
            ((1, 1), 32768, 64, 132),  # One round of 1.9.
            ((1, 1), 36864, 64, 132),  # One of 2.2.
            ((1, 1), 49152, 64, 132),  # One of 2.9.
            ((1, 1), 53248, 64, 264),  # Two of 3.2.
            ((1, 1), 1 << 18, 64, 0),  # 15.5 rounds, whose end is a small part.
            ((4, 4), 8192, 128, 33),
            ((4, 1), 8192, 128, 33),  # Each query head has programs of its own.
            ((8, 8), 8192, 64, 33),  # Two of 3.9.
            ((8, 8), 8192, 128, 0),  # Groups of four fit the cache, and one of two is turned.
            ((9, 9), 2048, 128, 14),  # 126 programs: 15 tiles would be three too many.
            ((3, 3), 5632, 128, 0),  # 132 programs: all of them at once.
            ((40, 40), 1024, 64, 3),
            ((48, 48), 1024, 64, 0),  # Two tiles, of 2.9 rounds.
            ((96, 96), 512, 64, 0),  # One tile of four.
        ],
    )
    def test_heads_are_turned_in_part_where_all_would_be(
        self, heads: tuple[int, int], tokens: int, head_dim: int, turned: int
    ) -> None:
        problem = self.problem(heads, tokens, head_dim=head_dim)
        assert schedule.keys_turned(problem) == turned
        if turned:
            assert schedule.heads_turned(problem) == heads[0]
            assert turned == backward_order.keys_turned(heads[0], tokens, head_dim)

    def test_none_is_turned_in_part_where_sums_of_dq_are_large(self) -> None:
        q, k = (
            torch.empty(1, 4, n, 128, dtype=torch.bfloat16, device="meta") for n in (8320, 8192)
        )
        assert schedule.keys_turned(describe(q, k, k, causal=True)) == 0
        assert schedule.keys_turned(describe(k, q, q, causal=True)) == 33

    @pytest.mark.parametrize("cache_mib", [50, 60])
    def test_what_is_turned_in_part_does_not_depend_on_the_cache(
        self, monkeypatch: pytest.MonkeyPatch, cache_mib: int
    ) -> None:
        """Predictions of memory do not ask the GPU."""
        properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=cache_mib << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        assert schedule.keys_turned(self.problem((4, 4), 8192)) == 33
        # Of 60 MiB four heads would be one group, and all of them turned.
        assert schedule.keys_turned(self.problem((4, 4), 10240)) == 0

    @pytest.mark.parametrize(
        ("heads", "onto", "planned"),
        [((5, 5), False, ("keys", 5, 26)), ((5, 5), True, ("heads", 4, 5)),
         ((16, 16), False, ("heads", 4, 4)), ((2, 2), False, ("none", 4, 0))],
    )  # fmt: skip
    def test_the_launch_says_so(
        self, heads: tuple[int, int], onto: bool, planned: tuple[str, int, int]
    ) -> None:
        """All heads take turns where they are turned in part."""
        pytest.importorskip("triton.experimental.gluon")
        q = torch.empty(1, heads[0], 8192, 128, dtype=torch.bfloat16)
        problem = describe(q, q, q, causal=True)
        lse = torch.empty(1, heads[0], 8192)
        call = BackwardPass(
            problem=problem, do=q, q=q, k=q, v=q, o=q, lse=lse, dlse=None, dq=q, dk=q, dv=q,
            scale=1.0,
        )  # fmt: skip
        main = plans._plan_main(call, 8192, onto=onto)
        assert (main.constants["TURNED"], *main.integers[9:11]) == planned

    @pytest.mark.parametrize("told_after", [0.6, 1.1])
    def test_turned_in_part_they_end_earlier(self, told_after: float) -> None:
        """By the simulation."""
        for heads, length in (
            *((1, 24576), (1, 32768), (1, 36864), (1, 49152), (4, 8192), (5, 8192)),
            *((7, 4096), (9, 4096)),
        ):
            in_part, whole = (
                backward_order.over_even(heads, length, 64, told_after, order)
                for order in ("in part", "turned")
            )
            assert in_part < 0.98 * whole, (heads, length)

    def test_none_is_turned_where_programs_are_as_long_as_each_other(self) -> None:
        full = self.problem((4, 4), 8192, causal=False)
        windowed = self.problem((4, 4), 8192, window=1024)
        for problem in (full, windowed):
            assert schedule.heads_turned(problem) == schedule.keys_turned(problem) == 0

    @pytest.mark.parametrize(
        ("heads", "head_dim", "apart"),
        [(8, 128, True), (8, 72, True), (8, 64, False), (17, 128, False)],
    )
    def test_halves_are_added_apart_in_few_rounds(
        self, heads: int, head_dim: int, apart: bool
    ) -> None:
        """8 heads have 512 programs, 17 have 1,088; up to 64 columns halves are added at once."""
        problem = self.problem((heads, heads), 8192, head_dim=head_dim)
        assert schedule.halves_apart(problem) is apart


class TestProgramSize:
    """Which query tiles share a forward program, and when they should."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("tiles", [1, 2, 3])
    @pytest.mark.parametrize("num_tiles", [1, 2, 3, 8, 9, 17])
    def test_each_tile_is_computed_once(self, num_tiles: int, tiles: int, causal: bool) -> None:
        """test_hopper_protocol compares the kernel's own arithmetic with this."""
        grid = program_size.programs(num_tiles, tiles, causal)
        assert len(grid) == plans.grid(128 * num_tiles - 5, 7, 128 * tiles)[0]
        assert all(grid)
        assert sorted(tile for program in grid for tile in program) == list(range(num_tiles))

    def test_pairs_of_a_causal_head_are_as_long_as_each_other(self) -> None:
        assert program_size.programs(4, 2, causal=True) == [[3, 0], [2, 1]]
        assert program_size.programs(5, 2, causal=True) == [[4], [3, 0], [2, 1]]
        assert program_size.programs(5, 2, causal=False) == [[0, 1], [2, 3], [4]]
        for tokens in (1024, 1152):
            lengths = program_size.key_tile_counts(tokens, tokens, True, None, rows=128)
            pairs = program_size.programs(len(lengths), 2, causal=True)
            assert {sum(lengths[tile] for tile in pair) for pair in pairs} == {9}

    @pytest.mark.parametrize(
        ("q_len", "kv_len", "causal", "window", "counts"),
        [
            (300, 300, True, None, [1, 2, 3]),
            (300, 300, False, None, [3, 3, 3]),
            # The first 200 of 400 queries see no key, the last ones all 200.
            (400, 200, True, None, [0, 1, 2, 2]),
            # The first query sees 301 keys.
            (200, 500, True, None, [4, 4]),
            # Query 256 sees keys from 129 on, query 384 from 257 on.
            (512, 512, True, 128, [1, 2, 2, 2]),
            (512, 512, True, 129, [1, 2, 2, 2]),
            (512, 512, True, 130, [1, 2, 3, 3]),
            (512, 512, False, 2, [2, 3, 3, 2]),
            # The first 200 queries see no key, the last 100 no key any more.
            (500, 100, True, 101, [0, 0, 0, 1]),
        ],
    )
    def test_key_tiles(
        self, q_len: int, kv_len: int, causal: bool, window: int | None, counts: list[int]
    ) -> None:
        assert program_size.key_tile_counts(q_len, kv_len, causal, window, rows=128) == counts

    def test_key_tiles_of_three_consumers(self) -> None:
        assert program_size.key_tile_counts(600, 600, True, None, rows=192) == [2, 3, 5, 5]

    def test_programs_start_in_order_where_there_is_room(self) -> None:
        # Two processors and twice 1, 3: one has 1, 1 and 3, the other 3.
        assert program_size.makespan([1.0, 3.0], heads=2, heads_at_once=1, processors=2) == 5.0
        # Head by head 3, 1, 3 and 1 leave one processor with 3 and 1 and the other with 1 and 3; in
        # turns each has 3 and 1 as well, but of three heads one has two of the long programs.
        by_head = program_size.makespan([3.0, 1.0], heads=3, heads_at_once=1, processors=3)
        in_turns = program_size.makespan([3.0, 1.0], heads=3, heads_at_once=3, processors=3)
        assert (by_head, in_turns) == (5.0, 4.0)
        assert program_size.makespan([3.0, 2.0, 1.0], heads=1, heads_at_once=1, processors=9) == 3.0

    def test_by_hand(self) -> None:
        """Two heads of two tiles on two processors: 1 and 2 key tiles, or a pair of 3."""
        costs = program_size.COSTS[64, 2]
        shape = self.shape(2, 256, 64) | {"processors": 2, "heads_at_once": 1}
        # The longer tiles first: each processor has both of one head after the other.
        single = 2 * (costs.program + costs.tile) + 3 * costs.key_tile
        predicted = program_size.predicted_us(**shape, size=ProgramSize(2, 1))
        assert predicted == pytest.approx(costs.launch + single)
        predicted = program_size.predicted_us(**shape, size=ProgramSize(2, 2))
        more = 3 * (costs.key_tile_of_several - costs.key_tile)
        assert predicted == pytest.approx(costs.launch + single + more - costs.program)

    @pytest.mark.parametrize(
        ("heads", "tokens", "size"),
        [(96, 512, (2, 1)), (96, 1024, (2, 2)), (96, 2048, (2, 4)), (16, 16384, (3, 1))],
    )
    def test_sizes_of_64_columns(self, heads: int, tokens: int, size: tuple[int, int]) -> None:
        """Tiles of 192 queries fit long sequences."""
        assert program_size.size_of_program(**self.shape(heads, tokens, 64)) == size

    @pytest.mark.parametrize(
        ("heads", "kv_heads", "tokens", "causal", "window", "at_once"),
        [
            # A third of 50 MiB holds keys and values of four heads, or of eight and more.
            (16, 16, 16384, True, None, 4),
            (32, 8, 16384, True, None, 16),
            (32, 8, 65536, True, None, 4),
            (16, 16, 1024, True, None, 16),
            (32, 1, 1024, True, None, 32),
            (16, 16, 16384, False, None, 1),
            (16, 16, 16384, True, 1024, 1),
        ],
    )
    def test_heads_at_once(
        self,
        monkeypatch: pytest.MonkeyPatch,
        heads: int,
        kv_heads: int,
        tokens: int,
        causal: bool,
        window: int | None,
        at_once: int,
    ) -> None:
        properties = SimpleNamespace(L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        q = torch.empty(1, heads, tokens, 64, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, kv_heads, tokens, 64, dtype=torch.bfloat16, device="meta")
        problem = describe(q, k, k, causal=causal, window=window)
        assert schedule.forward_heads_at_once(problem) == at_once

    @pytest.mark.parametrize(("heads", "tokens"), [(32, 8192), (16, 16384)])
    def test_long_sequences(self, heads: int, tokens: int) -> None:
        """One tile of many keys takes long beside its own costs, and short ones end evenly."""
        assert program_size.size_of_program(**self.shape(heads, tokens, 128)) == (2, 1)

    @pytest.mark.parametrize(("window", "tiles"), [(128, 4), (1024, 4), (4096, 2), (16384, 1)])
    def test_more_tiles_in_windows_that_few_key_tiles_fill(self, window: int, tiles: int) -> None:
        """The tile's own cost weighs less, the more key tiles there are."""
        shape = self.shape(16, 65536, 128) | {"window": window, "heads_at_once": 1}
        assert program_size.size_of_program(**shape) == (2, tiles)

    def test_single_tiles_in_windows_that_leave_processors_idle(self) -> None:
        shape = self.shape(8, 1024, 128) | {"window": 128, "heads_at_once": 1}
        assert program_size.size_of_program(**shape) == (2, 1)

    @pytest.mark.parametrize("heads_at_once", [1, 8])
    def test_too_many_to_simulate(self, heads_at_once: int) -> None:
        few, many = (
            self.shape(heads, 512, 64) | {"heads_at_once": heads_at_once} for heads in (1024, 1025)
        )
        for tiles in (1, 2):
            simulated, mean = (
                program_size.predicted_us(**x, size=ProgramSize(2, tiles)) for x in (few, many)
            )
            assert mean == pytest.approx(simulated, rel=0.02)

    @staticmethod
    def shape(heads: int, tokens: int, block_d: int) -> dict[str, Any]:
        in_cache = (50 << 20) // 3 // (4 * tokens * block_d)
        return {
            "q_len": tokens,
            "kv_len": tokens,
            "heads": heads,
            "heads_at_once": min(16, 1 << max(0, in_cache.bit_length() - 1)),
            "block_d": block_d,
            "causal": True,
            "window": None,
            "processors": 132,
        }

    @pytest.mark.parametrize(
        ("packed", "forced", "size", "grid"),
        [
            (False, None, (2, 2), 4),
            (True, None, (2, 1), 8),
            (False, (2, 1), (2, 1), 8),
            (False, (3, 1), (3, 1), 6),
        ],
    )
    def test_plans(
        self,
        monkeypatch: pytest.MonkeyPatch,
        packed: bool,
        forced: tuple[int, int] | None,
        size: tuple[int, int],
        grid: int,
    ) -> None:
        pytest.importorskip("triton.experimental.gluon")
        properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(plans, "FORWARD_SIZE", forced and ProgramSize(*forced))
        q = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16)
        problem = replace(describe(q, q, q, causal=True), packed=packed)
        lse = torch.empty(8, 12, 1024)
        launch = plans.plan_forward(
            ForwardPass(problem=problem, q=q, k=q, v=q, o=q, lse=lse, scale=1.0)
        )
        assert launch.grid == (grid, 96, 1)
        assert (launch.constants["CONSUMERS"], launch.constants["TILES"]) == size


@pytest.mark.skipif(not hopper.any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
@pytest.mark.parametrize("num_key_counts", [0, 1, 100, 2000])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_sums", [1, 2])
def test_counts_begin_at_zero(packed: bool, num_key_counts: int, num_sums: int) -> None:
    """Fewer than programs, and more than one for each of their rows; and no numbers behind them."""
    # Its constants come from a file of Gluon, which old versions of Triton lack.
    from kernels.flash.hopper.rows import row_statistics

    heads, rows, padded = 2, 130, 256
    o = torch.randn(1, heads, rows, 16)
    lse = torch.zeros(heads, rows)
    # A sequence without queries comes first: its programs end early.
    cu_seqlens = torch.tensor([0, 0, rows], dtype=torch.int32)
    counts, key_counts = (torch.full((n,), 9, dtype=torch.int32) for n in (64, 3000))
    row_statistics[2, (2 if packed else 1) * heads](
        o, o, lse, lse, torch.empty(2, heads, 512), counts, key_counts, cu_seqlens,
        *o.stride()[:3], *o.stride()[:3], heads, rows, rows,
        512 if packed else padded, heads * 512, num_key_counts,
        HEAD_DIM=16, BLOCK_D=16, BLOCK_Q=128, PACKED=packed, HAS_DLSE=False,
        SUMS=num_sums,
    )  # fmt: skip
    # Two lines of 130 queries, in tiles of 64 and whole programs.
    of_lines = [*range(2, 6), *range(10, 14)] if packed else [*range(8)]
    zeros = [place + sums * heads * 512 // 64 for sums in range(num_sums) for place in of_lines]
    assert (counts == 0).nonzero().flatten().tolist() == zeros
    assert not key_counts[:num_key_counts].any()
    assert (key_counts[num_key_counts:] == 9).all()


@pytest.mark.skipif(not hopper.any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (300, 428), (428, 300), (300, 40)])
@pytest.mark.parametrize("num_turned", [1, 2])
@pytest.mark.parametrize(("turn", "packed"), [(128, False), (64, False), (128, True)])
def test_second_sums_of_dq_are_added_where_there_are_any(
    q_len: int, kv_len: int, num_turned: int, turn: int, packed: bool
) -> None:
    """What no program writes may be anything: here it is no number."""
    # Its constants come from a file of Gluon, which old versions of Triton lack.
    from kernels.flash.hopper.rows import finish_dq

    heads, padded, width = 2, 1024, 64
    torch.manual_seed(0)
    # Of a packed batch, an empty sequence and one of a single query come first.
    cu_seqlens_q = torch.tensor([0, 0, 1, 1 + q_len] if packed else [0, q_len], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 9, 10, 10 + kv_len] if packed else [0, 0], dtype=torch.int32)
    start, sums_start = (1, 256) if packed else (0, 0)
    sums = torch.full((2, heads, padded, width), torch.nan)
    first_key = num_turned * turn
    for query in range(-(-q_len // turn) * turn):
        last_key = query // turn * turn + turn - 1 + kv_len - q_len
        written = (last_key >= 0, last_key >= first_key and kv_len > first_key)
        for part in range(2):
            if written[part]:
                sums[part, :, sums_start + query] = torch.randn(heads, width)
    if packed:
        sums[0, :, 128 : 128 + turn] = 1.0
    results = []
    for planes in (sums, (sums[0] + sums[1].nan_to_num(0.0))[None]):
        dq = torch.zeros(1, heads, start + q_len, width)
        finish_dq[-(-q_len // 128), (3 if packed else 1) * heads](
            planes, dq, cu_seqlens_q, cu_seqlens_k, *dq.stride()[:3], heads, q_len, kv_len, padded,
            heads * padded, num_turned, 0, 0, 0, 0.5,
            HEAD_DIM=width, BLOCK_D=width, BLOCK_Q=128, TURN=turn, PACKED=packed, CAUSAL=True,
            MASK="plain", SUMS=len(planes),
        )  # fmt: skip
        results.append(dq)
    assert torch.equal(*results)
    assert not results[0].isnan().any()
    assert (results[0][0, :, start:].abs().sum(-1) > 0).sum() == heads * min(
        q_len, max(0, q_len - max(0, q_len - kv_len) // turn * turn)
    )


class TestAddressable:
    """TMA wants 16-byte aligned rows; what is not laid out so is copied."""

    def test_no_copy_of_what_a_transformer_stores(self) -> None:
        x = torch.empty(2, 8, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
        assert plans.addressable(x) is x

    @pytest.mark.parametrize("how", ["expanded", "odd rows", "misaligned"])
    def test_copies(self, how: str) -> None:
        x = torch.randn(2 * 4 * 8 * 72 + 1).to(torch.bfloat16)
        views = {
            "expanded": x[:64].expand(2, 4, 8, 64),
            "odd rows": x[: 2 * 4 * 8 * 65].view(2, 4, 8, 65)[..., :64],
            "misaligned": x[1 : 2 * 4 * 8 * 64 + 1].view(2, 4, 8, 64),
        }
        copy = plans.addressable(views[how])
        assert copy is not views[how]
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0
        assert (copy == views[how]).all()


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv in float64 by autograd; rows without keys are zero, lse -inf."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = q @ keys.mT * scale
    q_len, kv_len = scores.shape[-2:]
    if causal:
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(kv_len - q_len), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    o = p @ values
    return o.detach(), lse.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def assert_near(got: Tensor, expected: Tensor, what: str) -> None:
    error = float((got.double() - expected).norm())
    assert error <= 5e-3 * float(expected.norm()) + 1e-3, f"{what}: {error:.3g}"


ON_HOPPER_ONLY = FlashOptions(implementation="hopper")

MASKS = [("causal", "none"), ("causal", "heads"), ("causal", "keys"), ("full", "none")]
"""With all heads turned, or all in their first keys."""


def turn(monkeypatch: pytest.MonkeyPatch, turned: str, heads: int = 1 << 20) -> None:
    """In calls too small for it, too; with none, as in calls of many rounds."""
    apart = schedule.halves_apart
    is_turned = turned != "none"

    def keys(problem: Problem) -> int:
        if not problem.causal:
            return 0
        tiles = -(-problem.kv_len // schedule.backward_rows(problem))
        return min(2, tiles) if turned == "keys" else 0

    monkeypatch.setattr(schedule, "heads_turned", lambda problem: heads if is_turned else 0)
    monkeypatch.setattr(schedule, "keys_turned", keys)
    monkeypatch.setattr(schedule, "halves_apart", lambda problem: is_turned and apart(problem))
    monkeypatch.setattr(plans, "BACKWARD_PLANS", {})


SHAPES = {
    "square": (2, 4, 4, 512, 512, 64),
    "grouped": (1, 8, 1, 200, 200, 96),
    "ragged": (2, 4, 2, 300, 300, 128),
    "more keys": (1, 2, 2, 100, 333, 64),
    "fewer keys": (1, 2, 2, 333, 100, 64),
    "one token": (1, 2, 2, 1, 1, 64),
    "narrow": (1, 2, 2, 200, 200, 16),
    "odd width": (1, 2, 2, 257, 257, 80),
    "wide": (2, 4, 2, 300, 300, 256),
    "wide, more keys": (1, 2, 2, 100, 333, 256),
    "wide, fewer keys": (1, 2, 2, 333, 100, 192),
    "wide, odd": (1, 2, 2, 257, 257, 136),
}


@pytest.mark.gpu
@needs_hopper
class TestOnHopper:
    """Each width and mask is compiled once; shapes of one width follow each other in one test."""

    def check(self, shape: str, dtype: torch.dtype, causal: bool) -> None:
        """Results against float64, and twice the same bits."""
        batch, heads, kv_heads, q_len, kv_len, head_dim = SHAPES[shape]
        torch.manual_seed(1)
        # As the transformer stores them: [B, S, H, D] underneath.
        q, do = (torch.randn(batch, q_len, heads, head_dim, device="cuda") for _ in range(2))
        k, v = (torch.randn(batch, kv_len, kv_heads, head_dim, device="cuda") for _ in range(2))
        q, k, v, do = (x.to(dtype).transpose(1, 2) for x in (q, k, v, do))
        scale = 0.7 * head_dim**-0.5
        call = FlashCall(
            q=q, k=k, v=v, spec=AttentionSpec(causal=causal, scale=scale), options=ON_HOPPER_ONLY
        )
        results = []
        for _ in range(2):
            o, lse = operator.forward(call)
            results.append((o, lse, *operator.backward(call, do, o, lse)))
        for first, second in zip(*results, strict=True):
            assert torch.equal(first, second), "two runs give equal bits"
        expected = exact(q, k, v, do, causal, scale)
        o, lse, *gradients = results[0]
        unseen = expected[1] == -torch.inf
        assert (lse[unseen] == -torch.inf).all()
        assert_near(lse.masked_fill(unseen, 0.0), expected[1].masked_fill(unseen, 0.0), "lse")
        for what, got, wanted in zip(
            ("o", "dq", "dk", "dv"), (o, *gradients), (expected[0], *expected[2:]), strict=True
        ):
            assert_near(got, wanted, what)

    @pytest.mark.parametrize(("mask", "turned"), MASKS)
    def test_against_float64(self, monkeypatch: pytest.MonkeyPatch, mask: str, turned: str) -> None:
        turn(monkeypatch, turned)
        for shape in (
            "square",
            "more keys",
            "fewer keys",
            "one token",
            "ragged",
            "wide",
            "grouped",
        ):
            self.check(shape, torch.bfloat16, mask == "causal")

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("causal", [True, False])
    def test_every_shape_against_float64(
        self, shape: str, dtype: torch.dtype, causal: bool
    ) -> None:
        self.check(shape, dtype, causal)

    def check_sizes(
        self,
        monkeypatch: pytest.MonkeyPatch,
        shape: tuple[int, int, int, int],
        head_dim: int,
        causal: bool,
        repeats: int,
    ) -> None:
        """Programs of all sizes agree, each time."""
        batch, heads, q_len, kv_len = shape
        torch.manual_seed(6)
        q = torch.randn(batch, heads, q_len, head_dim, device="cuda", dtype=torch.bfloat16)
        k, v = (
            torch.randn(batch, heads, kv_len, head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        problem = describe(q, k, v, causal=causal)
        results = {}
        # Three consumers of 128 columns, which are never taken, have too few registers.
        consumers = (2, 3) if head_dim <= 64 else (2,)
        for size in (ProgramSize(*x) for x in product(consumers, program_size.TILES)):
            monkeypatch.setattr(plans, "FORWARD_SIZE", size)
            monkeypatch.setattr(plans, "FORWARD_PLANS", {})
            for _ in range(repeats):
                # What is not written stays no number, which equals nothing.
                o, lse = torch.full_like(q, torch.nan), q.new_full(q.shape[:3], torch.nan).float()
                hopper.forward(ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=0.1))
                first = results.setdefault(size, (o, lse))
                assert torch.equal(o, first[0])
                assert torch.equal(lse, first[1])
            (plan,) = plans.FORWARD_PLANS.values()
            assert (plan.constants["CONSUMERS"], plan.constants["TILES"]) == size
        o, lse = results.pop(ProgramSize(2, 1))
        for other_o, other_lse in results.values():
            assert torch.equal(o, other_o)
            # Other kernels, whose compiler fuses other multiplications and additions.
            torch.testing.assert_close(other_lse, lse, rtol=1e-6, atol=1e-6)

    # Odd and even numbers of tiles; queries before the first key: tiles that see none.
    SHAPES_OF_PROGRAMS = (
        *((8, 12, 1024, 1024), (2, 3, 1000, 1000), (1, 2, 129, 129), (1, 2, 128, 128)),
        *((1, 4, 600, 900), (1, 4, 900, 600), (2, 4, 1152, 100), (3, 5, 257, 1)),
    )

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_several_tiles_agree_with_single_ones(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int
    ) -> None:
        for shape in self.SHAPES_OF_PROGRAMS:
            self.check_sizes(monkeypatch, shape, head_dim, causal=True, repeats=10)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("head_dim", [64, 80, 128])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("shape", SHAPES_OF_PROGRAMS)
    def test_all_pairs_agree_with_single_tiles(
        self,
        monkeypatch: pytest.MonkeyPatch,
        shape: tuple[int, int, int, int],
        causal: bool,
        head_dim: int,
    ) -> None:
        self.check_sizes(monkeypatch, shape, head_dim, causal, repeats=50)

    def check_repeats(
        self,
        monkeypatch: pytest.MonkeyPatch,
        kv_heads: int,
        parts: int,
        head_dim: int,
        repeats: int,
    ) -> None:
        """Programs wait for one another in the backward pass: enough of them, often enough."""
        monkeypatch.setattr(schedule, "num_parts", lambda problem: parts)
        monkeypatch.setattr(plans, "BACKWARD_PLANS", {})
        torch.manual_seed(3)
        q, do = (
            torch.randn(1, 8, 4096, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        k, v = (
            torch.randn(1, kv_heads, 4096, head_dim, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        for causal in (True, False):
            call = FlashCall(
                q=q, k=k, v=v, spec=AttentionSpec(causal=causal, scale=0.1), options=ON_HOPPER_ONLY
            )
            o, lse = operator.forward(call)
            first = operator.backward(call, do, o, lse)
            expected = exact(q, k, v, do, causal, 0.1)
            for got, wanted in zip(first, expected[2:], strict=True):
                assert_near(got, wanted, "a gradient")
            for _ in range(repeats):
                assert all(map(torch.equal, operator.backward(call, do, o, lse), first))

    @pytest.mark.parametrize(
        ("head_dim", "parts", "apart"),
        [
            *((64, 4, False), (96, 4, True), (96, 4, False), (128, 1, True), (128, 1, False)),
            (256, 4, False),
        ],
    )
    def test_many_runs_end_and_agree(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, parts: int, apart: bool
    ) -> None:
        monkeypatch.setattr(schedule, "halves_apart", lambda problem: apart)
        self.check_repeats(monkeypatch, 2, parts, head_dim, repeats=50)

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_turned_heads_beside_others(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int
    ) -> None:
        turn(monkeypatch, "heads", 4)
        monkeypatch.setattr(schedule, "heads_at_once", lambda problem: 2)
        self.check_repeats(monkeypatch, 2, 4, head_dim, repeats=20)

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    def test_heads_turned_in_part(self, monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
        turn(monkeypatch, "keys")
        monkeypatch.setattr(schedule, "heads_at_once", lambda problem: 2)
        self.check_repeats(monkeypatch, 2, 4, head_dim, repeats=20)

    def test_few_heads_are_turned_in_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """4 heads of 36 tiles are 144 programs, for 132 processors."""
        monkeypatch.setitem(SHAPES, "few heads", (1, 4, 4, 4608, 4608, 128))
        q = torch.empty(1, 4, 4608, 128, dtype=torch.bfloat16, device="cuda")
        if schedule.keys_turned(describe(q, q, q, causal=True)) == 0:
            pytest.skip("this GPU has other processors")
        self.check("few heads", torch.bfloat16, causal=True)

    @pytest.mark.exhaustive
    @pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
    @pytest.mark.parametrize(("kv_heads", "parts"), [(8, 1), (2, 1), (2, 2), (2, 4)])
    def test_very_many_runs_end_and_agree(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, kv_heads: int, parts: int
    ) -> None:
        self.check_repeats(monkeypatch, kv_heads, parts, head_dim, repeats=250)

    def test_slices_of_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three slices, the last of one head, give what one call gives, bit for bit.

        There are too few programs for turned heads, whose sums are in another order.
        """
        torch.manual_seed(5)
        q, do = (torch.randn(2, 10, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(2, 5, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        call = FlashCall(
            q=q, k=k, v=v, spec=AttentionSpec(causal=True, scale=0.1), options=ON_HOPPER_ONLY
        )
        o, lse = operator.forward(call)
        results = []
        for heads_of_slice in (5, 2):
            monkeypatch.setattr(schedule, "key_heads_of_slice", lambda *_, n=heads_of_slice: n)
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            for dlse in (None, lse):
                hopper.backward(
                    BackwardPass(
                        problem=call.problem(), do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse,
                        dq=dq, dk=dk, dv=dv, scale=0.1,
                    )
                )  # fmt: skip
                results.append([x.clone() for x in (dq, dk, dv)])
        for whole, sliced in ((0, 2), (1, 3)):
            assert all(map(torch.equal, results[whole], results[sliced]))

    @pytest.mark.parametrize(
        ("lengths", "heads", "kv_heads", "head_dim"),
        [((300, 1, 0, 513, 64), 4, 2, 64), ((100, 700, 33), 2, 1, 128), ((100, 400, 1), 2, 1, 192)],
    )
    @pytest.mark.parametrize(("mask", "turned"), MASKS)
    def test_packed(
        self,
        monkeypatch: pytest.MonkeyPatch,
        lengths: tuple[int, ...],
        heads: int,
        kv_heads: int,
        head_dim: int,
        mask: str,
        turned: str,
    ) -> None:
        causal = mask == "causal"
        turn(monkeypatch, turned)
        torch.manual_seed(2)
        ends = [0, *accumulate(lengths)]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        packing = Packing(
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_q_len=max(lengths),
            max_kv_len=max(lengths),
        )
        q, do, k, v = (
            torch.randn(ends[-1], n, head_dim, device="cuda", dtype=torch.bfloat16)
            for n in (heads, heads, kv_heads, kv_heads)
        )
        call = FlashCall(
            q=q,
            k=k,
            v=v,
            spec=AttentionSpec(causal=causal, scale=0.1, packing=packing),
            options=ON_HOPPER_ONLY,
        )
        o, lse = operator.forward(call)
        gradients = operator.backward(call, do, o, lse)
        for start, end in pairwise(ends):
            if start == end:
                continue
            own = [x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v, do)]
            expected = exact(*own, causal, 0.1)
            assert_near(lse[:, start:end].unsqueeze(0), expected[1], "lse")
            for what, got, wanted in zip(
                ("o", "dq", "dk", "dv"),
                (o, *gradients),
                (expected[0], *expected[2:]),
                strict=True,
            ):
                assert_near(got[start:end].transpose(0, 1).unsqueeze(0), wanted, what)
