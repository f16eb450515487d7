# ruff: noqa: RUF001 - tables use typographic signs
"""Tables in Markdown, CSV, LaTeX and a terminal: cells against hand-computed values."""

from __future__ import annotations

import math
import os
import re
import subprocess
from pathlib import Path

import pytest
from profiles import row_of
from programs import need_program
from records import (
    audit_examples,
    decode_examples,
    gone_wrong,
    in_rounds,
    make_accounting_record,
    make_balance_record,
    make_collective_record,
    make_record,
    make_split_record,
    make_strategy_record,
    profile_examples,
    split_examples,
)
from rich.console import Console
from status_examples import status_examples, step_samples

from harness.analysis.frame import build_frame
from harness.cases.format import integer, number, with_spread
from harness.drawing.line_labels import _below
from harness.render.files import render_terminal, to_csv, to_markdown
from harness.render.latex import escape, to_latex
from harness.render.table import TABLES, Table, build_table
from harness.store.record import Record

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def records() -> list[Record]:
    return status_examples()


def filled(more: list[Record]) -> list[Table]:
    """All tables that examples fill, with some more records."""
    examples = [*status_examples(), *split_examples(), *audit_examples(), *profile_examples()]
    frame = build_frame([*examples, *decode_examples(), *more])
    made = (build_table(name, frame) for name in TABLES.names())
    return [table for table in made if table is not None]


@pytest.fixture(scope="module")
def every_table() -> list[Table]:
    return filled([])


OF_OTHERS = ("baseline_ms", "one_device_ms", "predicted_us", "model_ms", "transfers_ms", "queue_ms")
"""Times that a row is compared with: of other cases, other texts, or by formula."""

STATISTICS = ("iqr_ms", "mean_ms", "std_ms", "min_ms", "first_ms")

TRACED = (
    *("wall_ms", "kernel_ms", "matmul_ms", "softmax_ms", "rest_ms", "ms", "mean_us"),
    *("least_ms", "most_ms", "per_rank", "exposed_ms", "traced_ms"),
)


def _from_a_profile(key: str) -> bool:
    """Whether a time is from a trace or a statistic itself, so that it has no spread of its own."""
    return key in (*STATISTICS, *TRACED)


class TestCells:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (0.1234, "0.123"),
            (12.34, "12.3"),
            (1234.5, "1,230"),
            (999.6, "1,000"),
            (9.999, "10.0"),
            (0.0123, "0.0123"),
            (74209.91, "74,200"),
            (0, "0"),
            (0.00001234, "1.23e-05"),
        ],
    )
    def test_three_significant_digits(self, value: float, expected: str) -> None:
        assert number(value) == expected

    def test_names_at_line_ends_stay_below_the_frame(self) -> None:
        """A gap of 2 apart, from a top of 10 down; what is low already stays."""
        assert _below(10, [1, 5, 9, 11, 13], 2) == [1, 4, 6, 8, 10]
        assert _below(10, [1, 2], 1) == [1, 2]

    def test_spread_has_the_decimals_of_the_value(self) -> None:
        assert with_spread(12.34, 0.456) == "12.3 ± 0.5"
        assert with_spread(12.34, math.nan) == "12.3"
        assert integer(16384.0) == "16,384"


