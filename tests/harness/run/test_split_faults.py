"""A rank that gives up inside split attention, while the others wait for its keys."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Command
from fault_folders import Limits

STATUSES = {
    "split_fault_none": "ok",
    "split_fault_raise": "failed",
    "split_fault_wrong": "wrong",
    "split_fault_raise_backward": "failed",
    "split_fault_sigkill": "failed",
    "split_fault_hang": "timeout",
    "naive": "ok",
}

ENDED_BY_LIMITS = ("split_fault_raise", "split_fault_raise_backward", "split_fault_hang", "naive")
"""Rank 0 waits for keys until a vote, or the case, runs out of time; the last one works again."""

SCHEMES = {"send_recv": "zigzag", "symmetric": "llama3"}
"""By transport, the scheme that is measured over it."""

VOTE_TIMEOUT_S = 60.0
"""The default, which no healthy vote comes near."""

GRID = {
    "task": "attention",
    "parallel.cp": 2,
    "task.num_heads": 2,
    "task.head_dim": 8,
    "task.warmup_steps": 1,
    "task.measure_steps": 2,
    "batch_size": 1,
    "seq_len": 16,
}


@dataclass(kw_only=True, slots=True)
class Ended:
    """How sweeps ended, and their records by kernel."""

    limits: Limits
    statuses: dict[str, str]
    records: dict[str, dict[str, Any]]
    returncodes: list[int]
    table: str


@dataclass(kw_only=True, slots=True)
class Sweep:
    """A results folder, and commands that measure there with one scheme over one transport."""

    folder: Path
    command: Command
    scheme: str
    transport: str

    def run(self, kernels: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
        choices = {"attention": self.scheme, "attention.transport": self.transport}
        grid = GRID | choices | {"attention.kernel": list(kernels)}
        sweep = {"title": "Faults on split sequences", "tables": ["context_parallel"]}
        sweep |= {"figures": ["rank_timeline"], "scales": {"tiny": [grid]}}
        path = self.folder / "faults.yaml"
        path.write_text(yaml.safe_dump(sweep), encoding="utf-8")
        return self.command(
            f"sweeps={path}",
            f"results={self.folder / 'results'}",
            "device=cpu",
            *arguments,
            environment={
                "ATTNBENCH_PLUGINS": "tests.support.faults",
                "TMPDIR": str(self.folder),
            },
        )

    def records(self) -> dict[str, dict[str, Any]]:
        paths = (self.folder / "results" / "records").glob("*.json")
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        return {record["case"]["attention"]["kernel"]: record for record in records}


@pytest.fixture(scope="module")
def sweeps(
    tmp_path_factory: pytest.TempPathFactory, command: Command
) -> Iterator[dict[str, Future[Ended]]]:
    """By transport, side by side: what takes time in them is that ranks wait for each other."""
    with ThreadPoolExecutor() as pool:
        yield {
            transport: pool.submit(
                _ended,
                Sweep(
                    folder=tmp_path_factory.mktemp(transport),
                    command=command,
                    scheme=scheme,
                    transport=transport,
                ),
            )
            for transport, scheme in SCHEMES.items()
        }


@pytest.fixture(scope="module", params=SCHEMES)
def ended(request: pytest.FixtureRequest, sweeps: dict[str, Future[Ended]]) -> Ended:
    return sweeps[request.param].result()


def _ended(sweep: Sweep) -> Ended:
    statuses = dict(STATUSES)
    if sweep.transport == "symmetric":
        # Over either transport a rank that gives up in the backward pass does so alike.
        del statuses["split_fault_raise_backward"]
    at_once = [name for name in statuses if name not in ENDED_BY_LIMITS]
    first = sweep.run(at_once)
    limits = Limits(healthy_s=sweep.records()["split_fault_none"]["wall_s"])
    # With all of them, so that the table has all; those that are recorded are left as they are.
    second = sweep.run(list(statuses), *limits.arguments())
    (table,) = sweep.folder.glob("results/sweeps/*/tables/context_parallel.md")
    return Ended(
        limits=limits,
        statuses=statuses,
        records=sweep.records(),
        returncodes=[first.returncode, second.returncode],
        table=table.read_text(encoding="utf-8"),
    )


class TestFaults:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, ended: Ended) -> None:
        assert {name: item["status"] for name, item in ended.records.items()} == ended.statuses
        assert ended.returncodes == [1, 1]

    def test_what_happened_on_which_rank(self, ended: Ended) -> None:
        messages = {
            "split_fault_raise": "rank 1: ValueError: this backend always raises",
            "split_fault_raise_backward": "rank 1: ValueError: this backend always raises",
            "split_fault_sigkill": "rank 1 was killed by signal 9 (SIGKILL",
            "split_fault_hang": f"exceeded timeout_s={ended.limits.case_s:g} "
            "(rank 0 in checking, rank 1 in checking)",
            "split_fault_wrong": "rank 0: WrongResult: relative error of",
        }
        for name, message in messages.items():
            if name in ended.statuses:
                assert ended.records[name]["error"]["message"].startswith(message)

    def test_all_ranks_end_in_time(self, ended: Ended) -> None:
        for name, record in ended.records.items():
            limit_s = ended.limits.case_s if name in ENDED_BY_LIMITS else VOTE_TIMEOUT_S
            assert record["wall_s"] < 2 * limit_s, name

    def test_no_fault_is_shown_as_a_speed(self, ended: Ended) -> None:
        faults = [line for line in ended.table.splitlines() if "split_fault" in line]
        faults = [line for line in faults if "split_fault_none" not in line]
        assert len(faults) == len(ended.statuses) - 2
        for line in faults:
            assert any(word in line for word in ("failed", "timeout", "wrong result"))
            assert "\u00d7" not in line

    def test_the_timeline_of_the_one_that_works(self, ended: Ended) -> None:
        record = ended.records["naive"]
        passes = record["notes"]["timeline"]
        assert len(passes) == 3
        for ranks in passes:
            assert len(ranks) == 2
            for rank in ranks:
                assert set(rank["sent_bytes"]) == {"forward", "backward"}
                assert all(count > 0 for count in rank["sent_bytes"].values())
                phases = {span[0] for span in rank["spans"] if span[1] == "compute"}
                assert phases == {"forward", "backward"}
                for _, _, _, start, end in rank["spans"]:
                    assert 0 <= start <= end
        assert record["notes"]["kernel"] == "naive"
        assert record["check"]["errors"]["dk"] < 1e-5
