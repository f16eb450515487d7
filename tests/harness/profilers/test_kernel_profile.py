"""Kernel profiles: traces written by hand, kernels of known programs, and sums that must agree."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sqlite3
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiles import TINY, case_of, rows_of, run, table_of
from ranks import on_ranks
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.bench.program import Program
from harness.profilers.kernels import nsight
from harness.profilers.kernels import summary as kernel_summary
from harness.profilers.kernels.categories import kernel_category, operator_category, operator_cost
from harness.profilers.kernels.chrome_trace import read_chrome_trace, trace_events
from harness.profilers.kernels.nsight_export import read_nsight_export
from harness.profilers.kernels.summary import merge, summarise
from harness.profilers.kernels.torch_profiler import TorchProfiler
from harness.profilers.module_ranges import RANGES, RangeTimer, ranges_on
from harness.render.figure import draw
from harness.run.workers.worker import why_unsupported
from harness.store.record import Record
from kernels.ranges import named_range, ranges_made_by
from models.transformer import Transformer

Rows = list[dict[str, Any]]


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur} | (
        {"args": args} if args else {}
    )


def launched(number: int, moment: float, name: str, start: float, dur: float, tid: int = 1) -> Rows:
    """A launch on the host and its kernel on the device."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", moment, 2, tid, correlation=number),
        span("kernel", name, start, dur, 7, correlation=number, stream=7),
    ]


def link(number: int, forward: float, backward: float) -> Rows:
    ends = [("s", forward, 1), ("f", backward, 2)]
    return [
        {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 9, "tid": tid, "ts": ts}
        for ph, ts, tid in ends
    ]


GEMM, SOFTMAX, NCCL = "sm90_xmma_gemm_f32f32", "softmax_warp_forward", "ncclDevKernel_AllReduce"

PHASES = ("forward", "backward", "optimizer")

MM = {"Input Dims": [[8, 16], [16, 4]], "Input type": ["float", "float"]}

BY_HAND = [
    span("user_annotation", "warm-up", 0, 90),
    *launched(1, 10, GEMM, 20, 50),
    span("user_annotation", "step", 100, 500),
    span("user_annotation", "ProfilerStep#1", 100, 500),
    span("user_annotation", "forward", 110, 100),
    span("user_annotation", "block 0", 112, 40),
    span("user_annotation", "attention", 113, 30),
    span("cpu_op", "aten::linear", 114, 12),
    span("cpu_op", "aten::mm", 115, 10, **MM),
    # Runs when the host is in the backward phase: what counts is when it was launched.
    *launched(2, 117, GEMM, 230, 30),
    span("user_annotation", "softmax", 130, 10),
    span("cpu_op", "aten::_softmax", 131, 8),
    *launched(3, 133, SOFTMAX, 260, 10),
    span("user_annotation", "block 11", 155, 40),
    span("user_annotation", "attention", 156, 30),
    span("cpu_op", "aten::mm", 160, 10, **MM),
    *launched(4, 162, GEMM, 270, 40),
    span("user_annotation", "backward", 220, 200),
    # Autograd's own thread, where no range is open.
    span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 230, 60, 2),
    span("cpu_op", "MmBackward0", 232, 50, 2),
    span("cpu_op", "aten::mm", 234, 10, 2, **MM),
    *launched(5, 236, GEMM, 310, 80, 2),
    *link(1, 115, 232),
    # A block computed again: inside a backward operator, and in ranges of its own.
    span("user_annotation", "checkpointed", 250, 20, 2),
    span("user_annotation", "attention", 252, 10, 2),
    span("cpu_op", "aten::mm", 254, 6, 2, **MM),
    *launched(6, 255, GEMM, 390, 20, 2),
    # Two streams at once.
    span("cpu_op", "c10d::allreduce_", 300, 10, 2),
    *launched(7, 302, NCCL, 380, 40, 2),
    span("user_annotation", "optimizer", 430, 50),
    span("cpu_op", "aten::_fused_adamw_", 440, 10),
    *launched(8, 441, "multi_tensor_apply_kernel", 450, 50),
    *launched(9, 1000, GEMM, 1000, 1000),
]


def write_trace(path: Path, events: Rows = BY_HAND, *, end: str = "]}") -> Path:
    """As torch.profiler writes it: an object with more in it than events."""
    head = '{"schemaVersion": 1, "deviceProperties": [{"id": 0}],\n "traceEvents": [\n'
    text = head + ",\n".join(json.dumps(event, indent=1) for event in events) + end
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path