class TestTables:
    def test_summary(self, records: list[Record]) -> None:
        table = build_table("summary", build_frame(records))
        row = row_of(table, model="small", attention="sdpa_flash", precision="bf16")
        assert row["forward (ms)"] == "5.00"
        assert row["step (ms)"] == "20.0"
        assert row["tokens/s"] == "102,000"
        assert row["speed-up"] == "UNCLEAR", "one round"
        assert row["peak memory (GiB)"] == "2.00"

    def test_a_speedup_needs_a_verdict(self) -> None:
        """Five rounds of two passes, of a backend twice as fast and of one that is hidden."""
        rounds = {"rounds": [2] * 5, "notes": {"rounds_started_at": ["2026-01-01T00:00:00"] * 5}}
        steady, restless = ([1.0 + spread * (i % 5) for i in range(10)] for spread in (0.001, 0.5))
        times = {"naive": [2 * ms for ms in steady], "sdpa_flash": steady, "flex": restless}
        records = [
            make_record(attention=name, samples_ms={"step": [samples]}, **rounds)
            for name, samples in times.items()
        ]
        table = build_table("summary", build_frame(records))
        found = {name: row_of(table, attention=name)["speed-up"] for name in times}
        assert found == {"naive": "1.00×", "sdpa_flash": "2.00×", "flex": "UNCLEAR"}

    @pytest.mark.parametrize(
        ("attention", "word"),
        [("naive", "OOM"), ("flex", "wrong result"), ("sdpa_flash", "timeout")],
    )
    def test_statuses_in_words(self, records: list[Record], attention: str, word: str) -> None:
        row = row_of(
            build_table("summary", build_frame(records)), model="large", attention=attention
        )
        assert row["forward (ms)"] == row["step (ms)"] == word
        assert row["speed-up"] == row["tokens/s"] == row["peak memory (GiB)"] == "–"

    @pytest.mark.parametrize("name", TABLES.names())
    def test_wrong_is_never_a_speed(self, name: str) -> None:
        """No number of a wrong case's samples reaches any table, in any form."""
        samples = {
            phase: [[777.7, 777.7]]
            for phase in ("forward", "backward", "optimizer", "step", "forward_backward")
        }
        options = {"samples_ms": samples, "status": "wrong", "message": "off"}
        good = {"samples_ms": {phase: [[5.0, 5.0]] for phase in samples}}
        cases = [
            make_record(**kind, **values, attention=attention)
            for kind in ({}, {"task": "attention", "mode": "forward_backward"})
            for attention, values in (("naive", good), ("flex", options))
        ]
        cases += [
            make_split_record("zigzag_llama3", ms=5.0),
            make_split_record("ring", ms=777.7, status="wrong", message="off"),
            make_split_record("zigzag", ms=5.0),
            make_balance_record("zigzag"),
            make_collective_record("all_reduce", ranks=2, size_mib=1, ms=5.0),
            make_collective_record("all_gather", ranks=2, size_mib=1, ms=777.7, wrong=3),
            make_strategy_record("ddp_torch", ms=5.0, bucket_size_mb=25),
            make_strategy_record("ddp_bucketed", ms=777.7, status="wrong", bucket_size_mb=1.0),
            make_collective_record("all_reduce", ranks=2, size_mib=10, ms=9.5),
            make_accounting_record(),
            *audit_examples(),
            *profile_examples(),
            *profile_examples(ms=777.7, status="wrong", message="off"),
            *decode_examples(),
            *gone_wrong(decode_examples(), ms=777.7),
        ]
        table = build_table(name, build_frame(cases))
        if table is None:
            pytest.skip(f"no example here fills {name}")
        for text in (to_csv(table), to_markdown(table), to_latex(table)):
            for case in cases:
                text = text.replace(case.case_id, "")
            assert not re.search("77[78]", text)

    def test_constant_columns_move_to_the_caption(self, records: list[Record]) -> None:
        table = build_table("summary", build_frame(records[:2]))
        assert table is not None
        assert table.columns[0].header == "attention"
        for word in ("model small", "bf16", "batch 4", "sequence length 512", "NVIDIA H200"):
            assert word in table.caption

    def test_models_in_order_of_size_and_naive_first(self) -> None:
        frame = build_frame(
            make_record(model=model, attention=attention, samples_ms=step_samples(1, 1, 1))
            for model in ("large", "tiny", "medium")
            for attention in ("flex", "naive")
        )
        table = build_table("summary", frame)
        assert table is not None
        assert [row[:2] for row in table.cells()] == [
            [model, attention]
            for model in ("tiny", "medium", "large")
            for attention in ("naive", "flex")
        ]

    def test_mixed_precision_side_by_side(self, records: list[Record]) -> None:
        table = build_table("mixed_precision", build_frame(records[:4]))
        row = row_of(table, attention="naive")
        assert row["fp32 forward (ms)"] == "40.0"
        assert row["bf16 forward (ms)"] == "10.0"
        assert row["bf16 speed-up"] == "4.00×"
        assert row_of(table, attention="sdpa_flash")["fp32 forward (ms)"] == "unsupported"

    def test_pytorch_attention_measured_and_predicted(self, records: list[Record]) -> None:
        table = build_table("pytorch_attention", build_frame(records))
        row = row_of(table, attention="naive", seq_len="2,048")
        assert row["forward (ms)"] == "8.00"
        assert row["backward (ms)"] == "16.0"
        assert row["before backward (MiB) measured"] == "512"
        # By today's formula: q, k, v and o 64, probabilities 512, a mask of 2,048 x 2,048 bytes.
        assert row["before backward (MiB) predicted"] == "580"

    def test_torch_compile(self) -> None:
        frame = build_frame(
            [
                make_record(samples_ms=step_samples(10, 20, 10)),
                make_record(
                    compile_scope="model",
                    samples_ms=step_samples(5, 10, 5),
                    compilation={"compile_s": 12.3, "first_pass_s": 12.5, "recompilations": 1},
                ),
            ]
        )
        row = row_of(build_table("torch_compile", frame), compile="model")
        assert row["step (ms)"] == "20.0‡"
        assert row["speed-up step"] == "2.00×"
        assert row["compile (s)"] == "12.3"

    def test_warmup_effect(self) -> None:
        frame = build_frame(
            make_record(warmup_steps=warmup, samples_ms={"step": [[first, 10.0, 10.0]]})
            for warmup, first in ((0, 100.0), (5, 10.0))
        )
        row = row_of(build_table("warmup_effect", frame), **{"warm-up steps": "0"})
        assert row["mean (ms)"] == "40.0†"
        assert row["std (ms)"] == "52.0†"
        assert row["first/median"] == "10.0×"

    def test_strategies_are_compared_with_their_peers_too(self) -> None:
        """Of the same options alone: 4 ms against 6 and, with small buckets, 3 against 9."""
        cases = [
            make_strategy_record("ddp_torch", ms=2.0),
            make_strategy_record("ddp_bucketed", ms=6.0),
            make_strategy_record("zero_1", ms=4.0),
            make_strategy_record("zero_1", ms=3.0, bucket_size_mb=1.0),
            make_strategy_record("ddp_bucketed", ms=9.0, bucket_size_mb=1.0),
            make_strategy_record("zero_2", ms=8.0, bucket_size_mb=2.0),
        ]
        table = build_table("comparison", build_frame(cases))
        assert table is not None
        rows = table.rows
        rows = rows[rows["phase"] == "step"]
        found = {
            (row.strategy, row.baseline): row.ratio
            for row in rows.itertuples()
            if row.baseline != "ddp_torch"
        }
        assert found == {
            ("zero_1", "ddp_bucketed"): pytest.approx(1.5),
            ("zero_1(bucket_size_mb=1.0)", "ddp_bucketed(bucket_size_mb=1.0)"): pytest.approx(3),
        }
        assert set(rows[rows["baseline"] == "ddp_torch"]["strategy"]) >= {"zero_1", "ddp_bucketed"}

    def test_comparison(self, records: list[Record]) -> None:
        table = build_table("comparison", build_frame([in_rounds(record) for record in records]))
        row = row_of(table, model="small", precision="bf16")
        assert row["attention"] == "sdpa_flash"
        assert row["baseline"] == "naive"
        assert row["ratio"] == "2.00×"
        row = row_of(table, seq_len="1,024", phase="forward")
        assert row["ratio"] == "4.00×"
        assert row["interval"] == "4.00 to 4.00"
        assert row["verdict"] == "FASTER"
        assert row_of(table, model="small", precision="fp32")["verdict"] == "unsupported"

    def test_throttled_rows_are_marked(self) -> None:
        state = [{"before": {}, "after": {"throttle_reasons": ["hw_slowdown"]}}]
        record = make_record(samples_ms=step_samples(1, 2, 3), device_state=state)
        table = build_table("summary", build_frame([record]))
        assert table is not None
        assert row_of(table)["forward (ms)"] == "1.00†"
        assert len(table.footnotes) == 1

    def test_golden_markdown(self, records: list[Record]) -> None:
        table = build_table("summary", build_frame(records))
        assert table is not None
        assert to_markdown(table) == (GOLDEN / "summary.md").read_text(encoding="utf-8")

    def test_csv_has_full_precision_and_status(self) -> None:
        good = make_record(samples_ms={"step": [[1 / 3]]})
        bad = make_record(attention="flex", status="oom", message="full")
        table = build_table("summary", build_frame([good, bad]))
        assert table is not None
        header, first, second = to_csv(table).splitlines()
        assert "step_median_ms" in header
        assert repr(1 / 3) in first
        assert ",oom," in second

    def test_every_table_of_times_shows_their_spread(self, every_table: list[Table]) -> None:
        """Beside each median: in the spread column, in the cell, or in a column of its own."""
        timed = []
        for table in every_table:
            name = table.name
            headers = [column.full_header for column in table.columns]
            medians = [
                column
                for column in table.columns
                if re.search(r"\((ms|µs)\)", column.header) and not _from_a_profile(column.key)
            ]
            if not medians:
                continue
            timed.append(name)
            shown = [text for text in ("spread (%)", "IQR (ms)") if text in headers]
            cells = " ".join(cell for row in table.cells() for cell in row)
            assert shown or "%)" in cells, name
            if "spread (%)" in headers:
                assert "interquartile range over median" in table.caption
            for column in medians:
                has_marks = column.mark or column.key in OF_OTHERS
                assert has_marks, f"{name}: {column.full_header} cannot be marked"
        assert len(timed) >= 24

    def test_terminal_fits_100_columns(self, every_table: list[Table]) -> None:
        assert len(every_table) >= 46, "examples that filled a table before"
        for table in every_table:
            console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
            render_terminal(table, console)
            assert max(map(len, console.export_text().splitlines())) <= 100

    def test_the_answer_is_seen_on_80_columns(self) -> None:
        phases = ("forward", "backward", "optimizer", "step")
        steps = [
            in_rounds(
                make_record(
                    model=model,
                    attention=attention,
                    samples_ms={phase: [[ms, 1.1 * ms, 1.2 * ms]] for phase in phases},
                )
            )
            for model in ("small", "medium")
            for attention, ms in (("naive", 20.0), ("compiled", 10.0), ("sdpa", 9.0))
        ]
        table = build_table("summary", build_frame(steps))
        assert table is not None
        console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        render_terminal(table, console)
        _, body = console.export_text().split("\n\n", 1)
        assert "speed-up" in body.split()
        assert "2.00×" in body

    def test_results_are_seen_however_much_says_what_was_measured(self) -> None:
        table = build_table("decode_latency", build_frame(decode_examples()))
        assert table is not None
        points = [column.full_header for column in table.columns if column.point]
        assert sum(map(len, points)) > 40
        for width in (80, 200):
            console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
            render_terminal(table, console)
            words = set(console.export_text().split())
            assert {"step", "tokens/s"} <= words
            (place,) = [index for index, item in enumerate(table.columns) if item.key == "step_us"]
            assert {row[place] for row in table.cells()} <= words


