"""docs/cs336.md: every problem and part of the text, with what answers it or what is missing."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT

from harness.cases.format import ABSENT
from harness.cases.sweep import load_sweep
from harness.commands.readme import refreshed
from harness.commands.readme_blocks import without_blocks
from harness.paths import project_sweeps
from harness.request.grid import expand

PAGE = (ROOT / "docs/cs336.md").read_text(encoding="utf-8")

PROBLEMS = {
    "benchmarking_script": ("4", "abc"),
    "nsys_profile": ("5", "abcde"),
    "mixed_precision_accumulation": ("1", ""),
    "benchmarking_mixed_precision": ("2", "abc"),
    "memory_profiling": ("4", "abcde"),
    "pytorch_attention": ("2", ""),
    "torch_compile": ("2", "ab"),
    "flash_forward": ("15", ""),
    "flash_backward": ("5", ""),
    "flash_benchmarking": ("5", ""),
    "distributed_communication_single_node": ("5", ""),
    "naive_ddp": ("5", ""),
    "naive_ddp_benchmarking": ("3", ""),
    "minimal_ddp_flat_benchmarking": ("2", ""),
    "ddp_overlap_individual_parameters": ("5", ""),
    "ddp_overlap_individual_parameters_benchmarking": ("1", "ab"),
    "ddp_overlap_bucketed": (ABSENT, ""),
    "ddp_bucketed_benchmarking": (ABSENT, "ab"),
    "communication_accounting": ("10", "d"),
    "optimizer_state_sharding": ("15", ""),
    "optimizer_state_sharding_accounting": ("5", "abc"),
}
"""The text's problems, in its order: points, as far as it prints them, and marked parts.

Parts (a) to (c) of communication_accounting are rows of one table.
"""


def rows() -> dict[str, list[str]]:
    """Cells of the index by problem."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.partition("\n## ")[0].splitlines()
        if line.startswith("| [")
    ]
    return {re.sub(r"\[`?(\w+)`?\].*", r"\1", row[0]): row for row in cells}


def section_of(problem: str) -> str:
    """The text of the section that the index leads to."""
    anchor = re.search(r"\(#([^)]+)\)", rows()[problem][0])
    assert anchor
    for part in PAGE.split("\n## ")[1:]:
        title = part.partition("\n")[0]
        if re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") == anchor[1]:
            return part
    raise AssertionError(f"no section {anchor[1]}")


def test_every_problem_stands_there_in_order_with_its_points() -> None:
    found = {name: row[1] for name, row in rows().items() if name != "leaderboard"}
    assert list(found.items()) == [(name, points) for name, (points, _) in PROBLEMS.items()]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_part_has_an_answer(problem: str) -> None:
    text = section_of(problem)
    parts = set(re.findall(r"\(([a-e])\)", text))
    assert set(PROBLEMS[problem][1]) <= parts
    _, _, sweeps, _, answered = rows()[problem]
    assert answered.startswith("yes") or "needs" in answered
    if named := sweeps_of(sweeps):
        # Each names a report, and a command that makes one on a laptop.
        assert set(named) <= set(re.findall(r"attnbench sweeps=(\w+)", text))
        assert re.search(r"^<!-- (?:table|finding): results/", text, re.MULTILINE)
        assert set(re.findall(r"\(\.\./(results/\S+/report\.md)\)", text))
    else:
        assert re.search(r"\(\.\./tests/\S+\.py\)", text)


def sweeps_of(cell: str) -> list[str]:
    return [name for name in re.findall(r"`(\w+)`", cell) if name in project_sweeps()]


@pytest.mark.parametrize("problem", rows())
def test_gpus_are_those_that_full_size_takes(problem: str) -> None:
    _, _, cell, gpus, _ = rows()[problem]
    named = sweeps_of(cell)
    if not named:
        assert all((ROOT / path).exists() for path in re.findall(r"`([^`]+)`", cell))
        return
    most = 0
    for name in named:
        cases = expand(load_sweep(name).scales["full"], {}, "cuda").values()
        most = max(most, *(case.world_size * case.task.measures for case in cases))
    assert str(most) == gpus.split("; ")[-1]


def test_what_is_missing_has_a_command() -> None:
    """Each sweep of the index that needs a GPU still is among the commands below it."""
    top = PAGE.partition("\n## ")[0]
    missing = [row for row in rows().values() if "needs" in row[4]]
    assert missing
    for row in missing:
        names = sweeps_of(row[2])
        assert any(f"attnbench sweeps={name} " in top for name in names), row[0]


def test_commands_and_answers_are_not_written_by_hand() -> None:
    """Whatever the page says in numbers of results stands in a block."""
    assert len(re.findall(r"^<!-- (?:table|finding): ", PAGE, re.MULTILINE)) > 30
    assert not re.search(r"\d\.\d", without_blocks(PAGE).replace("2.7B", ""))


def test_rows_of_another_sweep_come_beside() -> None:
    """Two processes on gloo and two GPUs on NCCL, in one table."""
    sweep = "sweeps/distributed_communication"
    text = refreshed(
        f"<!-- table: results/h200/{sweep}/tables/distributed_communication.md\n"
        f"beside: results/cpu-2core/{sweep}\n"
        "where: collective == 'all_reduce' and world_size == 2 and size_mib == 100\n"
        "columns: device; latency (ms)\n-->\n<!-- end -->"
    )
    assert re.findall(r"^\| (cpu|cuda) ", text, re.MULTILINE) == ["cpu", "cuda"]