def by_place(summary: dict[str, Any]) -> dict[tuple[Any, ...], tuple[float, float]]:
    return {
        (row["phase"], row["range"], row["category"], row["recomputed"]): (
            row["calls"],
            row["total_ms"],
        )
        for row in summary["rows"]
    }


EXPECTED = {
    ("forward", "block/attention", "matmul", False): (2, 0.07),
    ("forward", "block/attention/softmax", "softmax", False): (1, 0.01),
    ("backward", "block/attention", "matmul", False): (1, 0.08),
    ("backward", "block/attention", "matmul", True): (1, 0.02),
    ("backward", "", "communication", False): (1, 0.04),
    ("optimizer", "", "optimizer", False): (1, 0.05),
}


class TestTrace:
    @pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
    def test_phases_and_ranges_by_hand(self, tmp_path: Path, name: str) -> None:
        summary = summarise(read_chrome_trace(write_trace(tmp_path / name), PHASES), "torch")
        found = by_place(summary)
        assert found.keys() == EXPECTED.keys()
        for key, (calls, total) in EXPECTED.items():
            assert found[key] == (calls, pytest.approx(total)), key
        assert (summary["unit"], summary["steps"]) == ("kernel", 1)
        step = summary["phases"]["step"]
        # From 230 to 420 and 450 to 500 something runs; the two streams overlap from 380 to 410.
        assert step == {
            "kernel_ms": pytest.approx(0.27),
            "launches": 7,
            "busy_ms": pytest.approx(0.24),
            "wall_ms": pytest.approx(0.5),
        }
        # The device is at the forward pass until 310, a hundred longer than the host.
        walls = {name: phase["wall_ms"] for name, phase in summary["phases"].items()}
        assert walls == {
            "forward": pytest.approx(0.2),
            "backward": pytest.approx(0.11),
            "optimizer": pytest.approx(0.07),
            "step": pytest.approx(0.5),
        }
        assert summary["phases"]["forward"]["launches"] == 3

    def test_flops_and_bytes_are_the_operators(self, tmp_path: Path) -> None:
        summary = summarise(read_chrome_trace(write_trace(tmp_path / "t.json"), PHASES), "torch")
        (row,) = [row for row in summary["rows"] if row["recomputed"]]
        assert row["flops"] == 2 * 8 * 16 * 4
        assert row["bytes"] == 4 * (8 * 16 + 16 * 4 + 8 * 4)

    def test_without_a_step(self, tmp_path: Path) -> None:
        events = [event for event in BY_HAND if event["name"] != "step"]
        with pytest.raises(ValueError, match="no range called step"):
            summarise(read_chrome_trace(write_trace(tmp_path / "t.json", events), PHASES), "torch")

    @pytest.mark.parametrize("end", ["", ',\n{"ph": "X", "cat": "kern'])
    def test_a_trace_that_ends_early(self, tmp_path: Path, end: str) -> None:
        path = write_trace(tmp_path / "cut.json", end=end)
        with pytest.raises(ValueError, match=r"cut\.json: not a whole Chrome trace"):
            list(trace_events(path))

    def test_memory_is_a_part_of_the_file(self, tmp_path: Path) -> None:
        """Bytes per event, of which torch.profiler writes 300 to 500, hold for any size."""
        peaks = []
        for repeats in (200, 600):
            shifted = (
                {**event, "ts": event["ts"] + 2000 * index} | _renumbered(event, index)
                for index in range(repeats)
                for event in BY_HAND
            )
            path = write_trace(tmp_path / f"{repeats}.json", list(shifted))
            tracemalloc.start()
            summary = summarise(read_chrome_trace(path, PHASES), "torch")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
            assert summary["steps"] == repeats
            assert summary["phases"]["step"]["launches"] == 7
        assert (peaks[1] - peaks[0]) / (400 * len(BY_HAND)) < 100
        # It is decoded a chunk at a time.
        assert peaks[1] < 8 * 2**20


def _renumbered(event: dict[str, Any], index: int) -> dict[str, Any]:
    if event["cat"] == "fwdbwd":
        return {"id": event["id"] + 100 * index}
    if "correlation" in event.get("args", {}):
        number = event["args"]["correlation"] + 100 * index
        return {"args": {**event["args"], "correlation": number}}
    return {}


