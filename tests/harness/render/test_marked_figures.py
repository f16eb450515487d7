"""Figures show what tables mark, and the spread over rounds."""

from __future__ import annotations

import pytest
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from records import in_rounds, make_record

from harness.analysis.frame import build_frame
from harness.analysis.stats import round_ends
from harness.cases import format as fmt
from harness.drawing.marked import say_marked
from harness.render.figure import build_figure
from harness.store.record import Record

WHITE = to_rgba("white")


def call(seq_len: int, ms: float, *, slow: float = 0.0) -> Record:
    steady = [ms, ms * 1.001, ms * 1.002] * 4
    record = in_rounds(
        make_record(
            task="attention", mode="forward", seq_len=seq_len, samples_ms={"forward": [steady]}
        )
    )
    if slow:
        record.phases["forward"].samples_ms[0][-12:] = [value * slow for value in steady]
    return record


def hollow(figure: Figure) -> list[tuple[float, float]]:
    """Where markers are hollow."""
    return [
        (float(x), float(y))
        for line in figure.axes[0].get_lines()
        if to_rgba(line.get_markerfacecolor()) == WHITE
        for x, y in zip(*line.get_data(), strict=True)
    ]


def test_a_marked_point_is_hollow_and_its_mark_is_explained() -> None:
    calm, slowed = call(64, 1.0), call(128, 2.0)
    built = build_figure("attention_scaling", build_frame([calm, slowed]))
    assert built is not None
    assert hollow(built.figure) == []
    assert "Hollow" not in built.caption

    slowed.phases["forward"].host_ms = [[2.5] * 60]
    slowed.phases["forward"].device_ms = [[0.5] * 60]
    built = build_figure("attention_scaling", build_frame([calm, slowed]))
    assert built is not None
    ((x, y),) = hollow(built.figure)
    assert (x, y) == (128, pytest.approx(2.0, rel=0.01))
    said = f"Hollow markers are marked in the tables: 1 bound by the host ({fmt.DOUBLE_BAR})."
    assert said in built.caption


def test_bars_repeat_the_marks_behind_their_numbers() -> None:
    record = make_record(samples_ms={"step": [[9.0] * 12], "forward": [[3.0] * 12]})
    record.source = {"kernels/backends": "0" * 12}
    built = build_figure("step_time", build_frame([record]))
    assert built is not None
    texts = [text.get_text() for text in built.figure.axes[0].texts]
    assert f"9.00{fmt.DIAMOND}" in texts
    assert f"1 of other code than now ({fmt.DIAMOND})" in built.caption


def test_bars_span_rounds_where_there_are_three() -> None:
    assert round_ends([[1.0, 9.0, 2.0], [3.0], [2.5]]) == (2.0, 3.0)
    assert all(end != end for end in round_ends([[1.0], [2.0]]))
    (row,) = build_frame([call(64, 1.0, slow=1.5)]).to_dict("records")
    assert (row["low_ms"], row["high_ms"]) == (pytest.approx(1.001), pytest.approx(1.5015))
    assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
    alone = make_record(samples_ms={"step": [[1.0, 2.0, 3.0, 4.0]]})
    (row,) = build_frame([alone]).to_dict("records")
    assert (row["low_ms"], row["high_ms"]) == (row["q1_ms"], row["q3_ms"]) == (1.75, 3.25)


def test_without_marks_nothing_is_said() -> None:
    assert say_marked(["", float("nan"), None]) == ""
