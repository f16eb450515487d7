"""Slurm's commands that fail, hang or answer nonsense, and signals at the wrong moment.

The commands are those of :mod:`tests.support.fake_slurm`; ``test_slurm.py`` has a real cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from announced import the_run
from conftest import ROOT
from fake_slurm import FakeSlurm, install
from fault_folders import GUARD_S, heed_signals, wait_until

from harness.cases.case import Case
from harness.commands.cancel import main as cancel_main
from harness.commands.share_status import CaseStatus
from harness.commands.status import look
from harness.commands.status import main as status_main
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.run.launcher import PendingCases
from harness.run.run_folder import TaskState, runs_of
from harness.run.slurm import commands, follow
from harness.run.slurm.queue import active_cases
from harness.store.record import Record, RecordStore

SMALL = ("device=cpu", "model=tiny", "launcher=slurm", "seq_len=8,16")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(commands, "PAUSES_S", (0.01, 0.01))
    return install(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


def arguments(results: Path, *further: str) -> list[str]:
    return [*SMALL, f"results={results}", *further]


def submit(results: Path, *further: str) -> int:
    return run_request(compose_request(arguments(results, *further)))


def start(results: Path, *further: str) -> subprocess.Popen[str]:
    """Start the command as a terminal does, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments(results, *further)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_signals,
    )


def record_all(results: Path) -> None:
    """Write a record of every case of the only run."""
    folder, run = the_run(results)
    store = RecordStore(results)
    for index in range(len(run.case_ids)):
        for case in folder.read_share(index)[0]:
            store.write(Record(case_id=case.id, case=case.to_dict(), status="ok"))


def statuses(results: Path) -> list[CaseStatus]:
    return look(results).cases


