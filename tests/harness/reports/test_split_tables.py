"""Tables and figures of split sequences, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pandas as pd
import pytest
import torch
from records import ENVIRONMENT, in_rounds

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.format import ABSENT
from harness.render.figure import FIGURES, draw
from harness.render.table import Table, build_table, finding_of
from harness.reports.context.split_rows import split_calls
from harness.request.compose import compose_request
from harness.store.record import Phase, Record

SHAPE = (
    *("task=attention", "task.num_heads=4", "task.num_kv_heads=2", "task.head_dim=64"),
    *("batch_size=1", "device=cpu"),
)

Spans = list[list[Any]]


def record_of(*arguments: str, both_ms: float = 8.0, **fields: Any) -> Record:
    """A case that took ``both_ms`` on its slowest rank, and half of that on the others."""
    given = {argument.split("=")[0] for argument in arguments}
    shape = [item for item in SHAPE if item.split("=")[0] not in given]
    (case,) = compose_request([*shape, *arguments]).cases
    samples = {
        name: [[share * both_ms / 2] * 3] * (case.world_size - 1) + [[share * both_ms] * 3]
        for name, share in (("forward", 0.25), ("backward", 0.75), ("forward_backward", 1))
    }
    return Record(
        case_id=case.id,
        case=case.to_dict(),
        status="ok",
        phases={
            name: Phase(clock="cuda_event", samples_ms=ranks) for name, ranks in samples.items()
        },
        work={name: asdict(work) for name, work in case.task.work(case).items()},
        environment=dict(ENVIRONMENT),
        memory=[{"source": "cuda", "peak_allocated_bytes": 2**30}] * case.world_size,
        check={"errors": {"o": 1e-6}, "tolerance": 1e-4},
        **fields,
    )


def rank_spans(compute: list[float], waits: list[float]) -> dict[str, Any]:
    """One rank's pass: for each step it computes, then waits."""
    spans: Spans = []
    now = 0.0
    for step, (busy, idle) in enumerate(zip(compute, waits, strict=True)):
        spans.append(["forward", "compute", step, now, now + busy])
        spans.append(["forward", "wait", step + 1, now + busy, now + busy + idle])
        now += busy + idle
    return {"spans": spans, "sent_bytes": {"forward": 2**20, "backward": 2**21}}


# Rank 1 computes 2 + 4 ms and waits for 0.5; rank 0 computes 2 + 0 and waits for rank 1.
UNEVEN = [rank_spans([2.0, 0.0], [0.5, 4.0]), rank_spans([2.0, 4.0], [0.25, 0.25])]

EVEN = [rank_spans([2.0, 1.0], [0.0, 0.125]), rank_spans([1.0, 2.0], [0.0, 0.0])]


def notes(timeline: Any, transport: str = "send_recv") -> dict[str, Any]:
    return {"timeline": [timeline] * 3, "kernel": "naive", "transport": transport}


def split_records() -> list[Record]:
    ring = ("attention=ring", "attention.kernel=naive", "parallel.cp=2")
    zigzag = ("attention=zigzag", "attention.kernel=naive", "parallel.cp=2")
    llama3 = ("attention=llama3", "attention.kernel=naive", "parallel.cp=2")
    return [
        record_of("attention=naive", "seq_len=512", both_ms=12.0),
        record_of(*ring, "seq_len=512", both_ms=10.0, notes=notes(UNEVEN)),
        record_of(*zigzag, "seq_len=512", both_ms=8.0, notes=notes(EVEN)),
        record_of(*llama3, "seq_len=512", both_ms=7.5, notes=notes(UNEVEN, "all_gather")),
        record_of("attention=naive", "seq_len=1024", both_ms=40.0),
        record_of(*zigzag, "seq_len=1024", both_ms=25.0, notes=notes(EVEN)),
        record_of(*llama3, "seq_len=1024", both_ms=30.0, notes=notes(UNEVEN, "all_gather")),
    ]


def table_of(name: str, records: list[Record]) -> Table:
    built = build_table(name, build_frame(records))
    assert built is not None
    return built


