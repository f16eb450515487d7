"""Real arrays on a real Slurm: what is measured, whatever happens to jobs and nodes meanwhile.

The toy cluster of ``make slurm-up`` on this one machine; every test submits through the real
command, with transformers of a few thousand parameters and the backends of :mod:`tests.faults`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ROOT, Command
from fault_folders import STEP, Folder, wait_until

TOY = Path(os.environ.get("TOY_SLURM", "/tmp/attnbench-slurm"))

REQUIRED = bool(os.environ.get("ATTNBENCH_REQUIRE_SLURM"))

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

CANCEL = "import sys; from harness.commands.cancel import main; sys.exit(main())"

FAST = ("launcher=slurm", "launcher.gpus_per_node=2", "launcher.poll_s=0.5")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> dict[str, str]:
    """The environment in which Slurm's commands reach the toy cluster."""
    how = "make slurm-up starts a toy cluster (.ci/toy_slurm.sh install gets the packages)"
    if shutil.which("sbatch") is None:
        missing = "no Slurm here"
    elif not toy_is_up():
        missing = "the toy cluster is down"
    else:
        os.environ["SLURM_CONF"] = str(TOY / "slurm.conf")
        return {"SLURM_CONF": str(TOY / "slurm.conf")}
    if REQUIRED:
        pytest.fail(f"{missing}: {how}")
    pytest.skip(f"{missing}: {how}")


def toy_is_up() -> bool:
    """Whether its controller runs: the folder outlives a cluster whose daemons were killed."""
    script = ROOT / ".ci" / "toy_slurm.sh"
    said = subprocess.run([script, "status"], capture_output=True, text=True, check=True).stdout
    return "slurmctld: up" in said.splitlines()


