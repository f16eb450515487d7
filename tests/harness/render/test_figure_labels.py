"""Every number that a figure prints beside its data is in the table of the same data."""

from __future__ import annotations

import re
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from records import (
    decode_examples,
    in_rounds,
    make_record,
    profile_examples,
    strategy_examples,
)

from harness.analysis.frame import build_frame
from harness.drawing.bars import draw_bars
from harness.drawing.panels import grid_places
from harness.render.figure import CaptionedFigure, build_figure
from harness.render.table import build_table
from harness.store.record import Record

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def steps() -> list[Record]:
    """Steps whose phases' medians do not add up to that of the step."""
    return [
        make_record(
            model=model,
            attention=attention,
            precision=precision,
            samples_ms={
                "forward": [[1.0, 2.0, 30.0 * scale]],
                "backward": [[2.0, 30.0 * scale, 4.0]],
                "optimizer": [[1.0, 1.0, 1.0]],
                "step": [[11.0, 22.0 * scale, 36.0 * scale]],
            },
        )
        for model, scale in (("small", 1.7), ("medium", 3.3))
        for attention in ("naive", "sdpa")
        for precision in ("fp32", "bf16")
    ]


def calls(*, lengths: tuple[int, ...] = (1024,)) -> list[Record]:
    """Calls whose arithmetic intensity follows from their length."""
    found = []
    for seq_len in lengths:
        for attention, ms in (("naive", 7.3), ("sdpa", 1.9)):
            samples = {"forward_backward": [[ms, ms * 1.001, ms * 1.002] * 4]}
            record = make_record(
                task="attention", attention=attention, seq_len=seq_len, samples_ms=samples
            )
            record.work["forward_backward"]["bytes"] = 1e11 / seq_len
            found.append(in_rounds(record))
    return found


LABELLED: dict[str, tuple[str, list[Record]]] = {
    "step_time": ("benchmarking_script", steps()),
    "precision": ("mixed_precision", steps()),
    "roofline": ("leaderboard", calls()),
    "strategy_scaling": ("strategy_scaling", strategy_examples()),
    "ddp_timeline": ("data_parallel", strategy_examples()),
    "step_memory": ("optimizer_state_sharding", strategy_examples()),
    "decode_over_length": ("decode_latency", decode_examples()),
    "graph_effect": ("graph_effect", decode_examples()),
    "generate": ("generate", decode_examples()),
    "varlen_prefill": ("varlen_prefill", decode_examples()),
    "fusion_breakdown": ("fusion_breakdown", decode_examples()),
    "kernel_shares": ("kernel_categories", profile_examples()),
}


def built(name: str, records: list[Record]) -> CaptionedFigure:
    found = build_figure(name, build_frame(records))
    assert found is not None
    return found


def printed(drawing: Figure) -> set[str]:
    """Numbers written at data, and in titles at the left, without what follows in brackets."""
    texts = [text.get_text() for axis in drawing.axes for text in axis.texts]
    texts += [axis.get_title("left").partition(": ")[2] for axis in drawing.axes]
    return {number for text in texts for number in NUMBER.findall(text.partition(" (")[0])}


def tabled(name: str, frame: pd.DataFrame) -> set[str]:
    table = build_table(name, frame)
    assert table is not None
    return {number for row in table.cells() for cell in row for number in NUMBER.findall(cell)}


@pytest.mark.parametrize("name", LABELLED)
def test_printed_numbers_are_in_the_table(name: str) -> None:
    table, records = LABELLED[name]
    numbers = printed(built(name, records).figure)
    assert numbers
    assert numbers <= tabled(table, build_frame(records))


def test_the_line_over_bars_of_rates_has_a_name() -> None:
    axes = built("roofline", calls()).figure.axes
    assert ["matmul peak"] * len(axes) == [
        text.get_text() for axis in axes for text in axis.texts if "peak" in text.get_text()
    ]


def test_long_numbers_of_an_axis_are_few() -> None:
    axis = Figure().subplots()
    draw_bars(axis, ["a", "b"], [6_130_000.0, 3_410_000.0], ["k", "k"])
    low, high = axis.get_xlim()
    assert len([tick for tick in axis.get_xticks() if low <= tick <= high]) <= 4
    draw_bars(axis, ["a", "b"], [613.0, 341.0], ["k", "k"])
    low, high = axis.get_xlim()
    assert len([tick for tick in axis.get_xticks() if low <= tick <= high]) > 4


def test_bars_of_a_step_are_labelled_with_its_median() -> None:
    record = make_record(
        samples_ms={
            "forward": [[1.0, 2.0, 30.0]],
            "backward": [[2.0, 30.0, 4.0]],
            "step": [[11.0, 42.8, 64.0]],
        }
    )
    assert "42.8" in printed(built("step_time", [record]).figure)


def test_a_line_of_panels_has_the_bars_that_it_needs() -> None:
    several = [whole_step(name, seq_len=128) for name in ("naive", "flex", "sdpa")]
    alone = [whole_step("sdpa", seq_len=length) for length in (256, 512, 1024)]
    axes = built("step_time", several + alone).figure.axes
    labels = [[label.get_text() for label in axis.get_yticklabels()] for axis in axes]
    assert labels == [["naive", "flex", "sdpa"], ["", "", ""], ["sdpa"], [""]]
    assert len(axes[1].patches) == 1