def cells(table: Table, header: str) -> list[str]:
    headers = [column.full_header for column in table.columns]
    return [row[headers.index(header)] for row in table.cells()]


class TestContextParallel:
    def test_numbers(self) -> None:
        built = table_of("context_parallel", split_records())
        assert cells(built, "seq_len") == ["512", "512", "512", "1,024", "1,024"]
        assert cells(built, "attention") == ["ring", "zigzag", "llama3", "zigzag", "llama3"]
        assert cells(built, "both (ms)") == ["10.0", "8.00", "7.50", "25.0", "30.0"]
        # One device over the time, and that by two ranks.
        assert [cell[:-1] for cell in cells(built, "speed-up")[:3]] == ["1.20", "1.50", "1.60"]
        assert cells(built, "efficiency (%)") == ["60.0", "75.0", "80.0", "80.0", "66.7"]
        # Of the rank that computes longest: 0.25 + 0.25, not the 4.5 that rank 0 waits.
        assert cells(built, "exposed (ms)")[0] == "0.500"
        assert cells(built, "sent (MiB)")[0] == "3.00"
        assert "naive" in built.caption

    def test_crossover(self) -> None:
        """At 512 tokens the gather leads, 7.5 ms against 8; at 1,024 the ring, 25 against 30."""
        built = table_of("context_parallel", list(map(in_rounds, split_records())))
        sentence = (
            "2 ranks, naive, fp32: the best ring is faster than the best gather at 1,024 tokens, "
            "the best gather is faster than the best ring at 512 tokens."
        )
        assert sentence in built.footnotes

    def test_one_round_tells_no_crossover(self) -> None:
        built = table_of("context_parallel", split_records())
        assert any("cannot be told apart at any length" in note for note in built.footnotes)

    @pytest.mark.parametrize(
        ("longer_ms", "words"),
        [
            (31.0, "the best gather is faster than the best ring at every length measured."),
            (30.0, "are level at 1,024 tokens."),
        ],
    )
    def test_no_crossover(self, longer_ms: float, words: str) -> None:
        records = split_records()
        for record in records:
            if record.case["attention"]["name"] == "zigzag" and record.case["seq_len"] == 1024:
                record.phases["forward_backward"].samples_ms = [[longer_ms] * 3] * 2
        notes = table_of("context_parallel", list(map(in_rounds, records))).footnotes
        assert any(words in note for note in notes)

    def test_statuses_are_shown_and_no_speed(self) -> None:
        records = split_records()
        records[1].status, records[1].error = "oom", {"message": "CUDA out of memory"}
        built = table_of("context_parallel", records)
        assert cells(built, "both (ms)")[0] == "OOM"
        assert cells(built, "speed-up")[0] == cells(built, "exposed (ms)")[0] == ABSENT

    def test_without_a_single_device_there_is_no_efficiency(self) -> None:
        rows = split_calls(build_frame([r for r in split_records() if "transport" in r.notes]))
        assert len(rows) == 5
        assert rows["efficiency"].isna().all()

    def test_nothing_to_show(self) -> None:
        frame = build_frame([record_of("attention=naive", "seq_len=512")])
        for name in ("context_parallel", "balance_measured", "zigzag_modes", "flop_balance"):
            assert build_table(name, frame) is None


def replayed_records() -> list[Record]:
    """As CUDA graphs every pass takes half of its time, and the gather 4 ms more than that."""
    found = []
    for record in split_records():
        attention = record.case["attention"]["name"]
        length, ranks = record.case["seq_len"], record.case["parallel"]["cp"]
        slowest = max(samples[0] for samples in record.phases["forward_backward"].samples_ms)
        kernel = () if ranks == 1 else ("attention.kernel=naive",)
        found.append(
            record_of(
                *(f"attention={attention}", *kernel, f"parallel.cp={ranks}"),
                *(f"seq_len={length}", "task.cuda_graph=true"),
                both_ms=slowest / 2 + 4 * (attention == "llama3"),
                notes={name: text for name, text in record.notes.items() if name != "timeline"},
            )
        )
    return found


