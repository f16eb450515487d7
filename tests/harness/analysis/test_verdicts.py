"""Verdicts on ratios with their intervals, and the sentences made of them."""

from __future__ import annotations

from typing import Any

import pytest
from records import in_rounds, make_record, make_strategy_record

from harness.analysis.frame import build_frame
from harness.analysis.verdicts import rule
from harness.cases import format as fmt
from harness.render.table import Table, build_table, finding_of
from harness.reports.general.ratios_figure import MARKS, TINTS
from harness.sentences.findings import sentence
from harness.store.record import Record


def test_every_word_has_a_mark_and_a_tint() -> None:
    assert {"FASTER", "SLOWER", "SAME", "UNCLEAR"} <= set(MARKS) & set(TINTS)


def built(name: str, *records: Record) -> Table:
    table = build_table(name, build_frame(list(records)))
    assert table is not None
    return table


def step(name: str, *samples: float, **fields: Any) -> Record:
    return in_rounds(make_record(attention=name, samples_ms={"step": [list(samples)]}, **fields))


class TestComparison:
    def test_the_winner_is_named_by_what_differs(self) -> None:
        by_strategy = built(
            "comparison",
            in_rounds(make_strategy_record("ddp_torch", ms=5.0)),
            in_rounds(make_strategy_record("fsdp", ms=4.0)),
        )
        said = f"fsdp is FASTER than ddp_torch by 1.25{fmt.TIMES}."
        assert finding_of(by_strategy) == said
        by_attention = built("comparison", step("naive", 6.0, 6.0), step("sdpa", 3.0, 3.0))
        assert finding_of(by_attention) == f"sdpa is FASTER than naive by 2.00{fmt.TIMES}."
        by_compile = built(
            "comparison",
            step("sdpa", 6.0, 6.0),
            step("sdpa", 3.0, 3.0, compile_scope="block"),
        )
        assert finding_of(by_compile).startswith(
            "sdpa compiled by block is FASTER than uncompiled by 2.00"
        )

    def test_what_the_rounds_leave_open_is_counted_apart(self) -> None:
        table = built(
            "comparison",
            step("naive", 1.0, 10.0, 30.0),
            step("sdpa", 1.0, 9.0, 31.0),
            step("flex", 10.0, 10.0, 10.0, model="tiny"),
            step("naive", 10.0, 10.0, 10.0, model="tiny"),
        )
        assert sorted(table.rows["verdict"]) == ["SAME", "UNCLEAR"]
        assert "none are SLOWER, 1 is the SAME and 1 is UNCLEAR" in finding_of(table)

    def test_one_round_is_unclear_and_the_caption_says_what_it_takes(self) -> None:
        records = [
            make_record(attention=name, samples_ms={"step": [[time] * 9]})
            for name, time in (("naive", 6.0), ("sdpa", 3.0))
        ]
        table = built("comparison", *records)
        assert list(table.rows["verdict"]) == ["UNCLEAR"]
        assert "interleave=5 or until=decided measures what a verdict needs" in table.caption

    def test_the_fastest_passes_decide_where_others_were_busy_and_it_says_so(self) -> None:
        def busy(name: str, own_ms: float, waits_ms: list[int], share: float) -> Record:
            calls = {"step": [[own_ms] * 5]}
            record = make_record(attention=name, samples_ms=calls, device="cpu")
            record = in_rounds(record, number=10)
            record.phases["step"].samples_ms = [
                [own_ms + wait for most in waits_ms for wait in (0, 0.001, most, most, most)]
            ]
            for state in record.round_states:
                state.ranks = [{"load": {"other_cpu_share": share}}]
            return record

        def records(share: float) -> list[Record]:
            return [
                busy("naive", 1.0, [4, 20, 8, 12, 4] * 2, share),
                busy("sdpa", 0.9, [8, 4, 16, 4, 20] * 2, share),
            ]

        for share, word in ((0.5, "FASTER"), (0.0, "UNCLEAR")):
            table = built("comparison", *records(share))
            assert list(table.rows["verdict"]) == [word]
            assert ("1 decided by the fastest pass" in table.caption) == (word == "FASTER")

    @pytest.mark.parametrize("name", ["comparison", "leaderboard"])
    def test_captions_say_which_way_is_faster(self, name: str) -> None:
        calls = {"forward": [[1.0, 1.0]]}
        records = [
            in_rounds(
                make_record(attention=backend, task="attention", mode="forward", samples_ms=calls)
            )
            for backend in ("naive", "sdpa")
        ]
        caption = built(name, *records).caption
        assert "above 1 is faster" in caption
        assert rule() in caption
        assert "; 5 rounds" in caption


def test_a_caption_says_speed_up_where_there_is_one() -> None:
    passes = {"forward": [[1.0]], "backward": [[1.0]], "forward_backward": [[2.0]]}
    for name, task in (("summary", "train_step"), ("attention_summary", "attention")):
        samples = passes if task == "attention" else {**passes, "step": [[3.0]]}
        found = {
            backends: built(
                name,
                *(make_record(attention=item, task=task, samples_ms=samples) for item in backends),
            )
            for backends in (("naive", "sdpa"), ("flex", "sdpa"))
        }
        for backends, table in found.items():
            shown = any(column.header == "speed-up" for column in table.columns)
            assert shown == ("naive" in backends)
            assert ("speed-up" in table.caption) == shown
            assert ". All rows:" in table.caption


class TestSentences:
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("fsdp is fastest", "fsdp is fastest."),
            ("fused / two_kernels is fastest", "fused / two_kernels is fastest."),
            ("ring, of all, is slow", "ring, of all, is slow."),
            ("bf16 is fastest", "bf16 is fastest."),
            ("checkpoint=block needs least", "checkpoint=block needs least."),
            ("measured, least is left", "Measured, least is left."),
            ("fused kernels are fast", "Fused kernels are fast."),
            ("speed-up is small", "Speed-up is small."),
        ],
    )
    def test_names_keep_their_case_and_nothing_else_does(self, words: str, said: str) -> None:
        assert sentence(words) == said

    def test_what_rounds_alike_is_neither_least_nor_most(self) -> None:
        records = [make_strategy_record(name, ms=5.0) for name in ("ddp_torch", "ddp_naive")]
        assert finding_of(built("communication_volume", records[0])) == "ddp_torch sends 1.00 MiB."
        records[1].notes["traffic"][0][0]["bytes"] += 4
        records[1].notes["traffic"][1] = records[1].notes["traffic"][0]
        alike = finding_of(built("communication_volume", *records))
        assert alike == "All send the same to three digits, 1.00 MiB."
        records[1].notes["traffic"][0][0]["bytes"] *= 2
        apart = finding_of(built("communication_volume", *records))
        assert apart == "ddp_torch sends least, 1.00 MiB, and ddp_naive most, 2.00."