class TestNsys:
    def export(self, path: Path) -> Path:
        """The same program as Nsight Systems exports it, in nanoseconds."""
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE StringIds (id INTEGER, value TEXT)")
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL "
            "(start INTEGER, end INTEGER, correlationId INTEGER, demangledName INTEGER)"
        )
        database.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME "
            "(start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER)"
        )
        database.execute(
            "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, "
            "text TEXT, textId INTEGER, globalTid INTEGER)"
        )
        strings: dict[str, int] = {}
        sequences = {115.0: 5, 230.0: 5, 232.0: 5}
        for event in BY_HAND:
            times = (int(1e3 * event["ts"]), int(1e3 * (event["ts"] + event.get("dur", 0))))
            name, kind = event["name"], event["cat"]
            number = event.get("args", {}).get("correlation")
            if kind in ("kernel", "cuda_runtime"):
                strings.setdefault(name, len(strings))
                table = "KERNEL" if kind == "kernel" else "RUNTIME"
                last = (number, strings[name]) if kind == "kernel" else (event["tid"], number)
                database.execute(
                    f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} VALUES (?, ?, ?, ?)", (*times, *last)
                )
            elif kind in ("cpu_op", "user_annotation") and not name.startswith("ProfilerStep"):
                if kind == "cpu_op":
                    name += f", seq = {sequences.get(float(event['ts']), 99)}, op_id = 3"
                    name = name.replace(", seq = 99", "")
                # Registered strings are known by number, others are spelled out.
                text, place = (name, None) if len(name) % 2 else (None, 1000 + len(strings))
                if place is not None:
                    strings[f"#{len(strings)}"] = place
                    database.execute("INSERT INTO StringIds VALUES (?, ?)", (place, name))
                database.execute(
                    "INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, ?, ?, ?)",
                    (*times, text, place, event["tid"]),
                )
        known = [(n, name) for name, n in strings.items() if not name.startswith("#")]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", known)
        database.commit()
        database.close()
        return path

    def test_the_same_table_as_from_torch(self, tmp_path: Path) -> None:
        trace = read_nsight_export(self.export(tmp_path / "x.sqlite"), PHASES, RANGES)
        found = by_place(summarise(trace, "nsys"))
        assert found.keys() == EXPECTED.keys()
        for key, (calls, total) in EXPECTED.items():
            assert found[key] == (calls, pytest.approx(total)), key

    def test_what_is_no_export(self, tmp_path: Path) -> None:
        path = tmp_path / "x.sqlite"
        path.write_text("no database at all, and long enough to see that")
        with pytest.raises(ValueError, match=r"x\.sqlite: not an export of Nsight Systems"):
            read_nsight_export(path, PHASES, RANGES)
        sqlite3.connect(tmp_path / "empty.sqlite").close()
        with pytest.raises(ValueError, match="no kernel was captured"):
            read_nsight_export(tmp_path / "empty.sqlite", PHASES, RANGES)

    def test_it_runs_the_case_under_nsys_and_reads_what_that_wrote(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a program in place of nsys that notes how it was called."""
        ready = self.export(tmp_path / "ready.sqlite")
        program = tmp_path / "nsys"
        program.write_text(
            f"#!{sys.executable}\nimport json, shutil, sys\n"
            f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps(sys.argv[1:]) + '\\n')\n"
            "if sys.argv[1] == 'export':\n"
            "    out = [a for a in sys.argv if a.startswith('--output=')][0][9:]\n"
            f"    shutil.copy({str(ready)!r}, out)\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        case = case_of(*TINY, "profile=nsys")
        bench = Bench(device=torch.device("cpu"), artifacts=tmp_path / "kept")
        case.profile.after(case, bench)  # type: ignore[union-attr]
        assert bench.outcome.notes["kernel_profile"]["tool"] == "nsys"
        calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
        assert [call[0] for call in calls] == ["profile", "export"]
        assert "--capture-range=cudaProfilerApi" in calls[0]
        assert calls[0][-2] == "harness.profilers.kernels.nsight_child"
        program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no permission')\n")
        with pytest.raises(RuntimeError, match="nsys profile ended with code 1: no permission"):
            case.profile.after(case, bench)  # type: ignore[union-attr]

    def test_the_reason_where_it_cannot_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = case_of(*TINY, "profile=nsys")
        assert "profile=torch works on a CPU" in str(why_unsupported(case))
        monkeypatch.setattr(nsight.shutil, "which", lambda name: None)
        case.device = "cuda"
        assert "nsys is not on the PATH" in str(why_unsupported(case))

    def test_one_process_only(self) -> None:
        with pytest.raises(ValueError, match="profile=nsys: watches one process"):
            case_of(*TINY, "profile=nsys", "parallel=ddp_bucketed")


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
