# ruff: noqa: RUF001 - tables use typographic signs
"""The attention sweeps' tables and figures: cells against numbers typed by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox
from profiles import row_of
from records import ENVIRONMENT, Samples, in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.drawing.panels import whole_calls
from harness.render.figure import FIGURES, STYLE, draw
from harness.render.files import to_csv, to_markdown
from harness.render.palette import colour
from harness.render.table import build_table, finding_of
from harness.request.compose import compose_request
from harness.run import local
from harness.store.record import Record
from kernels import BACKENDS

GOLDEN = Path(__file__).parents[2] / "golden"


def samples(forward: float, backward: float) -> Samples:
    """Three samples per phase, the middle one the median."""
    values = {"forward": forward, "backward": backward, "forward_backward": forward + backward}
    return {name: [[value * 1.04, value, value * 0.96]] for name, value in values.items()}


def steady(both: float) -> Samples:
    """Samples without any spread."""
    return {
        "forward": [[both / 4] * 5],
        "backward": [[both * 3 / 4] * 5],
        "forward_backward": [[both] * 5],
    }


def call(attention: str, times: Samples | None = None, **options: Any) -> Record:
    """A record of attention alone; ``task`` options by keyword as ``task_packing=``."""
    task = {
        key.removeprefix("task_"): options.pop(key) for key in list(options) if key[:5] == "task_"
    }
    record = make_record(
        task="attention",
        mode=task.pop("mode", "forward_backward"),
        attention=attention,
        samples_ms=times,
        **options,
    )
    record.case["task"] |= task
    record.case_id += "".join(f"{key}{value}" for key, value in task.items())
    return record


@pytest.fixture
def by_length() -> pd.DataFrame:
    """Two lengths, with a backend out of memory, one that takes no float32, one not installed."""
    records = []
    for precision, factor in (("bf16", 1), ("fp32", 10)):
        for seq_len, time in ((1024, 1.0 * factor), (65536, 4000.0 * factor)):
            point = {"precision": precision, "seq_len": seq_len, "batch_size": 1}
            full = {"status": "oom", "message": "CUDA out of memory"}
            records.append(
                call("naive", **full, **point)
                if seq_len == 65536
                else call("naive", samples(time, 2 * time), **point)
            )
            records.append(call("flex", samples(time / 4, time / 2), **point))
            records.append(
                call("sdpa_flash", samples(time / 8, time / 4), **point)
                if precision == "bf16"
                else call("sdpa_flash", status="unsupported", message="no fp32", **point)
            )
            for name in ("flash_attn_2", "flash_attn_4"):
                missing = {"status": "unsupported", "message": "flash_attn is not installed"}
                records.append(call(name, **missing, **point))
    return build_frame(records)


class TestFlashBenchmarking:
    def test_cells(self, by_length: pd.DataFrame) -> None:
        table = build_table("flash_benchmarking", by_length)
        row = row_of(table, seq_len="1,024", precision="bf16")
        assert row["naive (ms)"] == "1.00 / 2.00 / 3.00 (4.0%)"
        assert row["flex (ms)"] == "0.250 / 0.500 / 0.750 (4.0%)"
        assert row["sdpa_flash (ms)"] == "0.125 / 0.250 / 0.375 (4.0%)"
        row = row_of(table, seq_len="65,536", precision="fp32")
        assert row["naive (ms)"] == "OOM"
        assert row["sdpa_flash (ms)"] == "unsupported"
        assert row["flex (ms)"] == "10,000 / 20,000 / 30,000 (4.0%)"

    def test_backends_that_run_nothing_are_named_below(self, by_length: pd.DataFrame) -> None:
        table = build_table("flash_benchmarking", by_length)
        assert table is not None
        assert not any("flash_attn" in column.header for column in table.columns)
        assert table.footnotes == [
            "Not supported here: flash_attn_2, flash_attn_4 (flash_attn is not installed)."
        ]

    def test_a_length_that_was_not_measured(self) -> None:
        frame = build_frame(
            [call("naive", samples(1, 2), seq_len=seq_len) for seq_len in (64, 128)]
            + [call("flex", samples(1, 2), seq_len=64)]
        )
        assert row_of(build_table("flash_benchmarking", frame), seq_len="128")["flex (ms)"] == "–"

    def test_forward_alone(self) -> None:
        frame = build_frame([call("naive", {"forward": [[1.0]]}, task_mode="forward")])
        table = build_table("flash_benchmarking", frame)
        assert row_of(table)["naive (ms)"] == "1.00 / – / –"

    def test_nothing_but_unsupported(self) -> None:
        frame = build_frame([call("flex", status="unsupported", message="no")])
        assert row_of(build_table("flash_benchmarking", frame))["flex (ms)"] == "unsupported"

    def test_a_csv_has_the_numbers_apart(self, by_length: pd.DataFrame) -> None:
        table = build_table("flash_benchmarking", by_length)
        assert table is not None
        header, *lines = to_csv(table).splitlines()
        names = header.split(",")
        first = dict(zip(names, lines[0].split(","), strict=True))
        assert first["flex_forward_median_ms"] == "2.5"
        assert first["flex_forward_backward_median_ms"] == "7.5"
        assert first["sdpa_flash_status"] == "unsupported"
        assert " / " not in "".join(lines)

    def test_throttled_cells_are_marked(self) -> None:
        state = [{"before": {}, "after": {"throttle_reasons": ["hw_slowdown"]}}]
        frame = build_frame(
            [call("naive", samples(1, 2), device_state=state), call("flex", samples(1, 2))]
        )
        row = row_of(build_table("flash_benchmarking", frame))
        assert row["naive (ms)"] == "1.00 / 2.00 / 3.00 (4.0%)†"
        assert row["flex (ms)"] == "1.00 / 2.00 / 3.00 (4.0%)"

    def test_golden_markdown(self, by_length: pd.DataFrame) -> None:
        table = build_table("flash_benchmarking", by_length)
        assert table is not None
        expected = (GOLDEN / "flash_benchmarking.md").read_text(encoding="utf-8")
        assert to_markdown(table) == expected


class TestLeaderboard:
    @pytest.fixture
    def frame(self) -> pd.DataFrame:
        missing = {"status": "unsupported", "message": "not installed"}
        compilation = {"compile_s": 1.5, "autotune_s": 12.25, "recompilations": 0}
        work = {"flops": 4e11}
        records = [
            call("naive", status="oom", message="full"),
            call("flash_attn_3", **missing),
            call("flash_triton", steady(8.0), **work, compilation=compilation),
            call("sdpa_cudnn", steady(4.0), **work),
            call("flex", steady(2.0), **work),
            call("sdpa_flash", steady(4.02), **work),
        ]
        return build_frame([in_rounds(record) for record in records])

    def test_against_cudnn(self, frame: pd.DataFrame) -> None:
        table = build_table("leaderboard", frame)
        row = row_of(table, attention="flex")
        assert (row["forward (ms)"], row["backward (ms)"], row["both (ms)"]) == (
            "0.500",
            "1.50",
            "2.00",
        )
        assert row["TFLOP/s"] == "200"
        assert row["ratio"] == "2.00×"
        assert row["interval"] == "2.00 to 2.00"
        assert row["verdict"] == "FASTER"
        assert row["baseline"] == "sdpa_cudnn"
        assert row_of(table, attention="flash_triton")["verdict"] == "SLOWER"
        assert row_of(table, attention="flash_triton")["ratio"] == "0.50×"
        assert row_of(table, attention="sdpa_flash")["verdict"] == "SAME"
        assert row_of(table, attention="sdpa_cudnn")["ratio"] == "–"

    def test_a_host_s_time_is_no_rate_of_a_kernel(self, frame: pd.DataFrame) -> None:
        table = build_table("leaderboard", frame)
        assert table is not None
        assert finding_of(table).endswith("rates are 50.0 to 200 TFLOP/s over all backends.")
        assert "Also UNCLEAR" not in table.caption
        records = [
            call("sdpa_cudnn", steady(4.0), flops=4e11),
            call("flex", steady(2.0), flops=4e11),
        ]
        phase = records[1].phases["forward_backward"]
        phase.host_ms, phase.device_ms = [[2.0] * len(phase.samples_ms[0])], [[1.0] * 3]
        table = build_table("leaderboard", build_frame([in_rounds(each) for each in records]))
        assert table is not None
        assert row_of(table, attention="flex")["verdict"] == "UNCLEAR"
        assert table.caption.count("Also UNCLEAR where, for either, the device waited") == 1
        assert finding_of(table) == (
            "Rates are 100 TFLOP/s over all backends but those that waited for their host."
        )

    def test_the_fastest_first_and_what_did_not_finish_last(self, frame: pd.DataFrame) -> None:
        table = build_table("leaderboard", frame)
        assert table is not None
        assert [row[0] for row in table.cells()] == [
            *("flex", "sdpa_cudnn", "sdpa_flash", "flash_triton", "naive"),
        ]
        assert row_of(table, attention="naive")["both (ms)"] == "OOM"
        assert table.footnotes == ["Not supported here: flash_attn_3 (not installed)."]

    def test_autotuning_is_apart(self, frame: pd.DataFrame) -> None:
        row = row_of(build_table("leaderboard", frame), attention="flash_triton")
        assert row["compile (s)"] == "1.50"
        assert row["autotune (s)"] == "12.2"

    def test_points_are_ranked_and_compared_apart(self) -> None:
        """Compiled and direct calls, and two head dims: each has a fastest and a baseline."""
        frame = build_frame(
            call(
                name,
                steady(time * head_dim * (3 if compiled else 1)),
                head_dim=head_dim,
                task_compile=compiled,
            )
            for name, time in (("sdpa_cudnn", 2.0), ("flex", 1.0))
            for head_dim in (64, 128)
            for compiled in (False, True)
        )
        table = build_table("leaderboard", frame)
        assert table is not None
        assert [row[:3] for row in table.cells()] == [
            [head_dim, compiled, name]
            for head_dim in ("64", "128")
            for compiled in ("no", "yes")
            for name in ("flex", "sdpa_cudnn")
        ]
        headers = [column.header for column in table.columns]
        ratios = {row[headers.index("ratio")] for row in table.cells()}
        assert ratios == {"2.00×", "–"}

    def test_another_stands_in_for_cudnn(self) -> None:
        frame = build_frame([call("naive", steady(4.0)), call("flex", steady(2.0))])
        assert row_of(build_table("leaderboard", frame), attention="flex")["baseline"] == "naive"

    def test_forward_alone(self) -> None:
        frame = build_frame(
            call(name, {"forward": [[time] * 3]}, task_mode="forward")
            for name, time in (("sdpa_cudnn", 3.0), ("flex", 2.0))
        )
        table = build_table("leaderboard", frame)
        assert row_of(table, attention="flex")["ratio"] == "1.50×"
        assert "both (ms)" not in row_of(table, attention="flex")


class TestHeadDimAndGqa:
    def test_rates(self) -> None:
        frame = build_frame(
            call(
                "flex",
                samples(1, 4),
                task_num_kv_heads=kv_heads,
                head_dim=head_dim,
                flops=head_dim * 1e9,
            )
            for kv_heads in (16, 4)
            for head_dim in (64, 80)
        )
        table = build_table("head_dim_and_gqa", frame)
        row = row_of(table, head_dim="80", **{"KV heads": "4"})
        # 80 GFLOP in 1 and in 4 ms.
        assert row["flex (TFLOP/s)"] == "80.0 / 20.0 (4.0%)"
        assert table is not None
        assert len(table.rows) == 4

    def test_values_narrower_than_keys_have_a_column(self) -> None:
        frame = build_frame(
            call("flex", steady(1.0), head_dim=head_dim, task_value_dim=value_dim, flops=1e9)
            for head_dim, value_dim in ((64, None), (192, 128))
        )
        table = build_table("head_dim_and_gqa", frame)
        assert row_of(table, head_dim="64")["value_dim"] == "64"
        assert row_of(table, head_dim="192")["value_dim"] == "128"


class TestPacked:
    def test_rate_as_a_part_of_the_dense_one(self) -> None:
        frame = build_frame(
            call("flex", steady(time), task_packing=packing, flops=1e11)
            for packing, time in (("ragged", 5.0), ("none", 4.0), ("equal", 4.0))
        )
        table = build_table("packed", frame)
        assert table is not None
        layouts = [row[1] for row in table.cells()]
        assert layouts == ["dense", "packed equal", "packed ragged"]
        assert row_of(table, **{"batch layout": "packed ragged"})["of dense (%)"] == "80.0"
        assert row_of(table, **{"batch layout": "packed equal"})["of dense (%)"] == "100.0"
        assert row_of(table, **{"batch layout": "dense"})["of dense (%)"] == "–"

    def test_each_backend_has_its_own_dense_rate(self) -> None:
        frame = build_frame(
            call(name, steady(time), task_packing=packing)
            for name, times in (("flex", (4.0, 8.0)), ("sdpa_flash", (2.0, 2.5)))
            for packing, time in zip(("none", "ragged"), times, strict=True)
        )
        table = build_table("packed", frame)
        where = {"batch layout": "packed ragged"}
        assert row_of(table, attention="flex", **where)["of dense (%)"] == "50.0"
        assert row_of(table, attention="sdpa_flash", **where)["of dense (%)"] == "80.0"


class TestPoints:
    """Options that joined later, in tables that do not mention them."""

    def test_records_without_the_keys_read_as_before(self) -> None:
        frame = build_frame([call("naive", samples(1, 2), seq_len=64)])
        row = frame.iloc[0]
        assert (row["layout"], row["kv_len"], row["call_compiled"]) == ("dense", 64, False)
        table = build_table("attention_summary", frame)
        assert table is not None
        assert all(
            word not in table.caption for word in ("keys", "dense", "packed", "torch.compile")
        )

    @pytest.mark.parametrize(
        ("key", "values", "header", "cells"),
        [
            ("task_kv_len", (None, 4096), "keys", ["512", "4,096"]),
            ("task_packing", ("none", "ragged"), "batch layout", ["dense", "packed ragged"]),
            ("task_compile", (False, True), "torch.compile", ["no", "yes"]),
        ],
    )
    def test_a_key_that_varies_is_shown(
        self, key: str, values: tuple[Any, ...], header: str, cells: list[str]
    ) -> None:
        frame = build_frame(call("naive", samples(1, 2), **{key: value}) for value in values)
        table = build_table("attention_summary", frame)
        assert table is not None
        place = [column.header for column in table.columns].index(header)
        assert [row[place] for row in table.cells()] == cells

    def test_a_key_that_all_share_is_in_the_caption(self) -> None:
        options = {"task_packing": "ragged", "task_compile": True}
        table = build_table("cases", build_frame([call("naive", samples(1, 2), **options)]))
        assert table is not None
        assert "packed ragged batch" in table.caption
        assert "attention through torch.compile" in table.caption

    def test_rows_say_how_float32_was_multiplied(self) -> None:
        records = [call("flash_triton", samples(1, 2)), call("naive", samples(1, 2))]
        records[0].notes["float32_precision"] = "bf16x6"
        table = build_table("cases", build_frame(records))
        assert table is not None
        place = [column.header for column in table.columns].index("float32 by")
        shown = {row[0]: row[place] for row in table.cells()}
        assert shown["flash_triton"] == "bf16x6"
        assert shown["naive"] != "bf16x6"

    def test_intensity_is_flops_over_bytes(self) -> None:
        record = call("naive", samples(1, 2))
        record.work = {name: {"flops": 6e9, "bytes": 2e6, "tokens": 1} for name in record.work}
        frame = build_frame([record])
        assert set(frame["flops_per_byte"]) == {3000.0}
        assert set(frame["memory_bandwidth_gb_s"]) == {4800.0}


def build_figure(name: str, frame: pd.DataFrame) -> tuple[str, Figure] | None:
    with mpl.rc_context(STYLE):
        built = FIGURES[name].target(frame)
    return None if built is None else (built.caption, built.figure)


def with_bytes(record: Record, intensity: float) -> Record:
    for work in record.work.values():
        work["bytes"] = work["flops"] / intensity
    return record


class TestTflopsOverLength:
    def test_a_panel_per_point_with_the_rates(self, by_length: pd.DataFrame) -> None:
        built = build_figure("tflops_over_length", by_length)
        assert built is not None
        axes = built[1].get_axes()
        assert [axis.get_title() for axis in axes] == ["fp32", "bf16"]
        flex = next(line for line in axes[1].lines if line.get_color() == colour("flex"))
        assert list(flex.get_xdata()) == [1024, 65536]
        # 0.1 TFLOP in 0.75 and in 3000 ms.
        assert list(flex.get_ydata()) == pytest.approx([0.1 / 0.75e-3, 0.1 / 3.0])

    def test_lines_are_named_beside_the_last_point(self, by_length: pd.DataFrame) -> None:
        """A leader runs from the ends of the longest lines alone: elsewhere it looks like data."""
        built = build_figure("tflops_over_length", by_length)
        assert built is not None
        early = 0
        for axis in built[1].get_axes():
            lines = {str(line.get_label()): line for line in axis.lines}
            named = {name: line for name, line in lines.items() if not name.startswith("_")}
            names = {text.get_text(): text for text in axis.texts if text.get_text() in named}
            assert set(names) == set(named)
            last = max(line.get_xdata()[-1] for line in named.values())
            boxes = [item for item in axis.get_children() if isinstance(item, AnnotationBbox)]
            samples = {box.offsetbox.get_children()[0].get_color(): box for box in boxes}
            for name, line in named.items():
                assert names[name].get_color() == line.get_color() == colour(name)
                sample = samples[line.get_color()]
                assert sample.offsetbox.get_children()[0].get_marker() == line.get_marker()
                assert sample.xybox[1] == names[name].xy[1]  # type: ignore[attr-defined]
                assert sample.xy[0] == line.get_xdata()[-1]
                assert (sample.arrow_patch is None) == (sample.xy[0] < last)
                early += sample.xy[0] < last
        assert early

    @pytest.mark.parametrize("head_dims", [(64,), (64, 128)])
    def test_eleven_names_fit(self, head_dims: tuple[int, ...]) -> None:
        named = list(BACKENDS.given("look"))
        names = sorted(named, key=len, reverse=True)[:11]
        frame = build_frame(
            call(name, samples(1, 2), seq_len=seq_len, head_dim=head_dim)
            for name in names
            for seq_len in (64, 128)
            for head_dim in head_dims
        )
        built = build_figure("tflops_over_length", frame)
        assert built is not None
        with mpl.rc_context(STYLE):
            built[1].draw_without_rendering()
        whole = built[1].bbox
        for axis in built[1].get_axes():
            boxes = [text.get_window_extent() for text in axis.texts if text.get_text() in names]
            assert len(boxes) == 11
            assert all(whole.x0 <= box.x0 < box.x1 <= whole.x1 for box in boxes)
            heights = sorted((box.y0 + box.y1) / 2 for box in boxes)
            gaps = [above - below for below, above in itertools.pairwise(heights)]
            # Letters are four fifths of a line high.
            assert min(gaps) > 0.75 * max(box.height for box in boxes)

    def test_out_of_memory_is_marked(self, by_length: pd.DataFrame) -> None:
        built = build_figure("tflops_over_length", by_length)
        assert built is not None
        for axis in built[1].get_axes():
            (cross,) = [text for text in axis.texts if text.get_text() == "×"]
            assert cross.xy[0] == 65536  # type: ignore[attr-defined]
            assert cross.get_color() == colour("naive")

    @pytest.mark.parametrize(
        ("steps", "titles"),
        [
            # Fewer passes of the long sequence belong to the same line.
            ([(64, 30), (128, 12)], [""]),
            (
                [(64, 30), (128, 30), (64, 12), (128, 12)],
                ["12 measured steps", "30 measured steps"],
            ),
        ],
    )
    def test_steps_part_what_has_nothing_else(
        self, steps: list[tuple[int, int]], titles: list[str]
    ) -> None:
        records = [
            call("flex", samples(1, 2), seq_len=seq_len, task_measure_steps=number)
            for seq_len, number in steps
        ]
        built = build_figure("tflops_over_length", build_frame(records))
        assert built is not None
        axes = built[1].get_axes()
        assert [axis.get_title() for axis in axes] == titles
        assert [list(axis.lines[0].get_xdata()) for axis in axes] == [[64, 128]] * len(titles)

    def test_the_scale_that_panels_share_holds_the_fastest_of_all(self) -> None:
        """Later panels of a column are no slower than the first, whose limits they share."""
        records = [
            call("flex", samples(64 / head_dim, 64 / head_dim), seq_len=seq_len, head_dim=head_dim)
            for head_dim in (16, 32, 64, 128)
            for seq_len in (64, 128)
        ]
        built = build_figure("tflops_over_length", build_frame(records))
        assert built is not None
        axes = built[1].get_axes()
        assert len(axes) == 4
        for axis in axes:
            assert max(axis.lines[0].get_ydata()) < axis.get_ylim()[1]
            (label,) = (text for text in axis.texts if text.get_text() == "flex")
            assert 0 < label.xy[1] < axis.get_ylim()[1]  # type: ignore[attr-defined]

    def test_one_length_is_no_line(self) -> None:
        frame = build_frame([call("naive", samples(1, 2))])
        assert build_figure("tflops_over_length", frame) is None


class TestRoofline:
    def test_the_roof_of_an_h200(self) -> None:
        records = [
            with_bytes(call("flex", samples(1, 2), seq_len=seq_len), intensity)
            for seq_len, intensity in ((64, 500.0), (128, 1000.0))
        ]
        built = build_figure("roofline", build_frame(records))
        assert built is not None
        caption, figure = built
        assert "The line is the device's roof" in caption
        roof, flex = figure.get_axes()[0].lines
        x, y = roof.get_xdata(), roof.get_ydata()
        ridge = 989.4e12 / 4800e9
        assert x[1] == pytest.approx(ridge)
        assert list(y) == pytest.approx([x[0] * 4.8, 989.4, 989.4])
        assert list(flex.get_xdata()) == pytest.approx([500.0, 1000.0])
        # 0.1 TFLOP in 3 ms.
        assert list(flex.get_ydata()) == pytest.approx([0.1 / 3e-3] * 2)
        assert [text.get_text() for text in figure.get_axes()[0].texts] == [
            *("989 TFLOP/s", "4,800 GB/s", "flex")
        ]

    def test_an_unknown_device_has_none(self) -> None:
        environment = {**ENVIRONMENT, "device_name": "Somebody's GPU"}
        record = with_bytes(call("flex", samples(1, 2), environment=environment), 1000.0)
        built = build_figure("roofline", build_frame([record]))
        assert built is not None
        assert "No roof is drawn" in built[0]
        assert len(built[1].get_axes()[0].lines) == 0

    def test_nothing_to_place(self, by_length: pd.DataFrame) -> None:
        """Records whose bytes nobody counted."""
        assert build_figure("roofline", by_length) is None


class TestBothFigures:
    def test_whole_calls(self) -> None:
        """Both passes together, or forward where that is all; nothing twice."""
        forward = call("flex", {"forward": [[1.0]]}, task_mode="forward")
        frame = build_frame([call("naive", samples(1, 2)), forward, make_record()])
        rows = whole_calls(frame)
        assert list(rows["phase"]) == ["forward_backward", "forward"]

    @pytest.mark.parametrize("name", ["roofline", "tflops_over_length"])
    def test_same_records_same_bytes(self, name: str) -> None:
        records = [
            with_bytes(call(attention, samples(1, 2), seq_len=seq_len), 1000.0)
            for attention in ("naive", "flex")
            for seq_len in (64, 128)
        ]
        assert draw(name, build_frame(records)) == draw(name, build_frame(records))

    @pytest.mark.parametrize("name", ["roofline", "tflops_over_length"])
    def test_many_points_are_cut_and_said(self, name: str) -> None:
        records = [
            with_bytes(call("flex", samples(1, 2), seq_len=seq_len, head_dim=head_dim), 1000.0)
            for head_dim in range(16, 176, 16)
            for seq_len in (64, 128)
        ]
        built = build_figure(name, build_frame(records))
        assert built is not None
        assert "The first 8 of 10 points." in built[0]
        assert len(built[1].get_axes()) == 8

    @pytest.mark.parametrize("name", ["roofline", "tflops_over_length"])
    def test_nothing_of_attention(self, name: str) -> None:
        assert build_figure(name, build_frame([make_record()])) is None


class TestSweeps:
    """The grids of the sweeps, against sizes typed from the CS336 text."""

    @pytest.fixture(autouse=True)
    def eight_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local, "probe_cuda", lambda: {"names": ["NVIDIA H200"] * 8})

    def points(self, name: str) -> list[dict[str, Any]]:
        cases = compose_request([f"sweeps={name}", "device=cuda", "scale=full"]).cases
        return [json.loads(json.dumps(case.to_dict())) for case in cases]

    def test_flash_benchmarking(self) -> None:
        points = self.points("flash_benchmarking")
        ours = [point for point in points if point["attention"]["name"] == "flash_triton"]
        found = {
            (point["seq_len"], point["task"]["head_dim"], point["precision"]["parameters"])
            for point in ours
        }
        assert found == {
            (2**length, head_dim, dtype)
            for length in range(7, 17)
            for head_dim in (16, 32, 64, 128)
            for dtype in ("bfloat16", "float32")
        }
        assert {point["batch_size"] for point in points} == {1}
        assert all(point["task"]["causal"] for point in points)
        assert {"naive", "flash_torch", "flash_attn_4"} <= {p["attention"]["name"] for p in points}

    def test_leaderboard(self) -> None:
        points = self.points("leaderboard")
        for point in points:
            assert (point["batch_size"], point["task"]["num_heads"]) == (1, 16)
            assert point["seq_len"] == 16384
            assert point["precision"]["parameters"] == "bfloat16"
            assert point["precision"]["autocast"] is None
        found = {(point["task"]["head_dim"], point["task"]["compile"]) for point in points}
        assert found == {(64, True), (64, False), (128, True), (128, False)}
        request = compose_request(["sweeps=leaderboard", "device=cuda", "scale=full"])
        assert request.options.interleave > 1

    def test_packed(self) -> None:
        cases = compose_request(["sweeps=packed", "device=cuda", "scale=full"]).cases
        flops: dict[int, set[float]] = {}
        for case in cases:
            flops.setdefault(case.task.head_dim, set()).add(case.task.work(case)["forward"].flops)
        for values in flops.values():
            assert max(values) == pytest.approx(min(values), rel=0.01)
        assert {case.task.packing for case in cases} == {"none", "equal", "ragged"}
