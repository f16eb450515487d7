"""From records to a frame: statistics, rates, memory and marks against hand-computed values."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from omegaconf import OmegaConf
from records import ENVIRONMENT, in_rounds, make_record, make_strategy_record
from status_examples import step_samples

from harness.analysis.frame import build_frame
from harness.analysis.stats import by_round, quartiles, slowest_rank
from harness.cases.hardware import find_hardware
from harness.paths import config_files
from harness.render.files import to_markdown
from harness.render.table import TABLES, build_table
from harness.statuses import STATUSES


class TestStatistics:
    def test_slowest_rank_is_taken_per_iteration_and_truncated(self) -> None:
        assert slowest_rank([[1.0, 5.0, 2.0], [3.0, 4.0]]) == [3.0, 5.0]

    def test_frame_matches_the_standard_library(self) -> None:
        samples = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6]
        row = build_frame([make_record(samples_ms={"step": [samples]})]).iloc[0]
        assert row["median_ms"] == statistics.median(samples)
        assert row["mean_ms"] == pytest.approx(statistics.mean(samples))
        assert row["std_ms"] == pytest.approx(statistics.stdev(samples))
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        assert row["iqr_ms"] == pytest.approx(third - first)
        assert quartiles(samples) == pytest.approx((first, third))
        assert row["samples_ms"] == samples

    def test_samples_are_split_into_rounds(self) -> None:
        assert by_round([1.0, 2.0, 3.0], [2, 1]) == [[1.0, 2.0], [3.0]]
        assert by_round([1.0, 2.0, 3.0], [2, 2]) == [[1.0, 2.0, 3.0]]
        assert by_round([], []) == []
        record = in_rounds(make_record(dp=2, samples_ms={"step": [[1.0, 5.0], [3.0, 4.0]]}), 3)
        row = build_frame([record]).iloc[0]
        assert row["rounds_ms"] == [[3.0, 5.0]] * 3
        assert row["round_processes"] == [0, 1, 2]


class TestFrame:
    def test_rates_follow_from_the_median(self) -> None:
        record = make_record(
            samples_ms={"step": [[100.0, 200.0, 300.0]]}, flops=98.94e12, seq_len=512, batch_size=4
        )
        row = build_frame([record]).iloc[0]
        assert row["tflops"] == pytest.approx(494.7)
        assert row["mfu"] == pytest.approx(0.5)
        assert row["tokens_per_s"] == pytest.approx(512 * 4 / 0.2)

    def test_ranks_multiply_tokens_and_the_slowest_counts(self) -> None:
        record = make_record(
            dp=2, samples_ms={"step": [[100.0, 100.0], [200.0, 50.0]]}, seq_len=500, batch_size=1
        )
        row = build_frame([record]).iloc[0]
        assert row["samples_ms"] == [200.0, 100.0]
        assert row["tokens_per_s"] == pytest.approx(2 * 500 / 0.15)

    def test_memory_is_that_of_the_fullest_rank(self) -> None:
        memory = [
            {"source": "cuda", "peak_allocated_bytes": size * 2**30, "before_backward_bytes": 2**20}
            for size in (1, 3)
        ]
        row = build_frame([make_record(dp=2, memory=memory)]).iloc[0]
        assert row["peak_memory_gib"] == 3
        assert row["before_backward_mib"] == 1

    def test_unknown_hardware_leaves_mfu_blank(self) -> None:
        environment = {**ENVIRONMENT, "device_name": "NVIDIA H200 MIG 1g.18gb"}
        record = make_record(samples_ms={"step": [[1.0]]}, environment=environment)
        row = build_frame([record]).iloc[0]
        assert row["tflops"] > 0
        assert math.isnan(row["mfu"])

    @pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
    def test_only_ok_has_timing(self, status: str) -> None:
        record = make_record(samples_ms=step_samples(1, 2, 3), status=status, message="why")
        frame = build_frame([record])
        assert list(frame["phase"]) == ["forward", "backward", "optimizer", "step"]
        timing = ["median_ms", "mean_ms", "std_ms", "min_ms", "tokens_per_s", "tflops", "mfu"]
        assert frame[timing].isna().all(axis=None)
        assert frame["samples_ms"].map(len).sum() == 0
        assert set(frame["reason"]) == {"why"}

    @pytest.mark.parametrize(
        ("reasons", "expected"),
        [(["gpu_idle"], False), ([], False), (["gpu_idle", "hw_thermal_slowdown"], True)],
    )
    def test_idle_is_not_throttling(self, reasons: list[str], expected: bool) -> None:
        state = [{"before": {"throttle_reasons": []}, "after": {"throttle_reasons": reasons}}]
        assert bool(build_frame([make_record(device_state=state)])["throttled"].iloc[0]) is expected

    def test_same_name_with_other_sizes_gets_another_label(self) -> None:
        first, second = make_record(), make_record(seq_len=7)
        second.case["model"]["num_layers"] = 3
        labels = build_frame([first, second])["model"].unique()
        assert list(labels) == ["small(num_layers=12)", "small(num_layers=3)"]

    def test_groups_of_hybrid_sharding_are_always_named(self) -> None:
        """Also where all rows have the same, and none where weights are in one copy."""
        hybrid, plain = (
            make_strategy_record("fsdp", ms=4.0, shard_group=group) for group in (2, None)
        )
        assert set(build_frame([hybrid])["strategy"]) == {"fsdp(shard_group=2)"}
        assert set(build_frame([plain])["strategy"]) == {"fsdp"}

    def test_clipped_steps_are_told_apart(self) -> None:
        clipped, plain = make_record(samples_ms={"step": [[2.0]]}), make_record()
        clipped.case["task"]["clip_grad_norm"] = 0.5
        clipped.notes["gradient_norm"] = 7.25
        plain.case["task"].pop("clip_grad_norm", None)
        rows = [build_frame([record]).iloc[0] for record in (clipped, plain)]
        assert [row["clipping"] for row in rows] == ["norm 0.5", "none"]
        assert rows[0]["gradient_norm"] == 7.25

    def test_no_records_make_no_table(self) -> None:
        frame = build_frame([])
        assert all(build_table(name, frame) is None for name in TABLES.names())


class TestHardware:
    def test_every_file_is_complete_and_names_its_source(self) -> None:
        paths = list(config_files("hardware").values())
        assert paths
        for path in paths:
            values: Any = OmegaConf.load(path)
            hardware = find_hardware(values.match[0])
            assert hardware is not None
            assert hardware.name == values.name
            assert hardware.source
            assert set(hardware.peak_tflops) <= {"bfloat16", "float16", "tf32", "float32"}

    def test_variants_are_told_apart(self) -> None:
        sxm, pcie = find_hardware("NVIDIA H100 80GB HBM3"), find_hardware("NVIDIA H100 PCIe")
        assert sxm is not None
        assert pcie is not None
        assert sxm.peak_tflops["bfloat16"] == 989.4
        assert sxm.memory_bandwidth_gb_s == 3350
        assert pcie.peak_tflops["bfloat16"] < sxm.peak_tflops["bfloat16"]

    @pytest.mark.parametrize("name", [None, "", "Example CPU", "NVIDIA H200 MIG 1g.18gb"])
    def test_others_are_unknown(self, name: str | None) -> None:
        assert find_hardware(name) is None


class TestSlowStart:
    """A first pass that was not warm is said beside the mean that it spoils."""

    @pytest.mark.parametrize(
        ("samples", "rounds", "expected"),
        [
            ([10.0, 10.0, 10.0, 10.0], [4], False),
            ([10.0, 10.0, 10.0, 11.9], [4], False),
            ([12.1, 10.0, 10.0, 10.0], [4], True),
            # A slow pass in the middle is noise, unless a round starts with it.
            ([10.0, 10.0, 12.1, 10.0], [4], False),
            ([10.0, 10.0, 12.1, 10.0], [2, 2], True),
        ],
    )
    def test_marks_the_mean(self, samples: list[float], rounds: list[int], expected: bool) -> None:
        record = make_record(samples_ms={"step": [samples]}, rounds=rounds)
        frame = build_frame([record])
        assert bool(frame["slow_start"].iloc[0]) is expected
        table = build_table("benchmarking_script", frame)
        assert table is not None
        assert ("§" in to_markdown(table)) is expected
