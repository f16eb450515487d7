"""How large a program of the Hopper forward pass is: its consumers, and its tiles."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.flash.call.arguments import ForwardPass
from kernels.flash.call.problem import describe
from kernels.flash.hopper import forward_schedule, plans, program_size
from kernels.flash.hopper.program_size import ProgramSize


class TestProgramSize:
    """Which query tiles share a forward program, and when they should."""

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("tiles", [1, 2, 3])
    @pytest.mark.parametrize("num_tiles", [1, 2, 3, 8, 9, 17])
    def test_each_tile_is_computed_once(self, num_tiles: int, tiles: int, causal: bool) -> None:
        """test_hopper_protocol compares the kernel's own arithmetic with this."""
        grid = program_size.programs(num_tiles, tiles, causal)
        q = torch.empty(1, 7, 128 * num_tiles - 5, 64, dtype=torch.bfloat16)
        problem = describe(q, q, q, causal=causal)
        assert len(grid) == plans.grid(problem, problem.q_len, 128 * tiles)[0]
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

    def test_small_programs_share_a_processor(self) -> None:
        def makespan(
            durations: list[float], heads: int = 1, residents: int = 2, speedup: float = 2.0
        ) -> float:
            return program_size.shared_makespan(durations, heads, 1, 1, residents, speedup)

        # Two at once do 3 each in 3, and one of 3 alone twice as fast, if it can.
        assert makespan([3.0], heads=2) == 3.0
        assert makespan([3.0]) == 1.5
        assert makespan([3.0], speedup=1.0) == 3.0
        # After 1 one is done, and the other does what is left, 2, twice as fast.
        assert makespan([3.0, 1.0]) == 2.0
        # The third takes the place of the second, and is 1 behind it when the first is done.
        assert makespan([3.0, 1.0, 3.0]) == 3.5
        # One of which a processor runs one at a time is as makespan has it.
        for durations in ([1.0, 3.0], [4.0, 2.0, 1.0]):
            wanted = program_size.makespan(durations, heads=5, heads_at_once=2, processors=3)
            shared = program_size.shared_makespan(durations, 5, 2, 3, 1, 1.0)
            assert shared == pytest.approx(wanted)

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
        shape = self.shape(heads, tokens, 64)
        assert program_size.size_of_program(**shape, small=False) == ProgramSize(*size)

    @pytest.mark.parametrize(
        ("heads", "tokens", "block_d", "name"),
        [
            *((96, 512, 64, "k128"), (96, 1024, 64, "k64"), (64, 4096, 64, "k128")),
            *((16, 16384, 64, "3x1"), (96, 512, 128, "k64"), (64, 4096, 128, "2x1")),
        ],
    )
    def test_small_programs_without_a_mask(
        self, heads: int, tokens: int, block_d: int, name: str
    ) -> None:
        """The fastest, or within 2% of it, on an H200."""
        shape = self.shape(heads, tokens, block_d) | {"causal": False, "heads_at_once": 1}
        assert program_size.size_of_program(**shape).name == name

    @pytest.mark.parametrize(
        ("sequences", "longest", "block_d", "name"),
        [
            *((16, 512, 64, "k64"), (16, 2048, 64, "k64"), (8, 4096, 64, "k128")),
            *((8, 7168, 64, "k128"), (2, 16384, 64, "3x1"), (16, 512, 128, "k64")),
            *((16, 2048, 128, "2x1"), (8, 4096, 128, "2x1"), (8, 7168, 128, "2x1")),
        ],
    )
    def test_packed_batches(self, sequences: int, longest: int, block_d: int, name: str) -> None:
        """Of 16 heads; the fastest, or within 3% of it, on an H200."""
        shape = self.shape(16 * sequences, longest, block_d) | {"packed": True}
        assert program_size.size_of_program(**shape).name == name

    @pytest.mark.parametrize(
        ("heads", "tokens", "block_d", "window", "name"),
        [
            # Where the first copies and the stores are much of a program.
            *((96, 512, 64, None, "k64"), (96, 2048, 64, None, "k64")),
            *((96, 512, 128, None, "k64"), (64, 4096, 64, None, "k64")),
            # Few programs, which have a processor nearly to themselves.
            *((16, 512, 64, None, "k128"), (16, 2048, 64, None, "k128")),
            # Where key tiles are many, 64 queries for each are few.
            *((16, 16384, 64, None, "3x1"), (1, 65536, 64, None, "3x1")),
            *((64, 4096, 128, None, "2x1"), (1, 65536, 128, None, "2x1")),
            *((16, 65536, 64, 128, "k64"), (16, 65536, 64, 1024, "k64")),
            *((16, 65536, 128, 128, "k64"), (16, 65536, 128, 1024, "2x4")),
        ],
    )
    def test_small_programs(
        self, heads: int, tokens: int, block_d: int, window: int | None, name: str
    ) -> None:
        """These were the fastest, or within 3% of it, on an H200; 16 x 4,096 x 64 is not, by 5%."""
        shape = self.shape(heads, tokens, block_d)
        if window is not None:
            shape |= {"window": window, "heads_at_once": 1}
        assert program_size.size_of_program(**shape).name == name

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
        assert forward_schedule.heads_at_once(problem) == at_once

    @pytest.mark.parametrize(("heads", "tokens"), [(32, 8192), (16, 16384)])
    def test_long_sequences(self, heads: int, tokens: int) -> None:
        """One tile of many keys takes long beside its own costs, and short ones end evenly."""
        assert program_size.size_of_program(**self.shape(heads, tokens, 128)).name == "2x1"

    @pytest.mark.parametrize(("window", "tiles"), [(128, 4), (1024, 4), (4096, 2), (16384, 1)])
    def test_more_tiles_in_windows_that_few_key_tiles_fill(self, window: int, tiles: int) -> None:
        """The tile's own cost weighs less, the more key tiles there are."""
        shape = self.shape(16, 65536, 128) | {"window": window, "heads_at_once": 1}
        assert program_size.size_of_program(**shape, small=False) == ProgramSize(2, tiles)

    def test_single_tiles_in_windows_that_leave_processors_idle(self) -> None:
        shape = self.shape(8, 1024, 128) | {"window": 128, "heads_at_once": 1}
        assert program_size.size_of_program(**shape, small=False).name == "2x1"

    @pytest.mark.parametrize("heads_at_once", [1, 8])
    @pytest.mark.parametrize(
        ("size", "heads", "within"),
        [
            ((2, 1), 1024, 0.02),
            ((2, 2), 1024, 0.02),
            # The mean load knows no places that stay empty at the end, where a program is short.
            ((1, 1, 64), 512, 0.06),
            ((1, 1, 128), 512, 0.06),
        ],
    )
    def test_too_many_to_simulate(
        self, heads_at_once: int, size: tuple[int, ...], heads: int, within: float
    ) -> None:
        few, many = (
            self.shape(n, 512, 64) | {"heads_at_once": heads_at_once} for n in (heads, heads + 1)
        )
        simulated, mean = (
            program_size.predicted_us(**x, size=ProgramSize(*size)) for x in (few, many)
        )
        assert mean == pytest.approx(simulated, rel=within)

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
            (False, None, (1, 1, 64), (16, 96, 1)),
            # Its 8 sequences have 1,024 tokens in all.
            (True, None, (1, 1, 64), (16 + 8, 12, 1)),
            (True, (2, 2), (2, 2), (4 + 8, 12, 1)),
            (False, (2, 1), (2, 1), (8, 96, 1)),
            (False, (2, 2), (2, 2), (4, 96, 1)),
            (False, (3, 1), (3, 1), (6, 96, 1)),
            (False, (1, 1, 128), (1, 1, 128), (16, 96, 1)),
        ],
    )
    def test_plans(
        self,
        monkeypatch: pytest.MonkeyPatch,
        packed: bool,
        forced: tuple[int, ...] | None,
        size: tuple[int, ...],
        grid: tuple[int, int, int],
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
        assert launch.grid == grid
        constants = launch.constants
        wanted = ProgramSize(*size)
        assert constants["BLOCK_K"] == wanted.key_tile
        assert constants.get("CONSUMERS", 1) == wanted.consumers
        assert constants.get("TILES", 1) == wanted.tiles
        blocks = [make(q).block_shape for make in launch.descriptors]
        assert [block[2] for block in blocks] == [64, wanted.key_tile, wanted.key_tile]
