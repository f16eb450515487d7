"""Captured steps beside launched ones and torch.compile's graphs, in table, sentence and figure."""

from __future__ import annotations

from captured_records import WAYS, steps

from harness.analysis.frame import build_frame
from harness.render.figure import build_figure
from harness.render.table import build_table, finding_of


def test_speed_ups_are_over_the_launched_step_and_over_the_compiler_s_graphs() -> None:
    table = build_table("captured_steps", build_frame(steps()))
    assert table is not None
    rows = table.rows.sort_values("step_median_ms")
    assert rows["launched_speedup"].tolist() == [6.0, 4.0, 3.0, 1.2, 1.0]
    assert rows["compiled_speedup"].round(2).tolist() == [2.0, 1.33, 1.0, 0.4, 0.33]
    assert rows["step_host_ms"].tolist() == [0.1, 0.1, 8.0, 20.0, 24.0]


def test_the_sentence_is_of_verdicts() -> None:
    told = build_table("captured_steps", build_frame(steps()))
    untold = build_table("captured_steps", build_frame(steps(rounds=False)))
    assert told is not None
    assert untold is not None
    assert finding_of(told) == (
        "Captured steps take 17% to 25% of the time of launched ones; captured steps take 50% to "
        "75% of the time of torch.compile's graphs."
    )
    assert finding_of(untold) == (
        "No verdict tells captured steps from launched ones; no verdict tells captured steps from "
        "torch.compile's graphs."
    )


def test_without_captured_steps_there_is_no_table() -> None:
    assert build_table("captured_steps", build_frame(steps()[:3])) is None


def test_bars_of_one_attention_are_ways_to_run_it() -> None:
    built = build_figure("step_time", build_frame(steps()))
    assert built is not None
    (axis,) = built.figure.axes
    assert [label.get_text() for label in axis.get_yticklabels()] == list(WAYS)
    # One colour for each phase, since all are steps with the same attention.
    assert len({bar.get_facecolor() for bar in axis.patches}) == 3
