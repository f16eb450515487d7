"""The README shows what is committed, and every command, choice and link in it exists."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import re
import statistics
import tomllib
from collections.abc import Callable

import pandas as pd
import pytest

import harness
from harness.cases.format import ABSENT, number
from harness.commands.readme import refreshed
from harness.commands.writeup import ROWS_IN_MARKDOWN
from harness.paths import ROOT
from harness.render.files import to_csv, to_markdown
from harness.render.table import Table, build_table
from harness.request.choices import choices
from harness.request.compose import compose_request
from harness.request.config import GROUPS
from harness.store.record import RecordStore

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results/h200"

Row = dict[str, str]


@functools.cache
def table_of(sweep: str, name: str) -> Table | None:
    """A table as ``attnbench-report`` makes it from the committed records."""
    return build_table(name, frame_of(sweep))


@functools.cache
def frame_of(sweep: str) -> pd.DataFrame:
    return harness.load(RESULTS, sweep=sweep)


def rows_of(sweep: str, name: str) -> list[Row]:
    table = table_of(sweep, name)
    assert table is not None
    rows = csv.DictReader(to_csv(table).splitlines())
    return [row for row in rows if row.get("status", "ok") == "ok"]


# Commands, choices and links


COMMANDS = [
    line.split("#")[0].split()[1:]
    for line in README.splitlines()
    if line.startswith(".venv/bin/attnbench ")
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_compose(arguments: list[str]) -> None:
    assert compose_request([*arguments, "device=cpu"]).cases


def test_programs_targets_and_modules_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(re.findall(r"\b(attnbench(?:-\w+)?)\b(?=[ `])", README)) <= set(scripts)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|`|: )make ([a-z-]+)", README, re.MULTILINE)) <= set(targets)
    for module in re.findall(r"python -m ([\w.]+)", README):
        assert importlib.util.find_spec(module), module


def test_every_choice_named_in_the_table_exists() -> None:
    known = {name for group in GROUPS for name in choices(group)}
    options = tuple(f"{group}." for group in GROUPS)
    for group in GROUPS:
        for line in README.splitlines():
            if line.startswith(f"| `{group}` |"):
                names = set(re.findall(r"`([\w.]+)=?`", line)) - {group}
                assert not {x for x in names - known if not x.startswith(options)}
                assert names & set(choices(group))


def test_every_sweep_is_named() -> None:
    names = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert names <= set(re.findall(r"`(\w+)`", README))


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "docs"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for file in sorted(path.glob("*.md")) if path.suffix == "" else [path]:
        targets = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")))
        inside = {target for target in targets if not target.startswith("http")}
        assert not {target for target in inside if not (file.parent / target).exists()}, file


# Tables: each row of the README's as the committed results have it


def test_filled_tables_are_up_to_date() -> None:
    assert README.count("<!-- table: ") == 2
    assert refreshed(README) == README, "run python -m harness.commands.readme"


def leaderboard() -> list[str]:
    rates = {
        (row["attention"], row["head_dim"]): f"{float(row['all_tflops']):.0f}"
        for row in rows_of("leaderboard", "leaderboard")
        if row["call_compiled"] == "False"
    }
    shown = {
        "`flash_attn_4` 4.0.0b36": "flash_attn_4",
        "`sdpa_cudnn`": "sdpa_cudnn",
        "`flash_triton`": "flash_triton",
        "`flash_triton`, any-GPU kernels": "flash_triton(implementation=plain)",
        "`flex`": "flex",
        "`sdpa_flash` (FlashAttention-2)": "sdpa_flash",
    }
    return [f"{label} | {rates[x, '64']} | {rates[x, '128']}" for label, x in shown.items()]


def short_sequences() -> list[str]:
    times = {
        (row["attention"], row["seq_len"], row["cuda_graph"]): row["forward_backward_median_ms"]
        for row in rows_of("short_sequences", "attention_summary")
    }
    columns = [(length, graph) for length in ("512", "1024", "2048") for graph in ("False", "True")]
    return [
        f"`{name}` | " + " | ".join(number(float(times[name, *column])) for column in columns)
        for name in ("flash_triton", "sdpa_cudnn", "sdpa_flash", "flex", "flash_attn_4")
    ]


def split_sequences() -> list[str]:
    """The fastest transport and kernel of each scheme."""
    rows = rows_of("context_parallel", "context_parallel")
    lengths = ("16384", "32768", "65536", "131072")

    def best(scheme: str, length: str) -> str:
        found = [row for row in rows if (row["scheme"], row["seq_len"]) == (scheme, length)]
        return number(min(float(row["whole_ms"]) for row in found))

    schemes = ("zigzag", "striped", "zigzag_llama3", "context_parallel_torch", "llama3", "ring")
    alone = {row["seq_len"]: float(row["one_device_ms"]) for row in rows[::-1]}
    return [
        "one GPU, `flash_triton` | " + " | ".join(number(alone[length]) for length in lengths),
        *(f"`{x}` | " + " | ".join(best(x, length) for length in lengths) for x in schemes),
    ]


def strategies() -> list[str]:
    cells = []
    for row in rows_of("strategy_scaling", "strategy_scaling"):
        name = "`none`, one GPU" if row["strategy"] == "none" else f"`{row['strategy']}`"
        rate = float(f"{float(row['step_tokens_per_s']):.3g}")
        cells.append(
            f"{name} | {number(float(row['step_median_ms']))} | {rate:,.0f}"
            f" | {100 * float(row['efficiency']):.1f} | {float(row['peak_memory_gib']):.1f}"
        )
    return cells


def decoding() -> list[str]:
    rows = {
        (row["batch_size"], row["seq_len"], row["cache"], row["attention"]): row
        for row in rows_of("decode_latency", "decode_latency")
    }
    cells = []
    for batch_size, length, cache in (
        ("16", "32768", "contiguous"),
        ("16", "32768", "paged64"),
        ("1", "131072", "contiguous"),
    ):
        found = [
            rows[batch_size, length, cache, name] for name in ("standard", "sdpa", "flash_decode")
        ]
        times = " | ".join(number(float(row["step_us"])) for row in found)
        share = 100 * float(found[-1]["copy_share"])
        cells.append(f"{batch_size}, {int(length):,}, {cache} | {times} | {share:.0f}%")
    return cells


def generation() -> list[str]:
    rates = {
        (row["batch_size"], row["cache"], row["attention"]): number(
            float(row["decode_tokens_per_s"])
        )
        for row in rows_of("generate", "generate")
        if (row["cuda_graph"], row["lengths"]) == ("True", "equal")
    }
    return [
        f"{batch_size}, {cache} | "
        + " | ".join(
            rates.get((batch_size, cache, name), ABSENT)
            for name in ("standard", "sdpa", "flash_decode")
        )
        for batch_size in ("1", "16")
        for cache in ("contiguous", "paged64")
    ]


TABLES = (leaderboard, short_sequences, split_sequences, strategies, decoding, generation)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_rows_are_those_of_the_committed_tables(table: Callable[[], list[str]]) -> None:
    lines = set(README.splitlines())
    assert not [row for row in table() if f"| {row} |" not in lines]


# Numbers in the text: the figures with their unit, wherever a sentence has them


def ratios_to_cudnn() -> list[str]:
    """Forward and backward together, in head_dim_and_gqa."""
    plan = json.loads((RESULTS / "sweeps/head_dim_and_gqa/plan.json").read_text())
    medians = {}
    records, _ = RecordStore(RESULTS).load()
    for case_id in plan["case_ids"]:
        record = records[case_id]
        task, attention = record.case["task"], record.case["attention"]["name"]
        if record.status == "ok":
            (samples,) = record.phases["forward_backward"].samples_ms
            key = task["head_dim"], task["num_kv_heads"]
            medians[*key, attention] = statistics.median(samples)
    small, large = (
        [
            median / medians[head_dim, kv_heads, "sdpa_cudnn"]
            for (head_dim, kv_heads, attention), median in medians.items()
            if attention == "flash_triton" and (head_dim <= 128) == below
        ]
        for below in (True, False)
    )
    return [
        f"{min(small):.2f} to {max(small):.2f} times",
        f"{min(large):.1f} to {max(large):.1f} times",
    ]


def zigzag() -> list[str]:
    rows = [
        row
        for row in rows_of("context_parallel", "context_parallel")
        if row["scheme"] == "zigzag" and int(row["seq_len"]) >= 32768
    ]
    fastest = {
        length: min(
            (row for row in rows if row["seq_len"] == length), key=lambda x: float(x["whole_ms"])
        )
        for length in ("32768", "65536", "131072")
    }
    kept = [100 * float(row["efficiency"]) for row in fastest.values()]
    waits = {
        transport: [
            float(row["exposed_ms"])
            for row in rows
            if (row["transport"], row["kernel"]) == (transport, "flash_triton")
        ]
        for transport in ("symmetric", "send_recv")
    }
    return [
        f"{min(kept):.0f} to {max(kept):.0f}%",
        *(f"{min(values):.1f} to {max(values):.1f}" for values in waits.values()),
    ]


def sharded_training() -> list[str]:
    rows = {row["strategy"]: row for row in rows_of("data_parallel_peers", "data_parallel")}
    bucketed, zero_2 = rows["ddp_bucketed"], rows["zero_2"]
    spared = float(bucketed["peak_memory_gib"]) - float(zero_2["peak_memory_gib"])
    time = float(zero_2["step_median_ms"]) / float(bucketed["step_median_ms"])
    steps = [
        float(row["step_median_ms"])
        for row in rows_of("ddp_bucketed", "data_parallel")
        if row["precision"] == "fp32" and row["strategy"].startswith("ddp_bucketed")
    ]
    return [
        f"{time:.2f} times",
        f"{spared:.1f} GiB less",
        f"{min(steps):.0f} to {max(steps):.0f} ms",
    ]


def memory_and_roofs() -> list[str]:
    ratios = [float(row["ratio"]) for row in rows_of("memory_profiling", "peak_memory")]
    (roof,) = (row for row in rows_of("roofline", "device_roof") if row["precision"] == "bf16")
    return [
        f"{min(ratios):.2f} to {max(ratios):.2f} times",
        f"{number(float(roof['copy_gb_s']))} GB/s",
        f"{number(float(roof['matmul_tflops']))} TFLOP/s",
    ]


def graphs() -> list[str]:
    return [
        f"{number(float(row['step_us']))} µs"
        for row in rows_of("graph_effect", "graph_effect")
        if (row["attention"], row["batch_size"], row["seq_len"], row["cache"])
        == ("flash_decode", "1", "512", "contiguous")
    ]


def kernels_and_precisions() -> list[str]:
    rows = rows_of("nsys_profile", "kernel_categories")
    shares = [
        [100 * float(row["matmul_share"]) for row in rows if (row["mode"], row["phase"]) == key]
        for key in (("forward", "forward"), ("train_step", "step"))
    ]
    errors = [
        f"{100 * float(row['gradient_error']):.1f}%"
        for row in rows_of("precision_audit", "precision_error")
        if row["model"] == "small" and row["precision"].startswith(("bf16", "fp16"))
    ]
    return [*(f"{min(share):.0f} to {max(share):.0f}%" for share in shares), *errors]


NUMBERS = (
    ratios_to_cudnn,
    zigzag,
    sharded_training,
    graphs,
    memory_and_roofs,
    kernels_and_precisions,
)


@pytest.mark.parametrize("numbers", NUMBERS, ids=lambda numbers: numbers.__name__)
def test_numbers_in_the_text_are_those_of_the_committed_tables(
    numbers: Callable[[], list[str]],
) -> None:
    words = " ".join(README.split())
    expected = numbers()
    assert len(expected) >= 2
    assert not [figure for figure in expected if figure not in words]


def test_the_committed_write_up_shows_the_committed_tables() -> None:
    """Longer tables are cut in Markdown; the others stand there row by row."""
    lines = set((RESULTS / "writeup/writeup.md").read_text(encoding="utf-8").splitlines())
    compared = 0
    for plan in sorted(RESULTS.glob("sweeps/*/plan.json")):
        for name in json.loads(plan.read_text(encoding="utf-8"))["tables"]:
            table = table_of(plan.parent.name, name)
            text = to_markdown(table) if table is not None else ""
            rows = [line for line in text.splitlines() if line.startswith("|")][2:]
            if len(rows) <= ROWS_IN_MARKDOWN:
                missing = [row for row in rows if row not in lines]
                assert not missing, f"{plan.parent.name}: attnbench-writeup results/h200"
                compared += len(rows)
    assert compared > 500
