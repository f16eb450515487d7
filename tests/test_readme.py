"""The README shows what is committed, and every command and link in it exists."""

from __future__ import annotations

import csv
import json
import re
import statistics

import pytest

from harness.cases.format import ABSENT, number
from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS
from harness.commands.readme import refreshed
from harness.commands.writeup import ROWS_IN_MARKDOWN
from harness.paths import ROOT
from harness.request.compose import compose_request
from kernels.caches.choice import CACHES
from parallel import BACKENDS, STRATEGIES

README = (ROOT / "README.md").read_text(encoding="utf-8")


CHOICES = {
    "task": TASKS.names(),
    "attention": BACKENDS.names(),
    "cache": CACHES.names(),
    "profile": PROFILERS.names(),
    "parallel": STRATEGIES.names(),
    **{
        group: [path.stem for path in (ROOT / "conf" / group).glob("*.yaml")]
        for group in ("model", "precision", "compile", "checkpoint")
    },
}


@pytest.mark.parametrize("key", CHOICES)
def test_every_choice_is_in_the_table(key: str) -> None:
    (row,) = (line for line in README.splitlines() if line.startswith(f"| `{key}` |"))
    assert set(CHOICES[key]) <= set(re.findall(r"`([\w.]+)`", row))


def test_every_sweep_is_named() -> None:
    names = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert names <= set(re.findall(r"`(\w+)`", README))


def test_tables_are_those_of_the_committed_results() -> None:
    assert README.count("<!-- table: ") == 2
    assert refreshed(README) == README, "run python -m harness.commands.readme"


