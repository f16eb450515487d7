"""``attnbench-cancel`` where Slurm is not there, does not answer, or refuses.

The commands of Slurm are those of :mod:`tests.support.fake_slurm`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from announced import announced
from fake_slurm import FakeSlurm
from fake_slurm import install as install_slurm

from harness.commands import cancel
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.run.slurm import commands


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(commands, "PAUSES_S", (0.01, 0.01))
    return install_slurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def results(tmp_path: Path, fake: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with one job in the queue."""
    folder = tmp_path / "results"
    words = ["device=cpu", "model=tiny", "launcher=slurm", "seq_len=8", f"results={folder}"]
    assert run_request(compose_request(words)) == 0
    names = [line.rpartition("|")[0] for line in fake.read("names").splitlines()]
    fake.write("queue", "".join(f"{name}|PENDING||None\n" for name in names))
    capsys.readouterr()
    return folder


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were asked to stop; this one announces a run and must live on."""
    found: list[int] = []

    def note(pid: int, *others: Any) -> None:
        found.append(pid)

    monkeypatch.setattr(cancel, "stop", note)
    return found


def gone(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def silent(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.then("squeue", "echo 'squeue: error: down for maintenance' >&2; exit 1\n")


def refusing(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.then("scancel", "echo 'scancel: error: Access denied' >&2; exit 1\n")


@pytest.mark.parametrize(
    ("fault", "words"),
    [(gone, "no squeue on the path"), (silent, "maintenance"), (refusing, "Access denied")],
)
def test_local_runs_are_stopped_all_the_same(
    fault: Any,
    words: str,
    results: Path,
    fake: FakeSlurm,
    stopped: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with announced(results, ["case-1"]):
        fault(fake, monkeypatch)
        code = cancel.main([str(results)])
    out, err = capsys.readouterr()
    assert stopped == [os.getpid()]
    assert out == f"stopped process {os.getpid()}\n"
    assert code == 1
    line = err.splitlines()[-1]
    assert words in line
    assert line.endswith("; job 701 may still be queued or running")


def test_a_job_that_is_named_stops_no_local_run(
    results: Path, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with announced(results, ["case-1"]):
        assert cancel.main([str(results), "701"]) == 0
    assert stopped == []
    assert capsys.readouterr().out == "cancelled job 701 (1 task)\n"


def test_both(
    results: Path, fake: FakeSlurm, stopped: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with announced(results, ["case-1"]):
        assert cancel.main([str(results)]) == 0
    assert stopped == [os.getpid()]
    assert fake.read("cancelled")
    assert capsys.readouterr().err == ""


def test_without_jobs_slurm_is_not_missed(
    tmp_path: Path,
    stopped: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with announced(tmp_path, ["case-1"]):
        monkeypatch.setenv("PATH", "")
        assert cancel.main([str(tmp_path)]) == 0
    assert stopped == [os.getpid()]
    assert capsys.readouterr().err == ""
