"""A rank that gives up inside split attention, while the others wait for its keys."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

STATUSES = {
    "split_fault_raise": "failed",
    "split_fault_oom": "oom",
    "split_fault_sigkill": "failed",
    "split_fault_hang": "timeout",
    "split_fault_raise_backward": "failed",
    "split_fault_wrong": "wrong",
    "naive": "ok",
}

SWEEP = """
title: Faults on split sequences
tables: [context_parallel]
figures: [rank_timeline]
scales:
  tiny:
    - task: attention
      attention: {scheme}
      attention.kernel: [{kernels}]
      attention.transport: {transport}
      parallel.cp: 2
      task.num_heads: 2
      task.head_dim: 8
      task.warmup_steps: 1
      task.measure_steps: 2
      batch_size: 1
      seq_len: 16
"""


@dataclass(kw_only=True, slots=True)
class Ended:
    """How a sweep ended, and its records by kernel."""

    done: subprocess.CompletedProcess[str]
    statuses: dict[str, str]
    records: dict[str, dict[str, Any]]
    table: str


def run(folder: Path, command: Command, scheme: str, transport: str) -> Ended:
    statuses = dict(STATUSES)
    if transport == "symmetric":
        # Raised and told as ValueError is; what it is called is decided without the transport.
        del statuses["split_fault_oom"]
    # The one that works comes last: every fault before it has been overcome.
    sweep = SWEEP.format(scheme=scheme, transport=transport, kernels=", ".join(statuses))
    (folder / "faults.yaml").write_text(sweep, encoding="utf-8")
    results = folder / "results"
    done = command(
        f"sweeps={folder / 'faults.yaml'}",
        f"results={results}",
        "device=cpu",
        "timeout_s=8",
        "launcher.vote_timeout_s=2",
        environment={"ATTNBENCH_PLUGINS": "tests.support.faults", "TMPDIR": str(folder)},
    )
    records = [json.loads(path.read_text()) for path in (results / "records").glob("*.json")]
    (table,) = results.glob("sweeps/*/tables/context_parallel.md")
    return Ended(
        done=done,
        statuses=statuses,
        records={record["case"]["attention"]["kernel"]: record for record in records},
        table=table.read_text(encoding="utf-8"),
    )


@pytest.fixture(scope="module", params=[("zigzag", "send_recv"), ("llama3", "symmetric")])
def ended(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, command: Command
) -> Ended:
    return run(tmp_path_factory.mktemp("split"), command, *request.param)


class TestFaults:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, ended: Ended) -> None:
        assert {name: item["status"] for name, item in ended.records.items()} == ended.statuses
        assert ended.done.returncode == 1

    @pytest.mark.parametrize(
        ("kernel", "message"),
        [
            ("split_fault_raise", "rank 1: ValueError: this backend always raises"),
            ("split_fault_raise_backward", "rank 1: ValueError: this backend always raises"),
            ("split_fault_oom", "rank 1: OutOfMemoryError: CUDA out of memory."),
            ("split_fault_sigkill", "rank 1 was killed by signal 9 (SIGKILL"),
            ("split_fault_hang", "exceeded timeout_s=8 (rank 0 in checking, rank 1 in checking)"),
            ("split_fault_wrong", "rank 0: WrongResult: relative error of"),
        ],
    )
    def test_what_happened_on_which_rank(self, ended: Ended, kernel: str, message: str) -> None:
        if kernel not in ended.statuses:
            return
        error = ended.records[kernel]["error"]
        assert error["message"].startswith(message)

    def test_all_ranks_end_in_time(self, ended: Ended) -> None:
        for name, record in ended.records.items():
            assert record["wall_s"] < 8 + 5, name

    def test_no_fault_is_shown_as_a_speed(self, ended: Ended) -> None:
        faults = [line for line in ended.table.splitlines() if "split_fault" in line]
        assert len(faults) == len(ended.statuses) - 1
        for line in faults:
            assert any(word in line for word in ("failed", "OOM", "timeout", "wrong result"))
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