class TestReplays:
    """Launched passes beside the same ones as CUDA graphs."""

    @pytest.fixture
    def mixed(self) -> list[Record]:
        return list(map(in_rounds, [*split_records(), *replayed_records()]))

    def test_crossovers_are_of_each_kind(self, mixed: list[Record]) -> None:
        notes = table_of("context_parallel", mixed).footnotes
        start = "2 ranks, naive, fp32"
        assert (
            f"{start}, launched one by one: the best ring is faster than the best gather at 1,024 "
            "tokens, the best gather is faster than the best ring at 512 tokens."
        ) in notes
        assert (
            f"{start}, as CUDA graphs: the best ring is faster than the best gather at every "
            "length measured."
        ) in notes

    def test_the_sentence_tells_what_graphs_gain_and_the_first_of_each_kind(
        self, mixed: list[Record]
    ) -> None:
        said = finding_of(table_of("context_parallel", mixed))
        # llama3 takes 7.75 of 7.5 ms and 19 of 30, all others half.
        assert said.startswith(
            "As CUDA graphs, passes take 50% to 103% of their time launched one by one. Launched "
            "one by one, with 2 ranks and 1,024 tokens zigzag over send_recv is fastest"
        )
        assert " As CUDA graphs, with 2 ranks and 1,024 tokens zigzag over send_recv is" in said

    def test_one_kind_is_not_named(self) -> None:
        said = finding_of(table_of("context_parallel", list(map(in_rounds, split_records()))))
        assert said.startswith("With 2 ranks and 1,024 tokens zigzag")

    def test_the_figure_has_both_in_one_panel(self, mixed: list[Record]) -> None:
        drawn = draw("split_efficiency", build_frame(mixed))
        assert drawn is not None
        for family in ("rings", "gathers"):
            for how in ("launched one by one", "as CUDA graphs"):
                assert f"<!-- {family}, {how} -->" in drawn.svg.decode()
        assert "tokens per rank" in drawn.svg.decode()
        assert drawn.svg.decode().count("<!-- tokens per rank -->") == 1
        assert "dash-dotted" in drawn.caption


class TestBalanceMeasured:
    def test_numbers(self) -> None:
        records = [r for r in split_records() if r.case["seq_len"] == 512]
        built = table_of("balance_measured", records)
        rows = built.rows.set_index("scheme")
        # Rank 0 computes 2 ms and rank 1 6: 4 on average.
        assert rows.loc["ring", "imbalance"] == pytest.approx(6 / 4)
        # Step 0 takes 2, step 1 takes 4.
        assert rows.loc["ring", "lockstep"] == pytest.approx(6 / 4)
        assert rows.loc["zigzag", "imbalance"] == pytest.approx(1)
        # Balanced in sum and not in step: 2 + 2, over 3.
        assert rows.loc["zigzag", "lockstep"] == pytest.approx(4 / 3)
        # Two ranks: the late half has three quarters of the pairs, 1.5 times the mean.
        assert rows.loc["ring", "predicted_imbalance"] == pytest.approx(1.5, abs=2e-3)
        assert rows.loc["zigzag", "predicted_lockstep"] == pytest.approx(1, abs=1e-6)
        assert rows.loc["zigzag", "predicted_speedup"] == pytest.approx(1.5, abs=2e-3)
        assert rows.loc["zigzag", "speedup"] == pytest.approx(10 / 8)
        assert pd.isna(rows.loc["ring", "speedup"])

    def test_heads_that_do_not_divide(self) -> None:
        """Three query heads on two ranks: 2 and 1, whatever the mask and the layout."""
        heads = ("task.num_heads=3", "task.num_kv_heads=1", "parallel.cp=2", "seq_len=512")
        ulysses = record_of(
            *("attention=ulysses", "attention.kernel=naive", *heads),
            notes=notes(UNEVEN, "all_to_all"),
        )
        rows = table_of("balance_measured", [*split_records(), ulysses]).rows.set_index("scheme")
        assert rows.loc["ulysses", "split"] == "heads"
        assert rows.loc["ulysses", "predicted_imbalance"] == pytest.approx(4 / 3)
        assert rows.loc["ulysses", "predicted_lockstep"] == pytest.approx(4 / 3)
        assert pd.isna(rows.loc["ulysses", "speedup"])

    @pytest.mark.parametrize(
        ("scheme", "degree", "split", "imbalance"),
        [
            # The late half of a sequence has three quarters of its pairs.
            ("ulysses_ring", 2, "heads/contiguous", 1.5 * 6 / 5),
            ("ulysses_zigzag", 2, "heads/zigzag", 6 / 5),
            ("ulysses_zigzag", 4, "heads", 8 / 5),
            ("ulysses_zigzag", 1, "zigzag", 1),
        ],
    )
    def test_heads_in_groups(self, scheme: str, degree: int, split: str, imbalance: float) -> None:
        """Five query heads: 2 and 3 on two ranks of a group, or 1, 1, 1 and 2."""
        heads = ("task.num_heads=5", "task.num_kv_heads=1", "parallel.cp=4", "seq_len=512")
        four = {"timeline": [UNEVEN * 2] * 3, "kernel": "naive", "transport": "send_recv"}
        found = record_of(
            f"attention={scheme}",
            *("attention.kernel=naive", f"attention.ulysses={degree}", *heads),
            notes=four,
        )
        (row,) = table_of("balance_measured", [found]).rows.to_dict("records")
        assert row["split"] == split
        assert row["predicted_imbalance"] == pytest.approx(imbalance, rel=4e-3)
        assert row["predicted_lockstep"] == pytest.approx(imbalance, rel=4e-3)


