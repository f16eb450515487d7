"""Kernel profiles of real steps: categories, ranges, ranks, and the whole command."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_traces import PHASES, write_trace
from profiles import TINY, case_of, rows_of, run, table_of
from ranks import on_ranks
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.profilers.kernels import profile_trace
from harness.profilers.kernels import summary as kernel_summary
from harness.profilers.kernels.categories import (
    Cost,
    kernel_category,
    operator_category,
    operator_cost,
)
from harness.profilers.kernels.chrome_trace import read_chrome_trace
from harness.profilers.kernels.kernel_runs import runs_of
from harness.profilers.kernels.profile_trace import ProfileTrace
from harness.profilers.kernels.summary import merge, summarise
from harness.profilers.kernels.torch_profiler import TorchProfiler
from harness.profilers.module_ranges import RangeTimer, ranges_on
from harness.render.figure import draw
from harness.store.record import Record
from kernels.ranges import named_range, ranges_made_by
from models.transformer import Transformer


class TestCategories:
    @pytest.mark.parametrize(
        ("name", "category"),
        [
            ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "matmul"),
            ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN", "matmul"),
            ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x256_8x4_nn_align1>", "matmul"),
            ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>", "attention"),
            ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
            ("void (anonymous namespace)::softmax_warp_forward<float, float, 10>", "softmax"),
            ("void at::native::cunn_SoftMaxForward<8, float, float>", "softmax"),
            ("void at::native::vectorized_layer_norm_kernel<float>", "normalisation"),
            ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "elementwise"),
            ("triton_poi_fused_mul_silu_3", "elementwise"),
            ("triton_per_fused__softmax_2", "softmax"),
            ("triton_red_fused_add_sum_1", "reduction"),
            ("void at::native::reduce_kernel<512, 1, ReduceOp<float, sum_functor>>", "reduction"),
            ("Memcpy DtoD (Device -> Device)", "copy"),
            ("Memset (Device)", "copy"),
            ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
            ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", "communication"),
        ],
    )
    def test_kernels_of_cuda_by_name(self, name: str, category: str) -> None:
        assert kernel_category(name) == category

    def test_a_known_program(self) -> None:
        x, w = torch.randn(64, 32, requires_grad=True), torch.randn(32, 16)
        with profile(activities=[ProfilerActivity.CPU]) as observed:
            y = x @ w
            y = F.softmax(y, -1)
            y = F.layer_norm(y, (16,))
            y = y * 2 + torch.sigmoid(y)
            z = y.clone().sum() + y.mean()
            F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 4) for _ in range(3)))
            z.backward()
        found = Counter(operator_category(event.name) for event in observed.events())
        # Of x @ w the composite and its kernel; its gradient.
        assert found["matmul"] >= 3
        for category in ("softmax", "normalisation", "elementwise", "copy", "reduction"):
            assert found[category] >= 2, category
        assert found["attention"] >= 1

    def test_flops_by_hand(self) -> None:
        floats = ["float"] * 3
        addmm = operator_cost("aten::addmm", [[4], [8, 16], [16, 4]], floats)
        assert addmm is not None
        assert (addmm.flops, addmm.bytes) == (1024.0, 4.0 * (4 + 128 + 64 + 32))
        bmm = operator_cost("aten::bmm", [[3, 8, 16], [3, 16, 4]], ["c10::BFloat16"] * 2)
        assert bmm is not None
        assert (bmm.flops, bmm.bytes) == (3072.0, 2.0 * 3 * (128 + 64 + 32))
        softmax = operator_cost("aten::_softmax", [[8, 16], [], []], ["float", "Scalar", "Scalar"])
        assert softmax is not None
        assert (softmax.flops, softmax.bytes) == (640.0, 1024.0)
        assert operator_cost("aten::copy_", [[8]], ["float"]) is None


class TestRanges:
    def test_nothing_is_left_when_profiling_is_off(self) -> None:
        case = case_of(*TINY)
        assert case.model is not None
        model = Transformer(case.model, case.attention)
        entered: list[str] = []

        def make(name: str) -> Any:
            entered.append(name)
            return record_function(name)

        tokens = torch.zeros(1, 4, dtype=torch.int64)
        with ranges_on(model, make):
            model(tokens, torch.arange(4))
        block = ["norm", "attention", "q_proj", "k_proj", "v_proj", "o_proj"]
        block += ["norm", "feed-forward", "w1", "w3", "w2"]
        expected = ["embedding", "block 0", *block, "block 1", *block, "norm", "head"]
        assert entered == expected
        for module in model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        model(tokens, torch.arange(4))
        assert entered == expected
        assert named_range("a") is named_range("b")

    def test_compiled_code_is_left_alone(self) -> None:
        entered: list[str] = []
        with ranges_on(torch.nn.Linear(2, 2), entered.append, compiled=True):  # type: ignore[arg-type]
            assert named_range("a") is named_range("b")
        assert entered == []

    def test_ranges_end_with_the_profile(self) -> None:
        with ranges_made_by(record_function):
            assert isinstance(named_range("a"), record_function)
        assert not isinstance(named_range("a"), record_function)


def test_a_profiler_sees_phases_that_follow_each_other() -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def make(name: str) -> Iterator[None]:
        seen.append(name)
        yield
        seen.append(f"end of {name}")

    timer = RangeTimer(torch.device("cpu"), make, on_end=lambda name: seen.append(f"after {name}"))
    with timer.phases("both") as begins:
        begins("first")
        begins("second")
    assert seen == [
        *("both", "first", "end of first", "after first"),
        *("second", "end of second", "after second", "end of both", "after both"),
    ]


def test_the_cost_of_a_composite_is_counted_once_however_long_its_parts_take() -> None:
    """By FLOPs: a busy machine stops any operator in the middle."""
    trace = ProfileTrace(phases=("forward",))
    trace.costs += [Cost(flops=640.0, bytes=1.0), Cost(flops=1024.0, bytes=2.0)]

    def operator(name: str, start: float, duration: float, cost: int) -> None:
        trace.operators.add(1, start, duration, trace.names.number(name), cost)

    for name, duration in ((profile_trace.STEP, 100.0), ("forward", 99.0)):
        trace.ranges.add(1, 0.0, duration, trace.names.number(name), 0)
    # Most of the time lies outside the kernel, within a wrapper without a cost of its own.
    operator("aten::softmax", 1.0, 20.0, 1)
    operator("aten::wrapper", 2.0, 8.0, 0)
    operator("aten::_softmax", 3.0, 1.0, 1)
    # Most of it lies in an operator that computes nothing.
    operator("aten::mm", 30.0, 20.0, 2)
    operator("aten::resolve_conj", 31.0, 18.0, 0)
    runs = runs_of(trace, profile_trace.windows_of(trace))
    assert {run.name: run.cost and run.cost.flops for run in runs} == {
        "aten::softmax": None,
        "aten::wrapper": None,
        "aten::_softmax": 640.0,
        "aten::mm": 1024.0,
        "aten::resolve_conj": None,
    }


PROFILED = ("profile=torch", "profile.steps=2")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("kernels")
    case = case_of(*TINY, *PROFILED, "attention=naive", "checkpoint=every_k")
    with pytest.MonkeyPatch.context() as patch:
        # Every kernel has a row, however long a busy machine takes for others.
        patch.setattr(kernel_summary, "SMALL", 0.0)
        return run(case, folder)


class TestProfile:
    def test_sums_agree(self, record: Record) -> None:
        summary = record.notes["kernel_profile"]
        assert summary["unit"] == "operator"
        total = sum(row["total_ms"] for row in summary["rows"])
        assert total == pytest.approx(2 * summary["phases"]["step"]["kernel_ms"])
        for name, phase in summary["phases"].items():
            rows = [row for row in summary["rows"] if name in ("step", row["phase"])]
            assert sum(row["total_ms"] for row in rows) == pytest.approx(2 * phase["kernel_ms"])
            assert sum(row["calls"] for row in rows) == 2 * phase["launches"]
            if name != "between":
                assert phase["busy_ms"] <= phase["wall_ms"]

    def test_flops_are_those_of_the_model(self, record: Record) -> None:
        """Matmuls by shapes against the model's formula, and one of two blocks once more."""
        rows = record.notes["kernel_profile"]["rows"]
        case = case_of(*TINY, "attention=naive")
        assert case.model is not None
        work = case.task.work(case)

        def flops(phase: str, again: bool) -> float:
            return sum(
                row["flops"] or 0
                for row in rows
                if (row["phase"], row["recomputed"], row["category"]) == (phase, again, "matmul")
            )

        # Explicit attention computes the masked half as well.
        pairs = 4 * 2 * case.model.num_heads * 32**2 * case.model.head_dim * 2
        assert flops("forward", False) == 2 * (work["forward"].flops + pairs / 2)
        assert flops("backward", False) == 2 * (work["backward"].flops + pairs)
        head = 2 * 2 * 32 * case.model.d_model * case.model.vocab_size
        block = (work["forward"].flops + pairs / 2 - head) / 2
        assert flops("backward", True) == 2 * block

    def test_tables(self, record: Record) -> None:
        shares = table_of("kernel_categories", record).rows
        columns = [name for name in shares if name.endswith("_share")]
        assert shares[columns].sum(axis=1).tolist() == pytest.approx([1.0] * len(shares))
        assert shares["phase"].tolist() == ["forward", "backward", "optimizer", "step"]
        kernels = table_of("kernels", record).rows
        assert kernels["share"].sum() == pytest.approx(1.0)
        phases = table_of("kernel_phases", record).rows.set_index("phase")
        measured = record.phases["step"].samples_ms[0][0]
        assert phases.loc["step", "overhead"] == pytest.approx(
            record.notes["kernel_profile"]["phases"]["step"]["wall_ms"] / measured - 1
        )
        top = rows_of(table_of("top_kernels", record))
        calls = {row["calls"] for row in top if row["kernel"] == "aten::mm"}
        # 7 in each of two blocks, and the head; twice that backward, and 7 again.
        assert calls <= {"15.0", "37.0", "52.0"}
        assert calls
        parts = table_of("attention_parts", record).rows.iloc[0]
        assert parts["flops_ratio"] == 5 / (4 * 32)
        assert parts["softmax_ms"] > 0

    def test_figures(self, record: Record) -> None:
        for name in ("kernel_shares", "kernel_roofline"):
            drawn = draw(name, build_frame([record]))
            assert drawn is not None
            assert b"matmul" in drawn[2]

    def test_measured_before_it_is_profiled(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[dict[str, list[float]]] = []

        def look(self: Any, case: Any, bench: Bench, program: Program) -> None:
            seen.append({name: list(ms) for name, ms in bench.outcome.samples_ms.items()})
            program.step(PhaseTimer(bench.device))

        monkeypatch.setattr(TorchProfiler, "run", look)
        record = run(case_of(*TINY, *PROFILED), tmp_path)
        (samples,) = seen
        assert samples == {name: phase.samples_ms[0] for name, phase in record.phases.items()}
        assert "step" in samples


def profile_on_rank(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """A step that multiplies as often as the rank's number says, under the profiler."""
    rank = dist.get_rank(group)
    bench = Bench(
        device=torch.device("cpu"),
        rank=rank,
        world_size=group.size(),
        vote_group=group,
        artifacts=Path(folder),
    )
    x = torch.randn(16, 16)

    def step(timer: PhaseTimer) -> None:
        with timer.phase("forward"):
            for _ in range(rank + 1):
                x @ x
            dist.all_reduce(x.clone(), group=group)

    case = case_of("task=attention", "seq_len=16", "profile=torch")
    TorchProfiler(name="torch", steps=1).run(case, bench, Program(step=step))
    merged: dict[str, Any] = bench.outcome.notes["kernel_profile"]
    return merged


class TestRanks:
    def test_one_file_each_and_one_table(self, tmp_path: Path) -> None:
        first, second = on_ranks(2, profile_on_rank, str(tmp_path))
        assert first == second
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [f"kernels-rank{rank}.trace.json.gz" for rank in range(2)]
        assert (first["ranks"], len(first["kernel_ms_by_rank"])) == (2, 2)
        calls = sum(row["calls"] for row in first["rows"] if row["kernel"] == "aten::mm")
        assert calls == 3
        assert any(row["category"] == "communication" for row in first["rows"])

    def test_merging_adds_up(self, tmp_path: Path) -> None:
        one = summarise(read_chrome_trace(write_trace(tmp_path / "t.json"), PHASES), "torch")
        merged = merge([one, one])
        assert merged["phases"] == one["phases"]
        for row, twice in zip(one["rows"], merged["rows"], strict=True):
            assert twice["total_ms"] == pytest.approx(2 * row["total_ms"])
            assert twice["calls"] == 2 * row["calls"]


def test_steps_are_positive() -> None:
    with pytest.raises(ValueError, match=r"profile\.steps=0: must be at least 1"):
        case_of(*TINY, "profile=torch", "profile.steps=0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_of_a_gpu(tmp_path: Path) -> None:
    size = ("model=small", "seq_len=256", "batch_size=4", "attention=naive", *PROFILED)
    case = case_of(*size, "task.warmup_steps=3", "task.measure_steps=5", device="cuda")
    record = run(case, tmp_path)
    summary = record.notes["kernel_profile"]
    assert summary["unit"] == "kernel"
    kernels = {(row["phase"], row["category"]): row for row in summary["rows"] if row["range"]}
    for phase in ("forward", "backward"):
        for category in ("matmul", "softmax", "normalisation", "elementwise"):
            assert (phase, category) in kernels
    measured = sorted(record.phases["step"].samples_ms[0])[2]
    # Kernels of one stream cannot take longer than the step that they make up.
    assert 0.3 * measured < summary["phases"]["step"]["busy_ms"] < 1.05 * measured
    known = sum(row["total_ms"] for row in summary["rows"] if row["category"] != "other")
    assert known > 0.98 * sum(row["total_ms"] for row in summary["rows"])
