"""Captured steps beside launched ones and torch.compile's graphs, in table, sentence and figure."""

from __future__ import annotations

from records import in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.render.figure import build_figure
from harness.render.table import build_table, finding_of
from harness.store.record import Record

WAYS = {
    "launched": (24.0, False, "none", "default"),
    "compiled by block": (20.0, False, "block", "default"),
    "compiled by block, reduce-overhead": (8.0, False, "block", "reduce-overhead"),
    "captured": (6.0, True, "none", "default"),
    "captured, compiled by block": (4.0, True, "block", "default"),
}


def step(time_ms: float, captured: bool, scope: str, mode: str, *, rounds: bool) -> Record:
    parts = {"forward": 0.25, "backward": 0.5, "optimizer": 0.25, "step": 1.0}
    record = make_record(
        compile_scope=scope,
        samples_ms={name: [[share * time_ms] * 6] for name, share in parts.items()},
    )
    record.case["compile"]["mode"] = mode
    record.case["task"]["cuda_graph"] = captured
    record.case_id += f"{mode}{captured}"
    record.phases["step"].host_ms = [[0.1 if captured else time_ms] * 6]
    return in_rounds(record) if rounds else record


def steps(*, rounds: bool = True) -> list[Record]:
    return [step(*way, rounds=rounds) for way in WAYS.values()]


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