class Submitted(Folder):
    """A results folder whose cases run on the cluster."""

    def submit(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        done = self.run(*FAST, *overrides)
        assert done.returncode in (0, 1), done.stderr
        return done

    def status(self) -> dict[str, dict[str, str]]:
        """The states that attnbench-status prints, by case id."""
        done = subprocess.run(
            [sys.executable, "-m", "harness.commands.status", "--json", str(self.results)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return {case["case_id"]: case for case in json.loads(done.stdout)["cases"]}

    def counts(self) -> Counter[str]:
        return Counter(case["status"] for case in self.status().values())

    def job(self) -> str:
        """The only job, or the first task of the only array."""
        (run,) = self.runs()
        return str(run["jobs"][0])

    def runs(self) -> list[dict[str, Any]]:
        paths = sorted(self.results.glob("runs/*/run.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def wait(self, **counts: int) -> None:
        """Until status counts are as given."""
        try:
            wait_until(lambda: self.counts() == Counter(counts), f"{counts}", timeout_s=400)
        except AssertionError:
            raise AssertionError(f"{self.status()} {self.logs()}") from None

    def logs(self) -> str:
        paths = sorted(self.results.glob("runs/*/jobs/*.err"))
        return "\n".join(path.read_text(errors="replace")[-800:] for path in paths)

    def hold(self) -> None:
        (self.path / "hold").touch()

    def release(self) -> None:
        (self.path / "hold").unlink()

    def held_pid(self) -> int:
        """The worker that is being held, once there is one."""
        wait_until(lambda: list(self.path.glob("held-*")), "a worker holds", timeout_s=60)
        (path,) = self.path.glob("held-*")
        pid = int(path.name.removeprefix("held-"))
        path.unlink()
        return pid

    def measured(self) -> Counter[str]:
        """How many records each case has."""
        return Counter(json.loads(content)["case_id"] for _, content in self.files().values())


@pytest.fixture
def folder(tmp_path: Path, command: Command) -> Submitted:
    return Submitted(path=tmp_path, command=command, grids=[STEP])


@pytest.fixture(scope="module", autouse=True)
def long(
    cluster: dict[str, str], tmp_path_factory: pytest.TempPathFactory, command: Command
) -> Submitted:
    """A job whose time limit passes while other tests run.

    Slurm may warn a minute earlier than asked, which must leave the case that does end enough
    time to start on a slow machine.
    """
    folder = Submitted(path=tmp_path_factory.mktemp("long"), command=command, grids=[STEP])
    cases = ("attention=fault_hang,sdpa", "launcher.cases_per_task=2", "timeout_s=180")
    folder.submit(*cases, "launcher.time_min=3", "launcher.stop_s=25")
    return folder


def runs_python(results: Path) -> bool:
    """Whether a rank of a job has got as far as its interpreter, past Slurm and the shell."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            program, *arguments = path.read_bytes().decode(errors="replace").split("\0")
            started = "harness.run.slurm.start" in arguments
            if started and "python" in Path(program).name and str(results) in " ".join(arguments):
                return True
    return False


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_an_array_measures_everything_whatever_cases_do(folder: Submitted) -> None:
    """Success, OOM, unsupported, a crash, a hang; two shapes; a follower; no second measuring."""
    names = "naive,fault_oom,fault_unsupported,fault_sigkill,fault_raise,fault_hang"
    single = (f"attention={names}", "launcher.cases_per_task=3", "timeout_s=6")
    split = ("parallel=ddp_torch", "parallel.dp=4", "attention=sdpa", "batch_size=4")
    first = folder.submit(*single)
    assert "6 cases in 2 tasks of 1 node x 1 CPU rank" in first.stdout
    folder.submit(*split)
    again = folder.submit(*single)
    assert "queued or running already" in again.stdout
    assert "submitted" not in again.stdout
    assert len(folder.runs()) == 2
    followed = folder.submit(*single, "wait=true")
    assert followed.returncode == 1
    assert followed.stdout.count("failed") >= 2
    assert "6 cases: " in followed.stdout
    folder.wait(ok=2, oom=1, unsupported=1, failed=2, timeout=1)
    records = folder.records()
    assert {name: record["status"] for name, record in records.items()} == {
        "naive": "ok",
        "fault_oom": "oom",
        "fault_unsupported": "unsupported",
        "fault_sigkill": "failed",
        "fault_raise": "failed",
        "fault_hang": "timeout",
        "sdpa": "ok",
    }
    assert len(records["sdpa"]["memory"]) == 4, "two ranks on each of two nodes"
    details = {case["case_id"]: case["detail"] for case in folder.status().values()}
    raised = next(detail for case_id, detail in details.items() if "fault_raise" in case_id)
    assert raised == "ValueError: this backend always raises"
    assert set(folder.measured().values()) == {1}
    third = folder.submit(*single)
    assert "submitted" not in third.stdout
    assert len(folder.runs()) == 2


def test_scancel_and_going_on(folder: Submitted) -> None:
    """A frozen configuration, a cancelled job, and a second command that takes what is missing."""
    folder.hold()
    cases = ("attention=naive,held,sdpa", "launcher.cases_per_task=3")
    folder.submit(*cases)
    (folder.path / "faults.yaml").write_text("not: a sweep any more", encoding="utf-8")
    pid = folder.held_pid()
    running = [case for case in folder.status().values() if case["status"] == "running"]
    assert [("held" in case["case_id"], "on toy" in case["detail"]) for case in running] == [
        (True, True)
    ]
    assert folder.counts() == Counter(ok=1, running=1, pending=1)
    done = subprocess.run(
        [sys.executable, "-c", CANCEL, str(folder.results)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"cancelled job {folder.job()}" in done.stdout
    folder.wait(ok=1, cancelled=2)
    wait_until(lambda: not psutil.pid_exists(pid), "the worker has gone")
    folder.release()
    # Writes the sweep again.
    Submitted(path=folder.path, command=folder.command, grids=folder.grids)
    more = folder.submit(*cases, "wait=true")
    assert "submitted" in more.stdout
    assert "2 cases in 1 task" in more.stdout
    assert folder.counts() == Counter(ok=3)
    assert set(folder.measured().values()) == {1}


def test_preempted_twice(folder: Submitted) -> None:
    """Requeued by Slurm, and by its warning."""
    folder.hold()
    cases = ("attention=naive,held,sdpa", "launcher.cases_per_task=3")
    folder.submit(*cases)
    job = folder.job()
    folder.held_pid()
    slurm("scontrol", "requeue", job)
    folder.wait(ok=1, preempted=1, pending=1)
    folder.held_pid()
    slurm("scancel", "--signal=USR2", job)
    folder.wait(ok=1, preempted=1, pending=1)
    folder.held_pid()
    folder.release()
    folder.wait(ok=3)
    assert set(folder.measured().values()) == {1}


def test_warned_before_the_task_has_begun(folder: Submitted) -> None:
    """The signal comes while Python starts on the node, a process of this machine."""
    folder.submit("attention=naive")
    job = folder.job()
    wait_until(lambda: runs_python(folder.results), "the ranks start", timeout_s=60)
    slurm("scancel", "--signal=USR2", job)
    folder.wait(ok=1)
    assert "Restarts=1" in slurm("scontrol", "show", "job", job)


def test_a_job_that_its_command_never_knew(folder: Submitted) -> None:
    """As after SIGKILL before sbatch has answered: found by its name, not submitted twice."""
    folder.hold()
    folder.submit("attention=held,sdpa", "launcher.cases_per_task=1")
    (run,) = folder.runs()
    (path,) = folder.results.glob("runs/*/run.json")
    path.write_text(json.dumps(run | {"jobs": [None, None]}), encoding="utf-8")
    assert "submitted" not in folder.submit("attention=held,sdpa").stdout
    (found,) = folder.runs()
    assert found["jobs"] == run["jobs"]
    folder.release()
    folder.wait(ok=2)


def test_a_case_longer_than_its_job_ends_as_timeout(long: Submitted) -> None:
    """It is given up when it has had a job to itself; the cases after it are measured."""
    long.wait(ok=1, timeout=1)
    record = long.records()["fault_hang"]
    assert record["error"]["message"] == "not done within launcher.time_min=3 of a whole job"
    assert set(long.measured().values()) == {1}


def test_a_node_that_vanishes_loses_only_the_running_case(folder: Submitted) -> None:
    folder.hold()
    cases = ("attention=naive,held,sdpa", "launcher.cases_per_task=3")
    folder.submit(*cases)
    pid = folder.held_pid()
    before = folder.files()
    assert len(before) == 1
    job = folder.job()
    node = slurm("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
    daemon = int((TOY / "run" / f"slurmd-{node}.pid").read_text(encoding="utf-8"))
    steps = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or []).startswith(f"slurmstepd: [{job.split('_')[0]}.")
    ]
    assert steps
    # As if its power were cut: the daemon, the job's steps and all their processes at once.
    doomed = {daemon, pid}
    for step in steps:
        doomed |= {step, *(child.pid for child in psutil.Process(step).children(recursive=True))}
    for victim in doomed:
        # Some end with another that was killed before them.
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    try:
        folder.held_pid()
        now = slurm("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()
        assert now != node
        folder.release()
        folder.wait(ok=3)
    finally:
        environment = {**os.environ, "SLURM_CONF": str(TOY / "slurm.conf")}
        slurmd = shutil.which("slurmd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert slurmd is not None
        subprocess.run([slurmd, "-N", node], env=environment, check=True)
    assert set(folder.measured().values()) == {1}
    assert before.items() <= folder.files().items(), "what was measured is not touched"
    wait_until(
        lambda: "idle" in slurm("sinfo", "--noheader", f"--nodes={node}", "--format=%T"),
        "the node is back",
        timeout_s=60,
    )


def test_what_slurm_refuses_is_one_line_and_leaves_nothing(folder: Submitted) -> None:
    for override, words in {
        "launcher.partition=nosuch": "launcher.partition=nosuch: this cluster has no such "
        "partition; one of debug",
        "launcher.constraint=nosuch": "sbatch refused: ",
        "launcher.cases_per_task=1": "launcher.cases_per_task=1: 1002 cases make 1002 tasks, and "
        "a job array takes 1001 here; use launcher.cases_per_task=2 or more",
    }.items():
        many = "seed=" + ",".join(map(str, range(1002))) if "cases" in override else "seed=1"
        done = folder.run(*FAST, override, "attention=naive", many)
        assert done.returncode == 2, done
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert folder.runs() == []


def test_nothing_stays_in_the_queue(folder: Submitted) -> None:
    wait_until(lambda: slurm("squeue", "--noheader").strip() == "", "the queue is empty")
