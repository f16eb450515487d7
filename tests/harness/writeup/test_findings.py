"""Sentences of every table and figure of example records, and figures as vectors."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import captured_records
import pandas as pd
import pytest
from document_records import record_of
from profiles import case_of, run
from records import (
    audit_examples,
    decode_examples,
    in_rounds,
    make_record,
    profile_examples,
    split_examples,
    strategy_examples,
)
from window_records import window_examples
from writeup_examples import SPEEDS, scaling, steps

from harness.analysis.frame import build_frame
from harness.render.figure import FIGURES, build_figure, save
from harness.render.palette import KINDS
from harness.render.table import FINDINGS, TABLES, build_table, finding_of
from harness.sentences.findings import (
    best_row,
    from_wide,
    say_growth,
    say_out_of_memory,
    sentence,
    span,
)
from harness.sentences.leaders import say_fastest, say_over_length
from harness.sentences.ranking import standings
from harness.store.record import Record
from harness.writeup.hover import spots
from harness.writeup.svg import DARK_PAGE, contrast, on_dark


def on_a_host() -> list[Record]:
    """A call whose host takes half of its time, measured in several processes."""
    samples = {"forward": [[10.0, 10.1, 9.9]]}
    record = make_record(
        task="attention", mode="forward", attention="sdpa_math", samples_ms=samples
    )
    record.phases["forward"].host_ms = [[5.0] * 3]
    return [in_rounds(record)]


def low_precision_statistics() -> list[Record]:
    """Layer normalisation with statistics in each of two formats; it writes no files."""
    return [
        run(
            case_of("task=layer_norm", "task.rows=2", "task.width=64", f"task.statistics={name}"),
            artifacts=Path(),
        )
        for name in ("float16", "float32")
    ]


@cache
def all_frames() -> list[pd.DataFrame]:
    """Something for every table and figure; apart where examples of two kinds share an id."""
    kinds = (
        [*scaling(), *steps(), *split_examples(), *audit_examples()],
        strategy_examples(),
        profile_examples(),
        decode_examples(),
        [record_of("attention=documents", "attention.kernel=naive", "parallel.cp=2")],
        on_a_host(),
        window_examples(),
        low_precision_statistics(),
        captured_records.steps(),
    )
    return [build_frame(examples) for examples in kinds]


class TestFindings:
    def test_every_table_says_something_or_says_why_not(self) -> None:
        assert FINDINGS.names() == TABLES.names()
        silent = [
            entry.name for entry in FINDINGS if "None, by design" in (entry.target.__doc__ or "")
        ]
        assert silent == ["cases"]

    @pytest.mark.parametrize("name", TABLES.names())
    def test_sentences_of_every_example(self, name: str) -> None:
        found = [table for frame in all_frames() if (table := build_table(name, frame)) is not None]
        assert found
        for table in found:
            words = finding_of(table)
            assert "nan" not in words, words
            assert words == "" or words.endswith(".")

    def test_summary(self) -> None:
        table = build_table("summary", build_frame(list(map(in_rounds, steps()))))
        assert table is not None
        finding = finding_of(table)
        assert finding.startswith("sdpa_flash is fastest in bf16, by a factor of 2.50")
        assert "sdpa_flash is FASTER than naive, by 2.50" in finding

    def test_length_and_memory(self) -> None:
        table = build_table("flash_benchmarking", build_frame(list(map(in_rounds, scaling()))))
        assert table is not None
        finding = finding_of(table)
        assert "flex is fastest in bf16 from 1,024 tokens on" in finding
        assert "naive runs out of memory first, at 4,096" in finding

    def test_a_lead_is_over_the_second_at_each_point(self) -> None:
        rows = build_frame(map(in_rounds, scaling()))
        rows = rows[rows["phase"] == "forward"]
        found = {standing.best["seq_len"]: standing for standing in standings(rows, "median_ms")}
        assert {length: standing.first for length, standing in found.items()} == {
            512: "sdpa_flash",
            1024: "flex",
            2048: "flex",
            4096: "flex",
        }
        assert found[1024].margin == pytest.approx(2.0)
        assert found[512].margin == pytest.approx(2.5)
        said = say_fastest(rows, "median_ms")
        assert said is not None
        assert said.startswith("flex is fastest at 3 of 4 points in bf16, by a factor of 2.00")

    def test_one_round_leads_nowhere(self) -> None:
        rows = build_frame(scaling())
        rows = rows[rows["phase"] == "forward"]
        assert [standing.first for standing in standings(rows, "median_ms")] == [None] * 4
        said = say_fastest(rows, "median_ms")
        assert said == "which is fastest cannot be told at any of 4 points (only 1 round)"

    def test_nothing_to_say(self) -> None:
        rows = build_frame(scaling())
        one = rows[(rows["attention"] == "flex") & (rows["phase"] == "forward")]
        assert say_fastest(one, "median_ms") is None
        assert say_over_length(one, "median_ms") is None
        assert say_out_of_memory(one) is None
        growth = say_growth(one, "median_ms")
        assert growth is not None
        assert "4.00× as long for 2× the length" in growth  # noqa: RUF001

    def test_words(self) -> None:
        assert sentence("the end", None, "more") == "The end; more."
        assert sentence("naive is slow") == "naive is slow."
        assert sentence(None) == ""
        assert span([1.5, float("nan"), 2.0]) == "1.50× to 2.00×"  # noqa: RUF001
        assert best_row(pd.DataFrame({"x": [1, 3, 2]}), "x")["x"] == 3
        wide = pd.DataFrame({"seq_len": [1], "a_ms": [2.0], "b_ms": [3.0]})
        assert sorted(from_wide(wide, "ms")["value"]) == [2.0, 3.0]


class TestFigures:
    def test_every_figure_has_a_finding_and_is_a_vector(self) -> None:
        seen = 0
        for name in FIGURES.names():
            frames = [build_figure(name, frame) for frame in all_frames()]
            built = [item for item in frames if item is not None]
            seen += len(built)
            # Of a single point, as some examples have, there may be nothing to say.
            assert not built or any(item.finding.endswith(".") for item in built), name
            if built:
                assert save(built[0], "pdf").startswith(b"%PDF")
        assert seen >= 15

    def test_values_lie_where_they_are_drawn(self) -> None:
        """The marker of a known point, found in the SVG by its own coordinates."""
        built = build_figure("attention_scaling", build_frame(scaling()))
        assert built is not None
        svg = save(built, "svg").decode()
        found = [spot for spot in spots(built.figure) if "1,024" in spot.text]
        assert {spot.text.splitlines()[1] for spot in found} == set(SPEEDS)
        (flex,) = (s for s in found if "flex" in s.text and s.text.startswith("forward"))
        assert "median time (ms): 1" in flex.text
        x, y = flex.x + flex.width / 2, flex.y + flex.height / 2
        uses = re.findall(r'<use [^>]*?x="([\d.]+)" y="([\d.]+)"', svg)
        distances = [abs(float(a) - x) + abs(float(b) - y) for a, b in uses]
        assert min(distances) < 0.1

    def test_bars_say_their_length(self) -> None:
        built = build_figure("step_time", build_frame(steps()))
        assert built is not None
        save(built, "svg")
        texts = [spot.text for spot in spots(built.figure)]
        assert any("naive, backward" in text and "20" in text for text in texts)

    def test_intervals_are_shown_and_out_of_memory_is_marked(self) -> None:
        out = make_record(attention="flex", status="oom", message="CUDA out of memory")
        built = build_figure("speedup", build_frame([*map(in_rounds, steps()), out]))
        assert built is not None
        save(built, "svg")
        (spot,) = spots(built.figure)
        assert "sdpa_flash: 2.50×" in spot.text  # noqa: RUF001
        assert "interval: 2." in spot.text
        marks = [text.get_text() for axes in built.figure.axes for text in axes.texts]
        assert "× OOM" in marks  # noqa: RUF001

    @pytest.mark.parametrize(
        "tint", sorted({look.colour for kind in KINDS for look in kind.given("look").values()})
    )
    def test_data_can_be_seen_on_both_pages(self, tint: str) -> None:
        assert contrast(on_dark(tint.lower()), DARK_PAGE) >= 3

    def test_ink_and_paper_change_places(self) -> None:
        assert contrast(on_dark("#000000"), DARK_PAGE) > 12
        assert contrast(on_dark("#ffffff"), DARK_PAGE) < 1.1
        assert on_dark("#fffffe") == "#fffffe"
