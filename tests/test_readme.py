"""The README shows what is committed, and every command and link in it exists."""

from __future__ import annotations

import csv
import json
import re
import statistics

import pytest

from harness.compose import compose_request
from harness.config import ROOT
from harness.readme import refreshed

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_committed_results() -> None:
    assert README.count("<!-- table: ") == 2
    assert refreshed(README) == README, "run python -m harness.readme"


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