class TestZigzagModes:
    def test_numbers(self) -> None:
        times = {
            ("two_kernels", "two_kernels"): 10.0,
            ("two_kernels", "fused"): 9.0,
            ("fused", "two_kernels"): 8.0,
            ("fused", "fused"): 5.0,
        }
        packed = ("task.packing=equal", "batch_size=2", "seq_len=512", "parallel.cp=2")
        records = [
            record_of(
                *packed,
                "attention=zigzag_llama3",
                "attention.kernel=naive",
                f"attention.forward_mode={forward}",
                f"attention.backward_mode={backward}",
                both_ms=both_ms,
                notes=notes(EVEN, "all_gather"),
            )
            for (forward, backward), both_ms in times.items()
        ]
        built = table_of("zigzag_modes", records)
        assert cells(built, "forward / backward calls") == [" / ".join(modes) for modes in times]
        assert [float(cell[:-1]) for cell in cells(built, "speed-up")] == [1.0, 1.11, 1.25, 2.0]


def balance_record(layout: str, *arguments: str) -> Record:
    """The record that the task itself writes."""
    given = ("task=flop_balance", f"task.layout={layout}", "device=cpu", *arguments)
    (case,) = compose_request(given).cases
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    work = {name: asdict(item) for name, item in case.task.work(case).items()}
    outcome = bench.outcome
    return Record(case_id=case.id, case=case.to_dict(), status="ok", work=work, notes=outcome.notes)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """The published guide's configuration."""
    return [balance_record(name, "seq_len=65536") for name in ("contiguous", "zigzag", "striped")]


