# ruff: noqa: RUF001 - tables use typographic signs
"""From records to tables, figures and report: numbers against hand-computed values."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from programs import need_program
from records import (
    ENVIRONMENT,
    Samples,
    audit_examples,
    decode_examples,
    gone_wrong,
    make_accounting_record,
    make_balance_record,
    make_collective_record,
    make_record,
    make_split_record,
    make_strategy_record,
    profile_examples,
    split_examples,
    write_plan,
)
from rich.console import Console

from harness import report
from harness.figure import _below
from harness.format import integer, number, with_spread
from harness.frame import build_frame
from harness.hardware import FOLDER, find_hardware
from harness.latex import escape, to_latex
from harness.record import STATUSES, Record, RecordStore
from harness.render import render_sweep, render_terminal, to_csv, to_markdown
from harness.stats import median_ratio, quartiles, slowest_rank, verdict
from harness.table import TABLES, Table, build_table

GOLDEN = Path(__file__).parent / "golden"

FIGURES = [
    *("attention_memory", "attention_scaling", "precision", "speedup", "step_time"),
    "warmup_effect",
]


def step_samples(forward: float, backward: float, optimizer: float) -> Samples:
    """Three samples per phase, the middle one the median."""
    total = forward + backward + optimizer
    values = {"forward": forward, "backward": backward, "optimizer": optimizer, "step": total}
    return {name: [[value * 1.5, value, value * 0.5]] for name, value in values.items()}


@pytest.fixture
def records() -> list[Record]:
    """A little of everything, with every status."""
    found = [
        make_record(attention="naive", samples_ms=step_samples(10, 20, 10)),
        make_record(attention="sdpa_flash", samples_ms=step_samples(5, 10, 5)),
        make_record(attention="naive", precision="fp32", samples_ms=step_samples(40, 80, 10)),
        make_record(attention="sdpa_flash", precision="fp32", status="unsupported", message="fp32"),
        make_record(model="large", status="oom", message="CUDA out of memory", environment={}),
        make_record(model="large", attention="flex", status="wrong", message="o is off by 10%"),
        make_record(model="large", attention="sdpa_flash", status="timeout", message="600 s"),
        make_record(model="large", attention="sdpa_math", status="failed", message="a_b & 50% | $"),
    ]
    for seq_len, attention in [(a, b) for a in (1024, 2048) for b in ("naive", "flex")]:
        time = seq_len / 1024 * (1 if attention == "flex" else 4)
        found.append(
            make_record(
                task="attention",
                mode="forward_backward",
                attention=attention,
                seq_len=seq_len,
                samples_ms={
                    "forward": [[time] * 3],
                    "backward": [[2 * time] * 3],
                    "forward_backward": [[3 * time] * 3],
                },
                memory=[
                    {
                        "source": "cuda",
                        "peak_allocated_bytes": 2**30,
                        "before_backward_bytes": 512 * 2**20,
                    }
                ],
                notes={"predicted_memory": {"inputs": 2**28, "output": 2**28}},
            )
        )
    return found


def write_results(folder: Path, records: list[Record], **plan: list[str]) -> RecordStore:
    store = RecordStore(folder)
    store.create()
    for record in records:
        store.write(record)
    write_plan(folder, "all", records, **{"tables": TABLES.names(), **plan})
    return store


def cells_of(table: Table | None, **where: str) -> dict[str, str]:
    """The one row whose cells match, by header."""
    assert table is not None
    headers = [column.full_header for column in table.columns]
    rows = [dict(zip(headers, row, strict=True)) for row in table.cells()]
    matching = [row for row in rows if where.items() <= row.items()]
    assert len(matching) == 1, rows
    return matching[0]


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

    def test_bootstrap_interval_covers_a_known_ratio(self) -> None:
        slow = [20.0 + 0.01 * index for index in range(20)]
        fast = [10.0 + 0.01 * index for index in range(20)]
        ratio, low, high = median_ratio(slow, fast)
        assert ratio == statistics.median(slow) / statistics.median(fast)
        assert 1.95 < low < ratio < high < 2.05
        assert (ratio, low, high) == median_ratio(slow, fast)

    def test_bootstrap_of_constant_samples_has_no_width(self) -> None:
        assert median_ratio([6.0] * 5, [3.0] * 7) == (2.0, 2.0, 2.0)

    def test_bootstrap_of_wide_samples_is_wide(self) -> None:
        samples = [1.0, 2.0, 3.0, 4.0, 5.0]
        _, low, high = median_ratio(samples, samples)
        assert low < 0.7
        assert high > 1.4

    @pytest.mark.parametrize(
        ("ratio", "low", "high", "expected"),
        [
            (1.5, 1.4, 1.6, "FASTER"),
            (0.5, 0.4, 0.6, "SLOWER"),
            (1.5, 0.9, 2.0, "SAME"),
            (1.005, 1.001, 1.009, "SAME"),
        ],
    )
    def test_verdict(self, ratio: float, low: float, high: float, expected: str) -> None:
        assert verdict(ratio, low, high) == expected


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

    def test_no_records_make_no_table(self) -> None:
        frame = build_frame([])
        assert all(build_table(name, frame) is None for name in TABLES.names())


class TestHardware:
    def test_every_file_is_complete_and_names_its_source(self) -> None:
        paths = list(FOLDER.glob("*.yaml"))
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
        row = cells_of(table, model="small", attention="sdpa_flash", precision="bf16")
        assert row["forward (ms)"] == "5.00"
        assert row["step (ms)"] == "20.0"
        assert row["tokens/s"] == "102,000"
        assert row["speed-up"] == "2.00×"
        assert row["peak memory (GiB)"] == "2.00"

    @pytest.mark.parametrize(
        ("attention", "word"),
        [("naive", "OOM"), ("flex", "wrong result"), ("sdpa_flash", "timeout")],
    )
    def test_statuses_in_words(self, records: list[Record], attention: str, word: str) -> None:
        row = cells_of(
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
        assert table is not None
        for text in (to_csv(table), to_markdown(table), to_latex(table)):
            for case in cases:
                text = text.replace(case.case_id, "")
            assert "77" not in text

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
        row = cells_of(table, attention="naive")
        assert row["fp32 forward (ms)"] == "40.0"
        assert row["bf16 forward (ms)"] == "10.0"
        assert row["bf16 speed-up"] == "4.00×"
        assert cells_of(table, attention="sdpa_flash")["fp32 forward (ms)"] == "unsupported"

    def test_pytorch_attention_measured_and_predicted(self, records: list[Record]) -> None:
        table = build_table("pytorch_attention", build_frame(records))
        row = cells_of(table, attention="naive", seq_len="2,048")
        assert row["forward (ms)"] == "8.00"
        assert row["backward (ms)"] == "16.0"
        assert row["before backward (MiB) measured"] == "512"
        assert row["before backward (MiB) predicted"] == "512"

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
        row = cells_of(build_table("torch_compile", frame), compile="model")
        assert row["step (ms)"] == "20.0‡"
        assert row["speed-up step"] == "2.00×"
        assert row["compile (s)"] == "12.3"

    def test_warmup_effect(self) -> None:
        frame = build_frame(
            make_record(warmup_steps=warmup, samples_ms={"step": [[first, 10.0, 10.0]]})
            for warmup, first in ((0, 100.0), (5, 10.0))
        )
        row = cells_of(build_table("warmup_effect", frame), **{"warm-up steps": "0"})
        assert row["mean (ms)"] == "40.0"
        assert row["std (ms)"] == "52.0"
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
        table = build_table("comparison", build_frame(records))
        row = cells_of(table, model="small", precision="bf16")
        assert row["attention"] == "sdpa_flash"
        assert row["baseline"] == "naive"
        assert row["ratio"] == "2.00×"
        row = cells_of(table, seq_len="1,024", phase="forward")
        assert row["ratio"] == "4.00×"
        assert row["95% interval"] == "4.00 to 4.00"
        assert row["verdict"] == "FASTER"
        assert cells_of(table, model="small", precision="fp32")["verdict"] == "unsupported"

    def test_throttled_rows_are_marked(self) -> None:
        state = [{"before": {}, "after": {"throttle_reasons": ["hw_slowdown"]}}]
        record = make_record(samples_ms=step_samples(1, 2, 3), device_state=state)
        table = build_table("summary", build_frame([record]))
        assert table is not None
        assert cells_of(table)["forward (ms)"] == "1.00†"
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

    def test_terminal_fits_100_columns(self, records: list[Record]) -> None:
        records = [*records, *split_examples(), *audit_examples(), *profile_examples()]
        records += decode_examples()
        for name in TABLES.names():
            table = build_table(name, build_frame(records))
            assert table is not None
            console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
            render_terminal(table, console)
            assert max(map(len, console.export_text().splitlines())) <= 100

    def test_results_are_seen_however_much_says_what_was_measured(self) -> None:
        table = build_table("decode_latency", build_frame(decode_examples()))
        assert table is not None
        points = [column.full_header for column in table.columns if column.point]
        assert sum(map(len, points)) > 40
        for width in (80, 200):
            console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
            render_terminal(table, console)
            words = console.export_text().split()
            assert {"step", "tokens/s"} <= set(words)
            assert all(
                row[table.columns.index(column)] in words
                for row in table.cells()
                for column in table.columns
                if column.key == "step_us"
            )


class TestLatex:
    def test_escapes(self) -> None:
        assert escape("a_b 50% & #1 $x ±") == r"a\_b 50\% \& \#1 \$x $\pm$"
        assert escape("{x}\\y~^") == (r"\{x\}\textbackslash{}y\textasciitilde{}\textasciicircum{}")
        assert escape("µ † – é").isascii()

    def test_compiles_alone_and_inside_a_paper(self, records: list[Record], tmp_path: Path) -> None:
        need_program("pdflatex", "texlive-latex-recommended")
        many = [
            make_record(seed=seed, status="failed", message="a_b & 50% # $ ^ ~ \\ {x} <é>")
            for seed in range(1, 50)
        ]
        records = [*records, *split_examples(), *audit_examples(), *profile_examples()]
        records += decode_examples()
        frames = {"small": build_frame(records), "long": build_frame([*records, *many])}
        paper = [r"\documentclass{article}\usepackage{booktabs,graphicx,longtable}"]
        paper.append(r"\begin{document}")
        for label, frame in frames.items():
            for name in TABLES.names():
                table = build_table(name, frame)
                assert table is not None
                stem = f"{label}-{name}"
                (tmp_path / f"{stem}.tex").write_text(to_latex(table), encoding="utf-8")
                paper.append(rf"\input{{{stem}}}\clearpage")
        paper.append(r"\end{document}")
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


class TestSweep:
    def test_every_file_and_a_complete_report(self, records: list[Record], tmp_path: Path) -> None:
        records = [*records, *split_examples(), *audit_examples(), *profile_examples()]
        records += decode_examples()
        store = write_results(tmp_path, records, figures=FIGURES, missing=["planned-0123456789"])
        (store.folder / "broken-aaaaaaaaaa.json").write_text("{", encoding="utf-8")
        found, problems = store.load()
        rendered = render_sweep(tmp_path, "all", found, problems)
        assert [table.name for table in rendered.tables] == TABLES.names()
        names = {path.relative_to(rendered.folder).as_posix() for path in rendered.paths}
        expected = {
            f"tables/{name}.{end}" for name in TABLES.names() for end in ("csv", "md", "tex")
        }
        expected |= {f"figures/{name}.{end}" for name in FIGURES for end in ("png", "svg")}
        assert names == expected | {"report.md"}
        assert not list(tmp_path.rglob("*.tmp"))
        text = rendered.report.read_text(encoding="utf-8")
        for words in (
            "# A sweep of examples",
            "attnbench sweeps=all",
            "- planned-0123456789",
            "records/broken-aaaaaaaaaa.json",
            "CUDA out of memory",
            "a_b & 50% \\| $",
            "](figures/step_time.png)",
            "| device | NVIDIA H200 |",
            "1 wrong result",
            "1 not measured",
        ):
            assert words in text
        assert str(tmp_path) not in text

    def test_rendering_again_gives_the_same_bytes(
        self, records: list[Record], tmp_path: Path
    ) -> None:
        """In another folder, in another process, from records listed in another order."""
        records += [
            make_record(
                attention=attention,
                seq_len=64,
                samples_ms={"step": [[base + index**1.5 for index in range(21)]]},
            )
            for attention, base in (("naive", 20.0), ("flex", 9.0))
        ]
        contents = []
        for name, ordered in (("one", records), ("two", records[::-1])):
            folder = tmp_path / name
            write_results(folder, ordered)
            write_plan(folder, "all", records, tables=TABLES.names(), figures=FIGURES)
            subprocess.run(
                [sys.executable, "-m", "harness.report", str(folder)],
                check=True,
                cwd=Path(__file__).parents[1],
                env={**os.environ, "PYTHONHASHSEED": str(len(contents) + 1)},
                capture_output=True,
            )
            sweep = folder / "sweeps" / "all"
            contents.append(
                {path.relative_to(sweep): path.read_bytes() for path in sorted(sweep.rglob("*.*"))}
            )
        first, second = contents
        assert first.keys() == second.keys()
        assert len(first) > 30
        assert [path for path in first if first[path] != second[path]] == []

    def test_a_table_that_has_become_empty_is_removed(
        self, records: list[Record], tmp_path: Path
    ) -> None:
        store = write_results(tmp_path, records, tables=["summary"])
        found, _ = store.load()
        path = tmp_path / "sweeps" / "all" / "tables" / "summary.md"
        render_sweep(tmp_path, "all", found, [])
        assert path.exists()
        render_sweep(tmp_path, "all", {}, [])
        assert not path.exists()


class TestReportCommand:
    def test_renders_around_an_unreadable_record(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = write_results(tmp_path, records, tables=["cases"])
        path = store.path(records[0].case_id, 1)
        path.write_text(path.read_text(encoding="utf-8")[:100], encoding="utf-8")
        assert report.main([str(tmp_path)]) == 0
        output = capsys.readouterr()
        assert str(path) in output.err
        assert "report.md" in output.out
        table = (tmp_path / "sweeps" / "all" / "tables" / "cases.md").read_text(encoding="utf-8")
        assert "sdpa_flash" in table
        text = (tmp_path / "sweeps" / "all" / "report.md").read_text(encoding="utf-8")
        assert f"- {records[0].case_id}" in text

    def test_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert report.main([str(tmp_path / "nothing")]) == 2
        error = capsys.readouterr().err
        assert error == f"attnbench-report: RESULTS={tmp_path / 'nothing'}: no such folder\n"

    def test_not_a_results_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert report.main([str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_unknown_sweep(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_results(tmp_path, records)
        assert report.main([str(tmp_path), "nope"]) == 2
        assert "SWEEP=nope" in capsys.readouterr().err

    def test_broken_plan_spares_the_other_sweeps(
        self, records: list[Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_results(tmp_path, records, tables=["summary"])
        broken = tmp_path / "sweeps" / "aaa" / "plan.json"
        broken.parent.mkdir()
        broken.write_text("{}", encoding="utf-8")
        assert report.main([str(tmp_path)]) == 2
        assert str(broken) in capsys.readouterr().err
        assert (tmp_path / "sweeps" / "all" / "report.md").exists()


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys; from harness import report; from harness.table import TABLES; "
        "from harness.figure import FIGURES; TABLES.names(); FIGURES.names(); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


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