def test_split_attentions_of_one_point_share_a_panel() -> None:
    """A scheme is named by the attention, and is no point of its own."""
    records = [
        whole_step("zigzag", seq_len=128),
        whole_step("ulysses", seq_len=128),
        whole_step("sdpa", seq_len=256),
    ]
    axes = built("step_time", records).figure.axes
    assert len(axes) == 2
    assert not any("attention" in axis.get_title() for axis in axes)
    table = build_table("summary", build_frame(records))
    assert table is not None
    assert [column.header for column in table.columns].count("attention") == 1


def whole_step(attention: str, *, seq_len: int) -> Record:
    samples = {"forward": [[1.0, 2.0, 3.0]], "step": [[2.0, 3.0, 4.0]]}
    record = make_record(attention=attention, seq_len=seq_len, samples_ms=samples)
    if attention in ("zigzag", "ulysses"):
        record.case["attention"] |= {"kernel": "flash_triton", "transport": "auto"}
    return record


def test_rows_are_models_and_columns_precisions_of_one_scale() -> None:
    axes = built("step_time", steps()).figure.axes
    titles = [axis.get_title() for axis in axes]
    assert titles == [f"model {m}, {p}" for m in ("small", "medium") for p in ("fp32", "bf16")]
    assert axes[0].get_xlim() == axes[1].get_xlim() != axes[2].get_xlim()


def test_panels_make_a_grid_where_every_place_is_taken() -> None:
    points = [{"model": m, "batch_size": b} for b in (1, 16) for m in "abc"]
    rows = [pd.Series(point) for point in points]
    assert grid_places(rows, ["batch_size", "model"], 2) == (
        [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)],
        3,
        2,
    )
    assert grid_places(rows[:5], ["batch_size", "model"], 4)[1:] == (2, 3)


def warmed(model: str, warmup_steps: int, samples: list[float]) -> Record:
    return make_record(model=model, warmup_steps=warmup_steps, samples_ms={"step": [samples]})


def test_warm_up_panels_have_one_scale_and_cases_without_samples_none() -> None:
    records = [warmed("small", 0, [90.0, 2.0, 2.0]), warmed("medium", 0, [3.0, 2.0, 2.0])]
    axes = built("warmup_effect", [*records, warmed("small", 1, [])]).figure.axes
    assert {axis.get_yscale() for axis in axes} == {"log"}
    assert len({axis.get_ylim() for axis in axes}) == 1
    assert build_figure("warmup_effect", build_frame([warmed("small", 0, [])])) is None
    (axis,) = built("warmup_effect", [warmed("small", 0, [0.0, 1.0])]).figure.axes
    assert axis.get_yscale() == "linear"


def test_modes_of_compilation_have_names_and_markers_of_their_own() -> None:
    def compiled(scope: str, mode: str, ms: float) -> Record:
        record = make_record(compile_scope=scope, samples_ms={"step": [[ms] * 4]})
        record.case["compile"]["mode"] = mode
        record.case_id += mode
        return record

    records = [compiled("none", "default", 4.0), compiled("model", "default", 2.0)]
    (axis,) = built("speedup", [*records, compiled("model", "max-autotune", 1.0)]).figure.axes
    handles, labels = axis.get_legend_handles_labels()
    assert labels == ["model", "model, compile mode max-autotune"]
    shapes = {handle[0].get_marker() for handle in handles}  # type: ignore[index]
    assert len(shapes) == 2


def test_every_strategy_has_a_timeline_and_every_rank_its_share() -> None:
    records = strategy_examples()
    names = {record.case["parallel"]["name"] for record in records if record.status == "ok"}
    titles = [axis.get_title("left") for axis in built("ddp_timeline", records).figure.axes]
    shown = {re.split(r"[(:,]", title)[0] for title in titles}
    assert shown <= names
    assert not any("nan" in title for title in titles)


@pytest.mark.parametrize(("lengths", "bars"), [((1024,), True), ((1024, 4096), False)])
def test_a_roofline_of_one_intensity_is_bars(lengths: tuple[int, ...], bars: bool) -> None:
    (axis,) = built("roofline", calls(lengths=lengths)).figure.axes
    assert bool(axis.patches) == bars
    assert (axis.get_xscale() == "linear") == bars


def test_one_backend_has_a_line_for_each_head_dim() -> None:
    records: list[Any] = [
        make_record(
            task="attention",
            seq_len=seq_len,
            head_dim=head_dim,
            samples_ms={"forward": [[1.0]], "backward": [[2.0]]},
        )
        for seq_len in (128, 256)
        for head_dim in (16, 32, 64)
    ]
    figure = built("attention_scaling", records).figure
    labels = [[line.get_label() for line in axis.lines] for axis in figure.axes]
    assert labels == [["head_dim 16", "head_dim 32", "head_dim 64"]] * 2


def test_numbers_of_an_axis_are_written_as_in_tables() -> None:
    drawing = built("fusion_breakdown", decode_examples()).figure
    drawing.draw_without_rendering()
    for axis in drawing.axes:
        assert axis.xaxis.get_major_formatter()(63_000.0) == "63,000"


def test_bars_of_bandwidth_end_at_one_share() -> None:
    drawing = built("decode_over_batch", decode_examples()).figure
    bars = [axis for axis in drawing.axes if axis.get_xlabel().endswith("(%)")]
    ends = {axis.get_xlim() for axis in bars}
    assert len(bars) > 1
    assert len(ends) == 1
    assert ends.pop()[1] > 100