def test_kernel_rates_are_those_of_the_committed_leaderboard() -> None:
    path = ROOT / "results/h200/sweeps/leaderboard/tables/leaderboard.csv"
    with path.open(newline="") as file:
        rates = {
            (row["attention"], row["head_dim"]): row["all_tflops"]
            for row in csv.DictReader(file)
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
    for label, attention in shown.items():
        cells = [f"{float(rates[attention, head_dim]):.0f}" for head_dim in ("64", "128")]
        assert f"| {label} | {cells[0]} | {cells[1]} |" in README


def test_ratios_to_cudnn_are_those_of_the_committed_records() -> None:
    """Of both passes together, by head_dim and key heads, in head_dim_and_gqa."""
    folder = ROOT / "results/h200"
    plan = json.loads((folder / "sweeps/head_dim_and_gqa/plan.json").read_text())
    medians = {}
    for case_id in plan["case_ids"]:
        record = json.loads((folder / f"records/{case_id}.json").read_text())
        task, attention = record["case"]["task"], record["case"]["attention"]["name"]
        if record["status"] == "ok":
            (samples,) = record["phases"]["forward_backward"]["samples_ms"]
            key = task["head_dim"], task["num_kv_heads"], attention
            medians[key] = statistics.median(samples)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for head_dim, kv_heads, attention in medians:
        if attention == "flash_triton":
            peer = medians[head_dim, kv_heads, "sdpa_cudnn"]
            ratios[head_dim <= 128].append(medians[head_dim, kv_heads, attention] / peer)
    small, large = ratios[True], ratios[False]
    words = " ".join(README.split())
    assert f"takes {min(small):.2f} to {max(small):.2f} times cuDNN's time" in words
    assert f"and {min(large):.1f} to {max(large):.1f} times at 256" in words


def rows_of(sweep: str, table: str) -> list[dict[str, str]]:
    path = ROOT / f"results/h200/sweeps/{sweep}/tables/{table}.csv"
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_times_of_short_sequences_are_the_committed_tables() -> None:
    both = {
        (row["attention"], row["seq_len"], row["cuda_graph"]): float(
            row["forward_backward_median_ms"]
        )
        for row in rows_of("short_sequences", "attention_summary")
        if row["status"] == "ok"
    }
    columns = [(length, graph) for length in ("512", "1024", "2048") for graph in ("False", "True")]
    for name in ("flash_triton", "sdpa_cudnn", "sdpa_flash", "flex", "flash_attn_4"):
        cells = " | ".join(number(both[name, *column]) for column in columns)
        assert f"| `{name}` | {cells} |" in README


def split_rows(sweep: str) -> list[dict[str, str]]:
    """What was measured of attention on sequences split over ranks."""
    return [row for row in rows_of(sweep, "context_parallel") if row["status"] == "ok"]


def test_times_of_split_sequences_are_the_best_of_the_committed_table() -> None:
    rows = split_rows("context_parallel")
    lengths = ("16384", "32768", "65536", "131072")
    schemes = ("zigzag", "striped", "zigzag_llama3", "context_parallel_torch", "llama3", "ring")
    for scheme in schemes:
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        best = [
            min(float(row["whole_ms"]) for row in of_scheme if row["seq_len"] == length)
            for length in lengths
        ]
        assert f"| `{scheme}` | {' | '.join(map(number, best))} |" in README
    alone = {row["seq_len"]: float(row["one_device_ms"]) for row in rows[::-1]}
    assert {row["kernel"] for row in rows if float(row["one_device_ms"]) in alone.values()} == {
        "flash_triton"
    }
    cells = " | ".join(number(alone[length]) for length in lengths)
    assert f"| one GPU, `flash_triton` | {cells} |" in README


def test_what_is_said_of_split_sequences_is_in_the_committed_tables() -> None:
    words = " ".join(README.split())
    rows = [row for row in split_rows("context_parallel") if int(row["seq_len"]) >= 32768]
    zigzag = [row for row in rows if row["scheme"] == "zigzag"]
    best = [
        min((row for row in zigzag if row["seq_len"] == length), key=lambda x: float(x["whole_ms"]))
        for length in ("32768", "65536", "131072")
    ]
    kept = [100 * float(row["efficiency"]) for row in best]
    assert f"keeps {min(kept):.0f} to {max(kept):.0f}% of a perfect split" in words
    waits = {
        transport: [
            float(row["exposed_ms"])
            for row in zigzag
            if row["transport"] == transport and row["kernel"] == "flash_triton"
        ]
        for transport in ("symmetric", "send_recv")
    }
    least, most = ({k: f(v) for k, v in waits.items()} for f in (min, max))
    assert (
        f"waits {least['symmetric']:.1f} to {most['symmetric']:.1f} ms for others, with "
        f"`send_recv` {least['send_recv']:.1f} to {most['send_recv']:.1f}" in words
    )
    assert "it wins at every length" in words
    whole = {
        (row["seq_len"], row["kernel"], row["transport"]): float(row["whole_ms"])
        for row in split_rows("context_parallel")
        if row["scheme"] == "zigzag"
    }
    pairs = {(seq_len, kernel) for seq_len, kernel, _ in whole}
    assert len(pairs) == 8
    assert all(whole[*pair, "symmetric"] < whole[*pair, "send_recv"] for pair in pairs)
    gathered = {
        (row["seq_len"], row["transport"]): float(row["peak_memory_gib"])
        for row in rows
        if (row["scheme"], row["kernel"]) == ("zigzag_llama3", "flash_triton")
    }
    shares = [
        float(row["peak_memory_gib"]) / gathered[row["seq_len"], "all_gather"]
        for row in zigzag
        if (row["transport"], row["kernel"]) == ("symmetric", "flash_triton")
    ]
    assert f"in {min(shares):.1f} to {max(shares):.1f} times `zigzag_llama3`'s memory" in words
    backward = {
        row["modes"]: float(row["backward_median_ms"])
        for row in rows_of("zigzag_modes", "zigzag_modes")
        if row["world_size"] == "4"
    }
    two, fused = (backward[f"two_kernels / {mode}"] for mode in ("two_kernels", "fused"))
    assert f"in the backward pass it costs {100 * (fused / two - 1):.0f}% on four ranks" in words
    packed = {
        row["attention"]: float(row["whole_ms"])
        for row in split_rows("zigzag_modes")[::-1]
        if row["world_size"] == "4"
    }
    llama3 = packed["llama3(kernel=flash_triton)"]
    zigzag_llama3 = packed["zigzag_llama3(kernel=flash_triton)"]
    assert f"it takes {zigzag_llama3 / llama3:.2f} times `llama3`'s time" in words


def test_what_is_said_of_strategies_is_in_the_committed_tables() -> None:
    words = " ".join(README.split())
    rows = {row["strategy"]: row for row in rows_of("data_parallel_peers", "data_parallel")}
    assert {row["status"] for row in rows.values()} == {"ok"}
    scaling = {row["strategy"]: row for row in rows_of("strategy_scaling", "strategy_scaling")}
    assert len(scaling) == 9
    for strategy, row in scaling.items():
        step, memory = float(row["step_median_ms"]), float(row["peak_memory_gib"])
        rate = float(f"{float(row['step_tokens_per_s']):.3g}")
        name = "`none`, one GPU" if strategy == "none" else f"`{strategy}`"
        efficiency = f"{100 * float(row['efficiency']):.1f}"
        cells = f"| {name} | {number(step)} | {rate:,.0f} | {efficiency} | {memory:.1f} |"
        assert cells in README
        # One run, which both sweeps show.
        if strategy in rows:
            assert row["step_median_ms"] == rows[strategy]["step_median_ms"]
    fastest = min(rows, key=lambda name: float(rows[name]["step_median_ms"]))
    assert fastest == "fsdp"
    bucketed = float(rows["ddp_bucketed"]["step_median_ms"])
    for strategy in ("zero_1", "zero_2"):
        assert f"{float(rows[strategy]['step_median_ms']) / bucketed:.2f}" == "0.99"
    peaks = {name: float(row["peak_memory_gib"]) for name, row in rows.items()}
    spared = peaks["ddp_bucketed"] - peaks["zero_2"]
    assert f"it takes 0.99 times its time and {spared:.1f} GiB less" in words
    exposed = {name: 100 * float(row["exposed_share"]) for name, row in rows.items()}
    worst = max(exposed[name] for name in ("ddp_bucketed", "zero_2", "fsdp"))
    assert f"at most {worst:.1f}% of a step is exposed" in words
    assert f"({exposed['zero_1']:.1f}% of `zero_1`'s traced step:" in words
    shares = {
        row["strategy"]: 100 * float(row["exposed_share"])
        for row in rows_of("ddp_overlap", "data_parallel")
        if row["precision"] == "fp32"
    }
    costs = f"{shares['ddp_naive']:.0f}% of a step with one all-reduce a parameter"
    assert f"{costs} and {shares['ddp_flat']:.0f}% with one for all" in words
    steps = [
        float(row["step_median_ms"])
        for row in rows_of("ddp_bucketed", "data_parallel")
        if row["precision"] == "fp32" and row["strategy"].startswith("ddp_bucketed")
    ]
    assert len(steps) == 5
    assert f"steps of {min(steps):.0f} to {max(steps):.0f} ms from 1 to 1,000 MiB" in words


def test_what_is_said_of_memory_and_roofs_is_in_the_committed_tables() -> None:
    words = " ".join(README.split())
    ratios = [float(row["ratio"]) for row in rows_of("memory_profiling", "peak_memory")]
    assert f"of {len(ratios)} steps of the 2.7B model" in words
    assert f"is {min(ratios):.2f} to {max(ratios):.2f} times the measured one" in words
    block = {
        row["attention"]: (f"{float(row['memory_ratio']):.2f}", f"{float(row['time_ratio']):.2f}")
        for row in rows_of("checkpointing", "checkpointing")
        if row["checkpoint"] == "block"
    }
    assert "in {} times the memory and {} times the time".format(*block["naive"]) in words
    assert "and {} and {} times with `sdpa`".format(*block["sdpa"]) in words
    (roof,) = (row for row in rows_of("roofline", "device_roof") if row["precision"] == "bf16")
    assert f"A copy reaches {number(float(roof['copy_gb_s']))} GB/s" in words
    assert f"bfloat16 matmul {number(float(roof['matmul_tflops']))} TFLOP/s" in words
    shares = [100 * float(roof[key]) for key in ("copy_share", "matmul_share")]
    assert "{:.0f} and {:.0f}% of the datasheet".format(*shares) in words


def test_what_is_said_of_decoding_is_in_the_committed_tables() -> None:
    words = " ".join(README.split())
    rows = [row for row in rows_of("decode_latency", "decode_latency") if row["status"] == "ok"]

    def step_us(attention: str, batch_size: str, seq_len: str, cache: str) -> dict[str, str]:
        (row,) = (
            row
            for row in rows
            if (row["attention"], row["batch_size"]) == (attention, batch_size)
            and (row["seq_len"], row["cache"]) == (seq_len, cache)
        )
        return row

    for batch_size, seq_len, cache in (
        ("16", "32768", "contiguous"),
        ("16", "32768", "paged64"),
        ("1", "131072", "contiguous"),
    ):
        found = [
            step_us(name, batch_size, seq_len, cache)
            for name in ("standard", "sdpa", "flash_decode")
        ]
        times = " | ".join(number(float(row["step_us"])) for row in found)
        share = 100 * float(found[-1]["copy_share"])
        assert f"| {batch_size}, {int(seq_len):,}, {cache} | {times} | {share:.0f}% |" in README
    absorbed, materialised = (
        step_us(name, "32", "16384", "latent64") for name in ("mla_absorbed", "mla_materialised")
    )
    times = [number(float(row["step_us"])) for row in (absorbed, materialised)]
    assert "{} µs where `mla_materialised` takes {}".format(*times) in words
    graphs = {
        (row["attention"], row["cuda_graph"]): number(float(row["step_us"]))
        for row in rows_of("graph_effect", "graph_effect")
        if row["status"] == "ok"
        and (row["batch_size"], row["seq_len"], row["cache"]) == ("1", "512", "contiguous")
    }
    fused = graphs["flash_decode", "False"], graphs["flash_decode", "True"]
    assert "take {} µs launched one by one and {} µs as one graph".format(*fused) in words
    plain = graphs["standard", "False"], graphs["standard", "True"]
    assert "(`standard` {} and {};".format(*plain) in words
    rates = {
        (row["attention"], row["batch_size"], row["cache"]): number(
            float(row["decode_tokens_per_s"])
        )
        for row in rows_of("generate", "generate")
        if (row["status"], row["cuda_graph"], row["lengths"]) == ("ok", "True", "equal")
    }
    for batch_size in ("1", "16"):
        for cache in ("contiguous", "paged64"):
            cells = " | ".join(
                rates.get((name, batch_size, cache), ABSENT)
                for name in ("standard", "sdpa", "flash_decode")
            )
            assert f"| {batch_size}, {cache} | {cells} |" in README


def test_what_is_said_of_kernels_and_precisions_is_in_the_committed_tables() -> None:
    words = " ".join(README.split())
    rows = rows_of("nsys_profile", "kernel_categories")
    shares = {
        mode: [
            100 * float(row["matmul_share"]) for row in rows if (row["mode"], row["phase"]) == key
        ]
        for mode, key in (("forward", ("forward",) * 2), ("step", ("train_step", "step")))
    }
    forward, step = shares["forward"], shares["step"]
    assert f"{min(forward):.0f} to {max(forward):.0f}% of the forward pass's kernel time" in words
    assert f"and {min(step):.0f} to {max(step):.0f}% of a training step's" in words
    parts = rows_of("nsys_profile", "attention_parts")
    times, flops = ([float(row[key]) for row in parts] for key in ("time_ratio", "flops_ratio"))
    assert f"takes {min(times):.2f} to {max(times):.2f} times as long as the two matmuls" in words
    assert f"for 1/{1 / min(flops):.0f} to 1/{1 / max(flops):.0f} of their FLOPs" in words
    assert {row["model"] for row in parts} == {"small", "medium", "large", "xl", "2.7B"}
    assert {row["seq_len"] for row in parts} == {"128", "256", "512", "1024"}
    audit = [
        row for row in rows_of("precision_audit", "precision_error") if row["model"] == "small"
    ]
    errors = {row["precision"]: f"{100 * float(row['gradient_error']):.1f}%" for row in audit}
    assert f"off by {errors['bf16']} under bfloat16 autocast" in words
    assert f"by {errors['bf16_pure']} in bfloat16 throughout" in words
    assert f"autocast by {errors['fp16(grad_scaler=False)']} without gradient scaling" in words
    (lost,) = (row for row in audit if row["precision"] == "fp16(grad_scaler=False)")
    assert f"where {float(lost['underflowed']) / 1e6:.0f} million elements" in words
    assert f"and by {errors['fp16(grad_scaler=True)']} with it" in words


def test_the_committed_write_up_shows_the_committed_tables() -> None:
    """Longer tables are cut in Markdown; the others stand there row by row."""
    folder = ROOT / "results/h200"
    lines = set((folder / "writeup/writeup.md").read_text(encoding="utf-8").splitlines())
    compared = 0
    for plan in sorted(folder.glob("sweeps/*/plan.json")):
        for name in json.loads(plan.read_text(encoding="utf-8"))["tables"]:
            table = (plan.parent / "tables" / f"{name}.md").read_text(encoding="utf-8")
            rows = [line for line in table.splitlines() if line.startswith("|")][2:]
            if len(rows) <= ROWS_IN_MARKDOWN:
                missing = [row for row in rows if row not in lines]
                assert not missing, f"{plan.parent.name}: attnbench-writeup results/h200"
                compared += len(rows)
    assert compared > 500


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(target: str) -> None:
    assert target.startswith("http") or (ROOT / target).exists()


COMMANDS = [
    line.split("#")[0].split()[1:]
    for line in README.splitlines()
    if line.startswith(".venv/bin/attnbench ")
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_compose(arguments: list[str]) -> None:
    assert compose_request([*arguments, "device=cpu"]).cases