class TestLatex:
    def test_escapes(self) -> None:
        assert escape("a_b 50% & #1 $x ±") == r"a\_b 50\% \& \#1 \$x $\pm$"
        assert escape("{x}\\y~^") == (r"\{x\}\textbackslash{}y\textasciitilde{}\textasciicircum{}")
        assert escape("µ † – é").isascii()

    def test_compiles_alone_and_inside_a_paper(
        self, every_table: list[Table], tmp_path: Path
    ) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        many = [
            make_record(seed=seed, status="failed", message="a_b & 50% # $ ^ ~ \\ {x} <é>")
            for seed in range(1, 50)
        ]
        paper = [r"\documentclass{article}\usepackage{booktabs,graphicx,longtable}"]
        paper.append(r"\begin{document}")
        for label, tables in {"small": every_table, "long": filled(many)}.items():
            for table in tables:
                stem = f"{label}-{table.name}"
                (tmp_path / f"{stem}.tex").write_text(to_latex(table), encoding="utf-8")
                paper.append(rf"\input{{{stem}}}\clearpage")
        paper.append(r"\end{document}")
        # Twice 46, as in the test that counts the tables which examples fill.
        assert len(paper) >= 2 + 2 * 46
        (tmp_path / "paper.tex").write_text("\n".join(paper), encoding="utf-8")
        for file in ("small-summary", "small-cases", "long-cases", "paper"):
            done = subprocess.run(
                ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{file}.tex"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:]
            assert (tmp_path / f"{file}.pdf").stat().st_size > 5000
