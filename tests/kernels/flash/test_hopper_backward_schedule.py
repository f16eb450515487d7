"""How many programs the Hopper backward pass has, in which order, and what memory they need."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import backward_order
from kernels.backends.flash_triton import FlashTriton
from kernels.flash.call.arguments import BackwardPass
from kernels.flash.call.problem import Problem, describe
from kernels.flash.hopper import backward_memory, backward_schedule, plans
from kernels.problem import AttentionProblem


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
        assert backward_schedule.num_parts(self.problem((32, 8), 8192)) == 4
        assert backward_schedule.num_parts(self.problem((8, 8), 8192)) == 1

    def test_in_a_narrow_window_one_program_has_all_heads_of_a_group(self) -> None:
        narrow = self.problem((32, 8), 65536, window=1024)
        assert backward_schedule.num_parts(narrow) == backward_schedule.heads_at_once(narrow) == 1
        assert backward_schedule.num_parts(self.problem((32, 8), 65536, window=4096)) == 4
        assert backward_schedule.num_parts(self.problem((32, 8), 4096, window=1024)) == 4
        # Too few programs to fill the GPU.
        assert backward_schedule.num_parts(self.problem((4, 1), 8192, window=1024)) == 2

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
        assert backward_schedule.num_parts(problem) == parts
        assert backward_schedule.heads_at_once(problem) == at_once
        # Of a packed batch the longest sequences alone are known.
        assert backward_schedule.num_parts(replace(problem, packed=True)) == 4

    @pytest.mark.parametrize(
        ("heads", "tokens", "window", "head_dim", "rolled"),
        [
            ((32, 8), 8192, None, 128, True),
            ((16, 16), 16384, None, 128, True),  # The last heads are turned.
            ((16, 16), 16384, None, 96, False),
            ((8, 8), 8192, None, 128, True),
            ((1, 1), 16384, None, 128, True),  # Halves of a tile's turns.
            ((1, 1), 32768, None, 128, False),  # Heads are turned in part.
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
        assert backward_schedule.halves_rolled(problem) == rolled

    def test_halves_have_code_of_their_own_under_a_full_mask(self) -> None:
        assert not backward_schedule.halves_rolled(self.problem((16, 16), 16384, causal=False))

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
            # In bands, and in halves.
            ((4, 4), True, None),
            ((4, 2), True, None),
            ((6, 6), True, None),
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
        predicted = backward_memory.backward_workspace(
            batch_size=2, num_heads=heads[0], num_kv_heads=heads[1], q_len=1024, kv_len=1024,
            head_dim=96, causal=causal, window=window,
        )  # fmt: skip
        assert predicted < allocated < 1.001 * predicted
        num_sums = {10: 2, 12: 2, 4: 3, 6: 2}.get(heads[0], 1)
        assert plan.workspace[2][0][0] == num_sums * 2 * heads[0]

    @pytest.mark.parametrize("tokens", [128, 2048, 3072, 4096, 8192])
    def test_parts_divide_the_group(self, tokens: int) -> None:
        assert 4 % backward_schedule.num_parts(self.problem((32, 8), tokens, causal=False)) == 0

    @pytest.mark.parametrize("tokens", [8192, 65536, 1 << 18])
    def test_heads_come_in_slices_whose_sums_stay_small(self, tokens: int) -> None:
        """Of each key head float32 sums of 128 numbers: dq of four heads, dk and dv."""
        heads = backward_memory.key_heads_of_slice(self.problem((32, 8), tokens), tokens, tokens)
        in_slice = heads * tokens * 6 * 128 * 4
        assert heads == 1 or in_slice <= backward_memory.SLICE_BYTES
        assert heads == 8 or (heads + 1) * tokens * (6 * 128 * 4 + 32) > backward_memory.SLICE_BYTES
        every = backward_memory.key_heads_of_slice(self.problem((32, 32), tokens), tokens, tokens)
        assert every == 32

    @pytest.mark.parametrize("tokens", [1024, 8192, 16384])
    def test_heads_that_take_turns_fit_the_cache(self, tokens: int) -> None:
        """8 bytes of q, do and the sums of dq for each of 128 columns."""
        heads = backward_schedule.heads_at_once(self.problem((32, 32), tokens))
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
            ((16, 16), 16384, 128, 2),  # Of 16 rounds; groups of two fit the cache.
            ((32, 32), 8192, 128, 4),
            ((8, 8), 2048, 128, 0),
            ((9, 9), 2048, 128, 9),
            ((1, 1), 16384, 64, 0),
            ((1, 1), 32768, 64, 1),
        ],
    )
    def test_the_last_heads_are_turned_if_they_fill_the_gpu(
        self, heads: tuple[int, int], tokens: int, head_dim: int, turned: int
    ) -> None:
        assert (
            backward_schedule.heads_turned(self.problem(heads, tokens, head_dim=head_dim)) == turned
        )
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
        assert backward_schedule.keys_turned(problem) == turned
        if turned:
            assert backward_schedule.heads_turned(problem) == heads[0]
            assert turned == backward_order.keys_turned(heads[0], tokens, head_dim)

    @pytest.mark.parametrize(
        ("heads", "tokens", "head_dim", "bands"),
        [
            ((1, 1), 1024, 64, ("bands", 2, 4)),
            ((1, 1), 8192, 64, ("bands", 21, 4)),  # 64 + 43 + 22 + 1 programs.
            ((1, 1), 8321, 128, ("bands", 22, 3)),  # 66 + 44 + 22: all processors.
            ((1, 1), 16384, 64, ("halves", 64, 2)),  # 124 turns, if all started at once.
            ((1, 1), 16897, 64, None),  # 133 programs.
            ((4, 1), 4096, 128, ("halves", 16, 2)),
            ((12, 12), 1024, 64, ("halves", 4, 2)),
            ((15, 15), 1024, 64, None),  # 180 programs of few turns, for 132 processors.
            ((1, 1), 896, 64, None),
            ((1, 1), 4096, 256, None),
        ],
    )
    def test_turns_are_divided_where_all_programs_start_at_once(
        self, heads: tuple[int, int], tokens: int, head_dim: int, bands: object
    ) -> None:
        problem = self.problem(heads, tokens, head_dim=head_dim)
        assert backward_schedule.division(problem) == bands
        if bands is not None:
            assert (
                backward_schedule.heads_turned(problem)
                == backward_schedule.keys_turned(problem)
                == 0
            )

    @pytest.mark.parametrize(
        ("heads", "tokens"), [((1, 1), 8192), ((1, 1), 16384), ((2, 1), 4000), ((4, 4), 8192)]
    )
    def test_all_bands_are_launched(self, heads: tuple[int, int], tokens: int) -> None:
        pytest.importorskip("triton.experimental.gluon")
        q, k = (torch.empty(1, n, tokens, 64, dtype=torch.bfloat16) for n in heads)
        lse = torch.empty(1, heads[0], tokens)
        problem = describe(q, k, k, causal=True)
        plan = plans.plan_backward(
            BackwardPass(
                problem=problem, do=q, q=q, k=k, v=k, o=q, lse=lse, dlse=None, dq=q, dk=k, dv=k,
                scale=1.0,
            )
        )  # fmt: skip
        tiles = -(-tokens // 128)
        bands = backward_schedule.division(problem)
        programs = bands.programs(tiles) if bands else tiles
        assert plan.main.grid == (heads[0] * programs, 1, 1)
        turns = bands.turns if bands else backward_schedule.keys_turned(problem)
        assert turns > 0
        assert plan.main.integers[11] == turns
        names = plan.finish_dq.kernel.arg_names
        integers = names[names.index("stride_qb") : names.index("scale")]
        assert dict(zip(integers, plan.finish_dq.integers, strict=True))["turns_apart"] == turns
        rows = plan.finish_dq.constants["BLOCK_Q"]
        assert plan.finish_dq.grid == (-(-tokens // rows), heads[0], 1)

    @pytest.mark.parametrize(
        ("heads", "sequences", "order", "programs"),
        [(4, 2, "keys", 4 * 2 * 32), (32, 40, "heads", 32 * (32 + 40))],
    )
    def test_a_packed_batch_has_programs_for_all_of_its_tokens(
        self, heads: int, sequences: int, order: str, programs: int
    ) -> None:
        """Of 4,096; or where heads are turned in part, as if each sequence were the longest."""
        pytest.importorskip("triton.experimental.gluon")
        q = torch.empty(1, heads, 4096, 128, dtype=torch.bfloat16)
        lse = torch.empty(1, heads, 4096)
        problem = replace(describe(q, q, q, causal=True), packed=True, batch_size=sequences)
        plan = plans.plan_backward(
            BackwardPass(
                problem=problem, do=q, q=q, k=q, v=q, o=q, lse=lse, dlse=None, dq=q, dk=q, dv=q,
                scale=1.0,
            )
        )  # fmt: skip
        assert plan.main.constants["ORDER"] == order
        assert plan.main.grid == (programs, 1, 1)
        assert plan.row_statistics.grid == (32 + sequences, heads, 1)
        assert plan.finish_dq.grid == (256 + sequences, heads, 1)

    @pytest.mark.parametrize(
        ("heads", "tokens", "head_dim", "sections"),
        [
            ((32, 32), 65536, 128, ("sections", 256, 2)),
            ((32, 8), 65536, 96, ("sections", 256, 2)),  # Of 128 columns in memory.
            ((8, 8), 131072, 128, ("sections", 256, 4)),
            ((16, 16), 100000, 128, ("sections", 261, 3)),
            ((16, 16), 32768, 128, None),  # All queries of a head fit the cache.
            ((16, 16), 49152, 128, None),  # Nearer to one part than to two.
            ((4, 4), 65536, 128, ("sections", 256, 2)),
            ((3, 3), 65536, 128, None),  # 11.6 rounds.
            ((16, 16), 131072, 64, None),
            ((16, 16), 32768, 256, ("sections", 256, 2)),  # Of tiles of 64 keys.
            ((32, 32), 16384, 256, None),
        ],
    )
    def test_heads_that_do_not_fit_the_cache_have_sections(
        self, heads: tuple[int, int], tokens: int, head_dim: int, sections: object
    ) -> None:
        problem = self.problem(heads, tokens, head_dim=head_dim)
        assert backward_schedule.division(problem) == sections
        assert backward_schedule.division(replace(problem, packed=True)) is None
        if sections is not None and head_dim == 128:
            assert backward_schedule.halves_rolled(problem)

    def test_heads_have_sections_from_the_diagonal_on_alone(self) -> None:
        q, k = (
            torch.empty(1, 32, n, 128, dtype=torch.bfloat16, device="meta") for n in (65536, 65664)
        )
        assert backward_schedule.division(describe(q, q, q, causal=True)) is not None
        for problem in (
            describe(q, k, k, causal=True),
            describe(k, q, q, causal=True),
            describe(q, q, q, causal=False),
            describe(q, q, q, causal=True, window=65000),
        ):
            assert backward_schedule.division(problem) is None

    def test_sections_find_their_queries_in_the_cache(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the simulation, of half as many queries as a head has."""
        monkeypatch.setattr(backward_order, "PROCESSORS", 16)
        whole, divided = (
            backward_order.simulate(
                4, 64, backward_order.Order(group=1, divided=divided), 0.1, keep_visits=True
            )[1]
            for divided in (None, backward_schedule.Division("sections", 32, 2))
        )
        for visits in (whole, divided):
            assert Counter((visit.head, visit.turn) for visit in visits) == {
                (head, turn): turn + 1 for head in range(4) for turn in range(64)
            }
        assert backward_order.share_missed(whole, 32) > 0.5
        assert backward_order.share_missed(divided, 32) < 0.1

    def test_misses_are_of_what_was_used_last(self) -> None:
        visits = [
            backward_order.Visit(time=time, head=0, turn=turn)
            for time, turn in enumerate((0, 1, 0, 2, 1, 0))
        ]
        # With room for two only the second visit of 0 finds it; with room for three all later ones.
        assert backward_order.share_missed(visits, 2) == 5 / 6
        assert backward_order.share_missed(visits, 3) == 3 / 6

    @pytest.mark.parametrize(
        ("heads", "tokens", "head_dim", "shared"),
        [
            ((16, 16), 65536, 128, True),
            ((32, 8), 65536, 128, False),
            ((16, 16), 32768, 256, True),  # Of tiles of 64 keys.
        ],
    )
    def test_all_sections_are_launched(
        self, heads: tuple[int, int], tokens: int, head_dim: int, shared: bool
    ) -> None:
        pytest.importorskip("triton.experimental.gluon")
        q, k = (
            torch.empty(1, n, tokens, head_dim, dtype=torch.bfloat16, device="meta") for n in heads
        )
        lse = torch.empty(1, heads[0], tokens, device="meta")
        call = BackwardPass(
            problem=describe(q, k, k, causal=True), do=q, q=q, k=k, v=k, o=q, lse=lse, dlse=None,
            dq=q, dk=k, dv=k, scale=1.0,
        )  # fmt: skip
        plan = plans.plan_backward(call)
        assert (plan.main.constants["ORDER"], plan.main.constants["SHARED"]) == ("sections", True)
        assert plan.main.grid == (heads[0] * (512 + 256), 1, 1)
        assert plan.main.integers[10:12] == (heads[0], 256)
        assert plan.finish_dq.constants["SUMS"] == plan.row_statistics.constants["SUMS"] == 1
        # What is added to sums of other keys has none: memory is counted so.
        assert plans._plan_main(call, tokens, onto=True).constants["ORDER"] == "heads"
        allocated = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.workspace)
        given = AttentionProblem(
            batch_size=1, num_heads=heads[0], num_kv_heads=heads[1], q_len=tokens, kv_len=tokens,
            head_dim=head_dim, causal=True, dtype="bfloat16", device="cuda", needs_grad=True,
        )  # fmt: skip
        predicted = FlashTriton(name="flash_triton").backward_workspace(given)
        # But for counts, of 4 bytes for 64 rows.
        assert predicted == pytest.approx(allocated, rel=1e-3)
        of_keys = 2 * heads[1] * tokens * head_dim * 4
        longer = replace(given, kv_len=tokens + 128)
        assert predicted - FlashTriton(name="flash_triton").backward_workspace(longer) == (
            of_keys if shared else -2 * heads[1] * 128 * head_dim * 4
        )

    def test_a_packed_batch_has_no_bands(self) -> None:
        """Its sequences differ in length, and only the GPU knows how."""
        problem = self.problem((1, 1), 4096, head_dim=64)
        assert backward_schedule.division(problem) is not None
        assert backward_schedule.division(replace(problem, packed=True)) is None
        given = AttentionProblem(
            batch_size=1, num_heads=1, num_kv_heads=1, q_len=4096, kv_len=4096, head_dim=64,
            causal=True, dtype="bfloat16", device="cuda", needs_grad=True,
        )  # fmt: skip
        dense, packed = (
            FlashTriton(name="flash_triton").backward_workspace(replace(given, packed=packed))
            for packed in (False, True)
        )
        # Three more sums of dq, and those of dk and dv.
        assert dense - packed == (3 + 2) * 4096 * 64 * 4

    def test_a_window_that_hides_nothing_is_predicted_as_none(self) -> None:
        backend = FlashTriton(name="flash_triton")
        given = AttentionProblem(
            batch_size=1, num_heads=1, num_kv_heads=1, q_len=4096, kv_len=4096, head_dim=128,
            causal=True, dtype="bfloat16", device="cuda", needs_grad=True,
        )  # fmt: skip
        wide, narrow = (replace(given, window=window) for window in (4096, 4095))
        assert backend.backward_workspace(wide) == backend.backward_workspace(given)
        assert backend.backward_workspace(narrow) < backend.backward_workspace(given) / 5

    def test_turns_are_divided_from_the_diagonal_on_alone(self) -> None:
        q, k = (torch.empty(1, 1, n, 64, dtype=torch.bfloat16, device="meta") for n in (4096, 4224))
        assert backward_schedule.division(describe(q, q, q, causal=True)) is not None
        assert backward_schedule.division(describe(q, k, k, causal=True)) is None
        assert backward_schedule.division(describe(k, q, q, causal=True)) is None
        assert backward_schedule.division(describe(q, q, q, causal=False)) is None
        assert backward_schedule.division(describe(q, q, q, causal=True, window=4000)) is None

    def test_none_is_turned_in_part_where_sums_of_dq_are_large(self) -> None:
        q, k = (
            torch.empty(1, 4, n, 128, dtype=torch.bfloat16, device="meta") for n in (8320, 8192)
        )
        assert backward_schedule.keys_turned(describe(q, k, k, causal=True)) == 0
        assert backward_schedule.keys_turned(describe(k, q, q, causal=True)) == 33

    @pytest.mark.parametrize("cache_mib", [50, 60])
    def test_what_is_turned_in_part_does_not_depend_on_the_cache(
        self, monkeypatch: pytest.MonkeyPatch, cache_mib: int
    ) -> None:
        """Predictions of memory do not ask the GPU."""
        properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=cache_mib << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        assert backward_schedule.keys_turned(self.problem((4, 4), 8192)) == 33
        # Of 60 MiB four heads would be one group, and all of them turned.
        assert backward_schedule.keys_turned(self.problem((4, 4), 10240)) == 0

    @pytest.mark.parametrize(
        ("heads", "onto", "planned"),
        [((5, 5), False, ("keys", 5, 26)), ((5, 5), True, ("heads", 4, 5)),
         ((16, 16), False, ("heads", 4, 4)), ((2, 2), False, ("halves", 2, 32)),
         ((2, 2), True, ("none", 4, 0))],
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
        assert (main.constants["ORDER"], *main.integers[10:12]) == planned

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
            assert (
                backward_schedule.heads_turned(problem)
                == backward_schedule.keys_turned(problem)
                == 0
            )

    @pytest.mark.parametrize(
        ("heads", "head_dim", "apart"),
        [(8, 128, True), (8, 72, True), (8, 64, False), (17, 128, False)],
    )
    def test_halves_are_added_apart_in_few_rounds(
        self, heads: int, head_dim: int, apart: bool
    ) -> None:
        """8 heads have 512 programs, 17 have 1,088; up to 64 columns halves are added at once."""
        problem = self.problem((heads, heads), 8192, head_dim=head_dim)
        assert backward_schedule.halves_apart(problem) is apart
