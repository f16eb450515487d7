"""A rank that gives up inside split attention, while the others wait for its keys."""

from __future__ import annotations

import json
import subprocess
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

ALIKE = ("split_fault_wrong", "split_fault_raise_backward", "split_fault_hang")
"""Faults of which nothing depends on the transport, so that one of them shows what becomes of
them: of a wrong result ranks vote, of a pass that raises too, and who hangs is ended by signals."""

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
    """How the faults over one transport ended, and their records by kernel."""

    limits: Limits
    statuses: dict[str, str]
    records: dict[str, dict[str, Any]]
    returncodes: list[int]
    table: list[str]
    """The lines of the faults."""


@dataclass(kw_only=True, slots=True)
class Sweep:
    """A results folder, and commands that measure there over both transports."""

    folder: Path
    command: Command

    def run(
        self, kernels: dict[str, list[str]], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        grids = [
            GRID
            | {"attention": SCHEMES[transport], "attention.transport": transport}
            | {"attention.kernel": names}
            for transport, names in kernels.items()
        ]
        sweep = {"title": "Faults on split sequences", "tables": ["context_parallel"]}
        sweep |= {"figures": ["rank_timeline"], "scales": {"tiny": grids}}
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

    def records(self, transport: str) -> dict[str, dict[str, Any]]:
        paths = (self.folder / "results" / "records").glob("*.json")
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        attention = [record["case"]["attention"] for record in records]
        return {
            choices["kernel"]: record
            for choices, record in zip(attention, records, strict=True)
            if choices["transport"] == transport
        }


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory, command: Command) -> dict[str, Ended]:
    """By transport; both in one command, as most of what it takes is to start and to report."""
    sweep = Sweep(folder=tmp_path_factory.mktemp("split"), command=command)
    statuses = {
        transport: {
            name: status
            for name, status in STATUSES.items()
            if transport == "send_recv" or name not in ALIKE
        }
        for transport in SCHEMES
    }
    at_once = {
        transport: [name for name in names if name not in ENDED_BY_LIMITS]
        for transport, names in statuses.items()
    }
    first = sweep.run(at_once)
    healthy = [sweep.records(transport)["split_fault_none"]["wall_s"] for transport in SCHEMES]
    limits = Limits(healthy_s=max(healthy))
    # With all of them, so that the table has all; those that are recorded are left as they are.
    everything = {transport: list(names) for transport, names in statuses.items()}
    second = sweep.run(everything, *limits.arguments())
    (table,) = sweep.folder.glob("results/sweeps/*/tables/context_parallel.md")
    lines = table.read_text(encoding="utf-8").splitlines()
    return {
        transport: Ended(
            limits=limits,
            statuses=statuses[transport],
            records=sweep.records(transport),
            returncodes=[first.returncode, second.returncode],
            table=[line for line in lines if "split_fault" in line and scheme in line],
        )
        for transport, scheme in SCHEMES.items()
    }


@pytest.fixture(scope="module", params=SCHEMES)
def ended(request: pytest.FixtureRequest, sweeps: dict[str, Ended]) -> Ended:
    return sweeps[request.param]


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
        faults = [line for line in ended.table if "split_fault_none" not in line]
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
                phases = {span[0] for span in rank["spans"] if span[1] == "compute"}
                assert phases == {"forward", "backward"}
                for _, _, _, start, end in rank["spans"]:
                    assert 0 <= start <= end
            # A rank whose queries see its own keys alone reads no others in its forward pass.
            sent = [rank["sent_bytes"] for rank in ranks]
            assert max(of_rank["forward"] for of_rank in sent) > 0
            assert min(of_rank["backward"] for of_rank in sent) > 0
        assert record["notes"]["kernel"] == "naive"
        assert record["check"]["errors"]["dk"] < 1e-5