class TestFlopBalance:
    def test_the_guides_table(self, records: list[Record]) -> None:
        """8 ranks, 65,536 tokens, 32 heads of 128, in the chunk count: 824.6 to 8,521.2, 10.3."""
        built = table_of("flop_balance", records)
        assert cells(built, "layout") == ["contiguous", "zigzag", "striped"]
        assert cells(built, "by chunks min (GFLOP)")[:2] == ["824.6", "4,672.9"]
        assert cells(built, "by chunks max (GFLOP)")[:2] == ["8,521.2", "4,672.9"]
        assert cells(built, "by chunks max/min")[0][:-1] == "10.3"
        assert cells(built, "by pairs max/min")[0][:-1] == "15.0"
        assert cells(built, "lockstep cost by pairs") == ["1.875", "1.000", "1.000"]
        assert "65,536" in built.caption
        assert "8 ranks" in built.caption

    def test_ranks_and_steps(self, records: list[Record]) -> None:
        ranks = table_of("flop_balance_ranks", records)
        assert len(ranks.rows) == 3 * 8
        assert cells(ranks, "first half (GFLOP)")[:2] == ["274.9", "824.6"]
        assert cells(ranks, "second half (GFLOP)")[8] == "4,398.0"
        steps = table_of("flop_balance_steps", records)
        assert cells(steps, "busy ranks")[:8] == [str(8 - step) for step in range(8)]

    def test_a_window_is_balanced_by_contiguous_parts(self) -> None:
        """16 tokens that see 4 keys each, but for the first three: 6 pairs less on one rank."""
        keys = ("seq_len=16", "task.ranks=4", "task.num_heads=1", "task.head_dim=1")
        records = [
            balance_record(name, *keys, "attention.window=4", "task.block_q=1", "task.block_k=1")
            for name in ("contiguous", "zigzag")
        ]
        balance = records[0].notes["balance"]
        # Own keys 1 + 2 + 3 + 4 for each rank, and 3 + 2 + 1 of the rank before.
        assert balance["pair"] == [[40.0, 0, 0, 0], *[[40.0, 24.0, 0, 0]] * 3]
        assert balance["tile"] == balance["pair"]
        # The first query of the second half of the second rank sees keys 3 up to 7.
        assert balance["chunk"][1] == [4 * 2 * 5.0, 4 * 2 * 5.0]
        assert records[0].work["forward"]["flops"] == 4 * (16 * 4 - 6) / 4
        built = table_of("flop_balance", records)
        # 64 pairs over 40; zigzag's first rank has 1 + 2 and 2 x 4 pairs, its last ones 4 x 4.
        assert [cell[:-1] for cell in cells(built, "by pairs max/min")] == ["1.60", "1.45"]
        assert "window 4" in built.caption

    def test_any_configuration(self) -> None:
        """4 ranks of 2 tokens, one head of 1: pairs counted by hand, 4 FLOPs each."""
        keys = ("seq_len=8", "task.ranks=4", "task.num_heads=1", "task.head_dim=1")
        record = balance_record("contiguous", *keys, "task.block_q=2", "task.block_k=2")
        balance = record.notes["balance"]
        assert balance["pair"][0] == [4 * 3.0, 0, 0, 0]
        assert balance["pair"][2] == [4 * 3.0, 4 * 4.0, 4 * 4.0, 0]
        assert balance["tile"][2] == [4 * 4.0, 4 * 4.0, 4 * 4.0, 0]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["seq_len=100"], "seq_len=100: must be a multiple of 16 for task.layout=zigzag"),
            (["task.layout=spiral"], "task.layout=spiral: must be one of contiguous, zigzag"),
            (["task.ranks=0"], "task.ranks=0: must be at least 1"),
            (["attention=ring", "parallel.cp=2"], "parallel.cp: task=flop_balance counts in one"),
            (["attention.softcap=3"], "attention.softcap: changes no pair that task=flop_balance"),
        ],
    )
    def test_what_cannot_be_is_one_line(self, arguments: list[str], message: str) -> None:
        with pytest.raises(ValueError, match="task") as caught:
            compose_request(["task=flop_balance", "device=cpu", *arguments])
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["split_efficiency", "rank_timeline", "balance_bars"])
def test_figures_of_split_sequences(name: str) -> None:
    drawn = draw(name, build_frame(split_records()))
    assert drawn is not None
    caption, png, svg, _ = drawn
    assert png.startswith(b"\x89PNG")
    text = svg.decode()
    assert "2 ranks" in caption
    for word in ("rings", "gathers") if name == "split_efficiency" else ("zigzag", "llama3"):
        assert f"<!-- {word}" in text
    assert draw(name, build_frame([record_of("attention=naive", "seq_len=512")])) is None


def test_the_figure_of_counts() -> None:
    drawn = draw("flop_balance", build_frame([balance_record("zigzag", "seq_len=1024")]))
    assert drawn is not None
    assert "8 ranks" in drawn[0]
    assert "<!-- zigzag -->" in drawn[2].decode()
    assert "flop_balance" in FIGURES.names()