class TestSubmission:
    """Item 8: no job that nobody knows."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_while_sbatch_runs_cancels_its_job(
        self, fake: FakeSlurm, results: Path, number: signal.Signals
    ) -> None:
        fake.then("sbatch", 'touch "$FAKE/taken"; until [ -e "$FAKE/go" ]; do sleep 0.02; done')
        process = start(results)
        try:
            wait_until((fake.path / "taken").exists, "sbatch runs")
            # A terminal signals the group; kill, the process alone.
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            fake.write("go", "")
            _, said = process.communicate(timeout=GUARD_S)
        finally:
            fake.write("go", "")
            process.kill()
        assert process.returncode == 130, said
        assert fake.read("cancelled").split() == ["701"]
        assert runs_of(results) == []

    @pytest.mark.parametrize(
        "answer",
        [
            "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
            "echo 'job received, thank you'; exit 0",
            "printf '\\377\\376'; exit 0",
            "exec sleep 100",
        ],
    )
    def test_a_lost_answer_is_asked_for_by_the_jobs_name(
        self, fake: FakeSlurm, results: Path, answer: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(commands, "SUBMIT_TIMEOUT_S", 0.5)
        fake.then("sbatch", answer)
        assert submit(results, "launcher.cases_per_task=1") == 0
        assert the_run(results)[1].jobs == ["701_0", "701_1"]

    @pytest.mark.parametrize(
        "answer",
        [
            "echo 'Note: your job 5 of today'; echo 'Submitted batch job 701'; echo bye",
            "echo 'Submitted batch job 701 on cluster big'",
            "echo '701;big'",
        ],
    )
    def test_the_id_is_found_among_other_words(
        self, fake: FakeSlurm, results: Path, answer: str
    ) -> None:
        fake.then("sbatch", f"{answer}; exit 0")
        assert submit(results) == 0
        assert the_run(results)[1].jobs == ["701"]

    def test_killed_between_sbatch_and_its_answer(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The next commands find the job by the run's id, and its tasks find their shares."""
        fake.then("sbatch", "kill -9 $PPID")
        process = start(results, "launcher.cases_per_task=1")
        process.communicate(timeout=GUARD_S)
        assert process.returncode == -signal.SIGKILL
        folder, run = the_run(results)
        assert run.jobs == [None, None]
        fake.write("queue", "701|0|RUNNING|n1|None\n701|1|PENDING||Resources\n")
        assert [case.detail for case in statuses(results)] == [
            "job 701_0",
            "job 701_1 waits: Resources",
        ]
        fake.then("sbatch", "")
        assert submit(results, "launcher.cases_per_task=1") == 0
        assert "2 cases queued or running already" in capsys.readouterr().out
        assert the_run(results)[1].jobs == ["701_0", "701_1"]
        assert cancel_main([str(results)]) == 0
        assert fake.read("cancelled").split() == ["701_0", "701_1"]
        names = sorted(path.name for path in folder.jobs.glob("*.pkl"))
        assert names == [f"attnbench-{run.id}-0_{index}.pkl" for index in (0, 1)]

    def test_nobody_knows_whether_it_was_queued(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The run stays, so that its job is found as soon as Slurm answers."""
        fake.then("sbatch", "echo 'sbatch: error: Socket timed out' >&2; exit 1")
        fake.then("squeue", "case \"$*\" in *%j*) echo 'error: busy' >&2; exit 1 ;; esac")
        assert submit(results) == 2
        _, run = the_run(results)
        said = capsys.readouterr().err.splitlines()
        assert said[-1].endswith(
            f"Socket timed out; if it was queued all the same, its name is attnbench-{run.id}-0, "
            "and attnbench-status, attnbench-cancel and the next command find it by that"
        )
        fake.then("squeue", "")
        fake.write("queue", "701|N/A|RUNNING|n1|None\n")
        assert active_cases(results) == set(run.case_ids[0])

    def test_a_refusal_leaves_no_run(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fake.then(
            "sbatch", 'rm "$FAKE/names"; touch "$FAKE/names"; echo "sbatch: error: No" >&2; exit 1'
        )
        assert submit(results) == 2
        assert "sbatch refused: No; set launcher.account" in capsys.readouterr().err
        assert runs_of(results) == []

    def test_half_a_submission_that_cannot_be_cancelled_is_named(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Two shapes; the second is refused, and scancel fails."""
        fake.then("scancel", "echo 'scancel: error: busy' >&2; exit 1")
        refused = 'sed -i /^702/d "$FAKE/names"; echo "sbatch: error: No" >&2; exit 1'
        fake.then("sbatch", f"[ $job = 701 ] || {{ {refused}; }}")
        shapes = ("parallel=ddp_torch", "parallel.dp=1,2", "batch_size=4")
        assert submit(results, *shapes) == 2
        assert the_run(results)[1].jobs == ["701", None]
        said = capsys.readouterr().err
        assert f"job 701 may go on (scancel: busy); attnbench-cancel {results} 701 cancels" in said

    def test_variables_of_sbatch_do_not_win_over_the_script(
        self, fake: FakeSlurm, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SBATCH_JOB_NAME", "other")
        monkeypatch.setenv("SBATCH_ARRAY_INX", "0-9")
        fake.then("sbatch", 'env > "$FAKE/environment"')
        assert submit(results) == 0
        assert not {"SBATCH_JOB_NAME", "SBATCH_ARRAY_INX"} & {
            line.partition("=")[0] for line in fake.read("environment").splitlines()
        }

    def test_clusters_are_named_for_all_commands(self) -> None:
        with pytest.raises(ValueError, match="SLURM_CLUSTERS=far instead"):
            compose_request([*SMALL, "launcher.sbatch={clusters: far}"])

    @pytest.mark.timeout(60)
    def test_a_cluster_without_arrays_takes_single_jobs(
        self, fake: FakeSlurm, results: Path
    ) -> None:
        fake.then("scontrol", "echo 'MaxArraySize = 0'; exit 0")
        assert submit(results) == 0
        assert the_run(results)[1].jobs == ["701"]


class TestQuestions:
    """Item 9: questions that Slurm does not answer."""

    def test_are_asked_again_and_said(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        once = 'if [ ! -e "$FAKE/N" ]; then touch "$FAKE/N"; echo "error: busy" >&2; exit 1; fi'
        for command in ("sinfo", "scontrol", "squeue"):
            fake.then(command, once.replace("N", f"{command}-failed"))
        assert submit(results, "launcher.partition=debug") == 0
        fake.write("queue", "701|N/A|RUNNING|n1|None\n")
        assert len(active_cases(results)) == 2
        said = capsys.readouterr().err.splitlines()
        assert said == [
            f"attnbench: {name}: busy; asking again" for name in ("sinfo", "scontrol", "squeue")
        ]

    @pytest.mark.parametrize(
        "answer", ["701|N/A", "701|x|RUNNING|n1|None", "slurm is resting", "a|b|c|d|e"]
    )
    def test_an_answer_that_does_not_parse_submits_nothing_twice(
        self,
        fake: FakeSlurm,
        results: Path,
        answer: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert submit(results) == 0
        fake.write("queue", f"{answer}\n")
        assert submit(results) == 2
        assert "squeue: cannot read its answer " in capsys.readouterr().err
        assert len(runs_of(results)) == 1

    def test_words_of_a_site_beside_the_answer(self, fake: FakeSlurm, results: Path) -> None:
        assert submit(results) == 0
        fake.write("queue", "Maintenance at noon\n701|N/A|RUNNING|n1|a|b\n")
        assert len(active_cases(results)) == 2

    def test_a_command_that_hangs_is_not_asked_again(
        self, fake: FakeSlurm, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert submit(results) == 0
        monkeypatch.setattr(commands, "TIMEOUT_S", 0.3)
        fake.then("squeue", "exec sleep 100")
        status = look(results)
        assert status.warnings == [
            "squeue did not answer in 0.3 s; is the Slurm controller up?; jobs are shown as their "
            "files say"
        ]
        assert len(fake.read("calls").splitlines()) == 1


class Seen:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def started(self, case: Case) -> None: ...

    def stage(self, name: str) -> None: ...

    def finished(self, record: Record, *, measured_now: bool) -> None:
        self.ended.append(record.case_id)


def pending_of(results: Path) -> tuple[PendingCases, Seen]:
    request = compose_request(arguments(results))
    seen = Seen()
    values: dict[str, Any] = {"cases": request.cases, "options": request.options}
    values |= {"store": RecordStore(results), "command": "", "predict": lambda case: 1.0}
    return PendingCases(progress=seen, **values), seen


class TestFollowing:
    """Items 9 and 10: ``wait=true``."""

    def test_goes_on_when_squeue_fails_for_a_while(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert submit(results) == 0
        capsys.readouterr()
        fake.write("queue", "701|N/A|RUNNING|n1|None\n")
        # It fails three times; the records appear later.
        records = results.with_name("later")
        (results / "records").rename(records)
        (results / "records").mkdir()
        RecordStore(results).create()
        record_all(results)
        for path in (results / "records").glob("*.json"):
            path.rename(records / path.name)
        fake.then(
            "squeue",
            'number=$(wc -l < "$FAKE/calls")\n'
            '[ $number -gt 3 ] || { echo "error: Socket timed out" >&2; exit 1; }\n'
            f"[ $number -lt 6 ] || mv {records}/*.json {results}/records\n",
        )
        pending, seen = pending_of(results)
        follow.follow(pending, 0.01)
        assert sorted(seen.ended) == sorted(case.id for case in pending.cases)
        assert capsys.readouterr().err.splitlines() == [
            "attnbench: squeue: Socket timed out; records are followed on, and squeue is "
            "asked again",
            "attnbench: squeue answers again",
        ]

    def test_ends_after_a_long_silence_and_names_the_jobs(
        self, fake: FakeSlurm, results: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert submit(results) == 0
        monkeypatch.setattr(follow, "UNANSWERED_S", 0.1)
        fake.then("squeue", "exit 1")
        pending, _ = pending_of(results)
        with pytest.raises(commands.SlurmError, match=r"has not answered for .*; job 701 \(1 task"):
            follow.follow(pending, 0.01)

    def test_a_job_that_is_held_is_said_once(
        self, fake: FakeSlurm, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert submit(results) == 0
        capsys.readouterr()
        fake.write("queue", "701|N/A|PENDING||JobHeldUser\n")
        fake.then("squeue", '[ $(wc -l < "$FAKE/calls") -lt 4 ] || : > "$FAKE/queue"')
        pending, _ = pending_of(results)
        follow.follow(pending, 0.01)
        assert capsys.readouterr().err == (
            "attnbench: job 701 held (JobHeldUser): scontrol release 701\n"
        )

    def test_ctrl_c_names_the_jobs_and_how_to_cancel_them(
        self, fake: FakeSlurm, results: Path
    ) -> None:
        fake.write("queue", "701|0|RUNNING|n1|None\n701|1|PENDING||None\n")
        fake.then("squeue", "kill -INT $PPID")
        process = start(results, "wait=true", "launcher.cases_per_task=1")
        _, said = process.communicate(timeout=GUARD_S)
        assert process.returncode == 130
        assert said.strip() == (
            "attnbench: follows no longer; job 701 (2 tasks, 2 cases) not stopped: "
            f"attnbench-status {results} shows what becomes of them, "
            f"attnbench-cancel {results} 701 stops them"
        )
        assert fake.read("cancelled") == ""


class TestStatus:
    """Items 11 and 12: states without Slurm's help."""

    def test_a_recorded_folder_asks_no_slurm(
        self,
        fake: FakeSlurm,
        results: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert submit(results) == 0
        record_all(results)
        capsys.readouterr()
        monkeypatch.setenv("PATH", str(results))
        assert status_main([str(results)]) == 0
        said = capsys.readouterr()
        assert said.out.startswith("2 cases: 2 ok\n")
        assert said.err == ""

    def test_without_slurm_files_say_what_they_know(
        self,
        fake: FakeSlurm,
        results: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert submit(results, "launcher.cases_per_task=1") == 0
        folder, run = the_run(results)
        folder.write_state(0, TaskState(job="701_0", node="n1", case_id=run.case_ids[0][0]))
        capsys.readouterr()
        monkeypatch.setenv("PATH", str(results))
        assert status_main([str(results)]) == 0
        said = capsys.readouterr()
        assert said.err == (
            "attnbench-status: no squeue on the path; run this on a login node of the cluster; "
            "jobs are shown as their files say\n"
        )
        assert [line.split("  ", 2)[::2] for line in said.out.splitlines()[1:]] == [
            ["unknown", "job 701_0 running on n1 when last seen"],
            ["unknown", "job 701_1 not started"],
        ]

    @pytest.mark.parametrize("by", ["attnbench-cancel", "scancel", "nobody"])
    def test_a_job_that_is_ending_is_not_preempted(
        self, fake: FakeSlurm, results: Path, by: str
    ) -> None:
        assert submit(results) == 0
        folder, run = the_run(results)
        folder.write_state(0, TaskState(event="stopped", node="n1", case_id=run.case_ids[0][0]))
        fake.write("queue", "701|N/A|RUNNING|n1|None\n")
        if by == "attnbench-cancel":
            assert cancel_main([str(results)]) == 0
        fake.write("queue", "701|N/A|COMPLETING|n1|None\n")
        if by == "scancel":
            fake.write("accounts", "701|CANCELLED by 0|n1\n")
        first, second = statuses(results)
        if by == "nobody":
            assert (first.status, first.detail) == ("running", "job 701 is ending")
            assert second.status == "pending"
        else:
            assert {first.status, second.status} == {"cancelled"}
        fake.write("queue", "701|N/A|PENDING||BeginTime\n")
        fake.write("accounts", "")
        assert statuses(results)[0].status == "preempted"

    def test_cancelled_while_it_waited_and_forgotten_by_slurm(
        self, fake: FakeSlurm, results: Path
    ) -> None:
        """Without accounts a purged job leaves no trace but ours."""
        assert submit(results) == 0
        fake.write("queue", "701|N/A|PENDING||Resources\n")
        assert cancel_main([str(results)]) == 0
        fake.write("queue", "")
        assert {case.status for case in statuses(results)} == {"cancelled"}


@pytest.mark.parametrize("can_block", [True, False])
def test_slurms_warning_before_the_handler_requeues(
    fake: FakeSlurm, results: Path, tmp_path: Path, can_block: bool
) -> None:
    """Item 12: SIGUSR2 arrives before Python runs, or while it imports."""
    python = tmp_path / "python"
    early = "kill -USR2 $$" if can_block else "export PYTHONPATH=$LATE:$PYTHONPATH"
    python.write_text(f'#!/bin/sh\n{early}\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    # An env that knows no such option, as before coreutils 8.31.
    old = tmp_path / "slurm" / "commands" / "env"
    old.write_text('#!/bin/sh\ncase "$1" in --*) exit 125 ;; esac\nexec /usr/bin/env "$@"\n')
    old.chmod(0o644 if can_block else 0o755)
    late = tmp_path / "late"
    late.mkdir()
    (late / "submitit.py").write_text(
        "import os, signal, sys\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "sys.path.remove(os.environ['LATE'])\n"
        "del sys.modules['submitit']\n"
        "import submitit\n"
    )
    assert submit(results, f"launcher.python={python}") == 0
    folder, _ = the_run(results)
    variables = {"SLURM_JOB_ID": "701", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "LATE": str(late)}
    done = subprocess.run(
        ["bash", str(fake.path / "script-0")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
        check=False,
    )
    assert fake.read("scontrol").splitlines()[-1:] == ["requeue 701"], done
    assert done.returncode == 255, "submitit's exit after requeueing, not a signal"
    # What starts next is in place, and nothing was measured.
    assert (folder.jobs / "701_submitted.pkl").is_file()
    assert RecordStore(results).names() == {}
