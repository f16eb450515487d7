"""Launching on Slurm without a Slurm: packing, freezing, status, and what is said when not.

Slurm's commands are small scripts that answer from files; what a cluster really does with the
arrays is the business of ``test_slurm.py``.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fault_folders import GUARD_S

from harness.cases.case import Case
from harness.commands.cancel import main as cancel_main
from harness.commands.status import look
from harness.commands.status import main as status_main
from harness.paths import CONF
from harness.request.choices import choices
from harness.request.compose import Request, compose_request
from harness.request.session import run_request
from harness.run import run_folder
from harness.run.children.rank import RankStart
from harness.run.launcher import LaunchError, PendingCases
from harness.run.nodes.agent import serve_agent
from harness.run.nodes.handshake import Keys
from harness.run.nodes.hosts import Hosts, clocks_differ
from harness.run.nodes.link import Link
from harness.run.nodes.messages import Start
from harness.run.nodes.secret import derived_key, new_secret
from harness.run.rounds.options import RunOptions
from harness.run.run_folder import RunFolder, TaskState, runs_of
from harness.run.runner import Runner
from harness.run.slurm import commands as slurm
from harness.run.slurm.launcher import Slurm
from harness.run.slurm.queue import active_cases
from harness.run.slurm.shares import Shape, pack, shape_of
from harness.store.record import SCHEMA, Record, RecordStore

SMALL = ("device=cpu", "model=tiny", "batch_size=12", "launcher=slurm")

SCRIPTS = {
    "sbatch": 'cp "$1" "$FAKE/script-$(ls "$FAKE" | grep -c script-)"; cat "$FAKE/sbatch" >&2; '
    '[ -s "$FAKE/sbatch" ] && exit 1; echo "Submitted batch job $((700 + $(ls "$FAKE" '
    '| grep -c script-)))"',
    "srun": "exit 0",
    "sinfo": "echo debug; echo long",
    "scontrol": 'echo "MaxArraySize            = 5"',
    "squeue": 'cat "$FAKE/squeue"',
    "sacct": 'cat "$FAKE/sacct"',
    "scancel": 'echo "$@" >> "$FAKE/scancel"',
}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder through which the fake commands talk."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, body in SCRIPTS.items():
        script = folder / name
        script.write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        script.chmod(0o755)
    data = tmp_path / "data"
    data.mkdir()
    for name in ("sbatch", "squeue", "sacct"):
        (data / name).touch()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(data))
    return data


def request_of(results: Path, *arguments: str) -> Request:
    return compose_request([*SMALL, f"results={results}", *arguments])


def cases_of(*arguments: str) -> list[Case]:
    return compose_request([*SMALL, *arguments]).cases


def packed(cases: list[Case], **changes: Any) -> list[list[int]]:
    """Sequence lengths by share, of cases that take as many seconds as they are long."""
    values: dict[str, Any] = {
        "ranks_per_node": 8,
        "predict": lambda case: float(case.seq_len),
        "cases_per_task": None,
        "task_s": 100.0,
        "max_tasks": 1000,
        "together": False,
    }
    by_shape = pack(cases, **(values | changes))
    return [
        [case.seq_len for case in share.cases] for shares in by_shape.values() for share in shares
    ]


class TestPacking:
    def test_by_time(self) -> None:
        cases = cases_of("seq_len=30,60,20,300,10,90")
        assert packed(cases) == [[30, 60], [20], [300], [10, 90]]

    def test_by_number(self) -> None:
        assert packed(cases_of("seq_len=1,2,3,4,5"), cases_per_task=2) == [[1, 2], [3, 4], [5]]

    def test_shares_grow_until_an_array_takes_them(self) -> None:
        cases = cases_of("seq_len=range(1,41)")
        shares = packed(cases, task_s=30.0, max_tasks=7)
        assert len(shares) <= 7
        assert sorted(length for share in shares for length in share) == list(range(1, 41))

    def test_a_number_that_makes_too_many_tasks(self) -> None:
        with pytest.raises(
            LaunchError, match=r"^launcher\.cases_per_task=2: 11 cases make 6 "
        ) as e:
            packed(cases_of("seq_len=range(1,12)"), cases_per_task=2, max_tasks=5)
        assert "use launcher.cases_per_task=3 or more" in str(e.value)

    def test_cases_measured_in_turns_stay_together(self) -> None:
        cases = cases_of("attention=naive,sdpa", "seq_len=10,20")
        assert packed(cases, cases_per_task=3, together=True) == [[10, 10], [20, 20]]
        assert packed(cases, cases_per_task=3) == [[10, 20, 10], [20]]

    def test_one_array_for_each_shape(self) -> None:
        cases = cases_of("parallel=ddp_torch", "parallel.dp=1,2,4", "seq_len=10,20")
        shapes = pack(
            cases,
            ranks_per_node=2,
            predict=lambda case: 1.0,
            cases_per_task=None,
            task_s=100.0,
            max_tasks=10,
            together=False,
        )
        assert [(shape.nodes, shape.ranks_per_node) for shape in shapes] == [(1, 1), (1, 2), (2, 2)]
        for shape, (share,) in shapes.items():
            assert {case.world_size for case in share.cases} == {shape.world_size}

    def test_ranks_that_do_not_divide_over_nodes(self) -> None:
        (case,) = cases_of("parallel=ddp_torch", "parallel.dp=3")
        assert shape_of(case, 4) == Shape(device="cpu", nodes=1, ranks_per_node=3)
        with pytest.raises(ValueError, match=r"launcher\.gpus_per_node=2"):
            compose_request(
                [*SMALL, "parallel=ddp_torch", "parallel.dp=3", "launcher.gpus_per_node=2"]
            )


class TestSubmitting:
    def test_the_script_asks_for_what_was_given(self, fake: Path, tmp_path: Path) -> None:
        options = ("launcher.partition=debug", "launcher.account=us", "launcher.qos=night")
        options += ("launcher.constraint=h200", "launcher.time_min=17", "launcher.memory_gb=2")
        options += ("launcher.exclusive=true", "launcher.setup=[module load cuda]")
        options += ("launcher.array_parallelism=3", "launcher.sbatch={nice: 5, contiguous: ''}")
        options += ("launcher.srun=['--container-image=x']", "launcher.python=python9")
        options += ("launcher.cases_per_task=1", "launcher.gpus_per_node=2", "launcher.stop_s=33")
        values = ("device=cuda", "parallel=ddp_torch", "parallel.dp=4", "seq_len=8,16")
        request = compose_request(
            ["model=tiny", "launcher=slurm", f"results={tmp_path / 'r'}", *options, *values]
        )
        assert run_request(request) == 0
        script = (fake / "script-0").read_text(encoding="utf-8")
        for flag in (
            "partition=debug",
            "account=us",
            "qos=night",
            "constraint=h200",
            "time=17",
            "mem=2048M",
            "exclusive",
            "array=0-1%2",
            "nice=5",
            "contiguous",
            "nodes=2",
            "ntasks-per-node=2",
            "gpus-per-node=2",
            "signal=USR2@33",
            "requeue",
        ):
            assert f"#SBATCH --{flag}\n" in script
        assert "\nmodule load cuda\n" in script
        assert "--container-image=x sh -c " in script
        assert " python9 -u -m harness.run.slurm.start " in script
        assert "torchrun" not in script

    def test_arrays_are_packed_frozen_and_not_submitted_twice(
        self, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        results = tmp_path / "results"
        arguments = ("launcher.cases_per_task=2", "seq_len=8,16,24,32,40", "timeout_s=77")
        assert run_request(request_of(results, *arguments)) == 0
        assert "submitted job 701: 5 cases in 3 tasks of 1 node" in capsys.readouterr().out
        ((folder, run),) = runs_of(results)
        assert run.jobs == ["701_0", "701_1", "701_2"]
        cases, options, before = folder.read_share(1)
        assert [case.seq_len for case in cases] == [24, 32]
        assert [case.id for case in cases] == run.case_ids[1]
        assert (options.timeout_s, options.results, before) == (77.0, results.resolve(), set())
        lines = ["701|0|RUNNING|n1|None", "701|1|PENDING||Resources", "701|2|COMPLETED|n1|None"]
        (fake / "squeue").write_text("\n".join(lines), encoding="utf-8")
        assert active_cases(results) == {*run.case_ids[0], *run.case_ids[1]}
        assert run_request(request_of(results, *arguments)) == 0
        said = capsys.readouterr().out
        assert "4 cases queued or running already" in said
        assert "1 case in 1 task" in said
        _, second = runs_of(results)[-1]
        assert second.case_ids == [run.case_ids[2]]

    def test_a_refusal_is_one_line_and_leaves_no_run(
        self, fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (fake / "sbatch").write_text("sbatch: error: Invalid account\n", encoding="utf-8")
        assert run_request(request_of(tmp_path / "r", "seq_len=8")) == 2
        assert capsys.readouterr().err == (
            "attnbench: launcher=slurm: sbatch refused: Invalid account; set launcher.account, "
            "qos, constraint, time_min or sbatch as this cluster wants them\n"
        )
        assert runs_of(tmp_path / "r") == []

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (("launcher.partition=gpu",), "launcher.partition=gpu: this cluster has no such "),
            (("launcher.cases_per_task=1", "seq_len=range(1,8)"), "launcher.cases_per_task=1: 7 "),
            (("timeout_s=9999",), "timeout_s=9999: a case may take longer than "),
        ],
    )
    def test_what_cannot_be_submitted(
        self,
        fake: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        arguments: tuple[str, ...],
        line: str,
    ) -> None:
        assert run_request(request_of(tmp_path / "r", *arguments)) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"attnbench: {line}")
        assert said.count("\n") == 1
        assert not list(fake.glob("script-*"))

    def test_without_slurm(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert run_request(request_of(tmp_path / "r")) == 2
        assert capsys.readouterr().err == (
            "attnbench: launcher=slurm: no sbatch on the path; run this on a login node of the "
            "cluster, or use launcher=local\n"
        )

    @pytest.mark.parametrize(
        ("override", "key"),
        [
            ("launcher.time_min=0", "launcher.time_min=0: "),
            ("launcher.time_min=1", "launcher.time_min=1: must be at least 2"),
            ("launcher.time_min=2", "launcher.stop_s=90: must be less than 45 with launcher.time"),
            ("launcher.stop_s=3525", "launcher.stop_s=3525: must be less than 3525 with launcher."),
            ("launcher.sbatch={array: 0-3}", "launcher.sbatch.array: "),
            ("launcher.partitoin=x", "launcher.partitoin: no such key; did you mean "),
        ],
    )
    def test_a_wrong_key(self, override: str, key: str) -> None:
        with pytest.raises(ValueError, match=f"^{key}"):
            compose_request([*SMALL, override])

    def test_a_cluster_is_a_few_lines_of_yaml(self) -> None:
        assert "example_cluster" in choices("launcher")
        launcher = compose_request(["launcher=example_cluster", "launcher.time_min=9"]).launcher
        assert isinstance(launcher, Slurm)
        assert (launcher.partition, launcher.time_min) == ("gpu", 9)
        assert launcher.sbatch == {"mail-type": "END"}
        assert (CONF / "launcher" / "example_cluster.yaml").is_file()


@pytest.fixture
def submitted(fake: Path, tmp_path: Path) -> tuple[Path, RunFolder, list[str]]:
    """A results folder with two tasks of two cases, and their ids."""
    results = tmp_path / "results"
    arguments = ("launcher.cases_per_task=2", "seq_len=8,16,24,32")
    assert run_request(request_of(results, *arguments)) == 0
    ((folder, run),) = runs_of(results)
    return results, folder, [case_id for share in run.case_ids for case_id in share]


def record_of(case_id: str, request_case: Case, **values: Any) -> Record:
    record = {"case_id": case_id, "case": request_case.to_dict(), "status": "ok"} | values
    return Record(**record)


class TestStatus:
    def test_every_kind(self, fake: Path, submitted: tuple[Path, RunFolder, list[str]]) -> None:
        results, folder, ids = submitted
        cases, _, _ = folder.read_share(0)
        store = RecordStore(results)
        error = {"message": "ValueError: no\nand more"}
        store.write(record_of(ids[0], cases[0], status="failed", error=error, wall_s=3.0))
        now = time.time()
        state = TaskState(job="701_0", node="n1", case_id=ids[1], since_s=now - 65)
        folder.write_state(0, state)
        stopped = TaskState(event="stopped", job="701_1", node="n2", case_id=ids[2])
        folder.write_state(1, stopped)
        queue = "701|0|RUNNING|n1|None\n701|1|PENDING||BeginTime\n"
        (fake / "squeue").write_text(queue, encoding="utf-8")
        status = look(results, now)
        assert [(case.case_id, case.status, case.detail) for case in status.cases] == [
            (ids[0], "failed", "ValueError: no"),
            (ids[1], "running", "job 701_0 on n1, for 1:05"),
            (ids[2], "preempted", "job 701_1 waits to start again"),
            (ids[3], "pending", "job 701_1 waits: BeginTime"),
        ]
        ((_, run),) = runs_of(results)
        # Three cases are left on one running task, at the pace of the one that is done.
        pace = 3.0 / run.predicted_s[0][0]
        left = run.predicted_s[0][1] + sum(run.predicted_s[1])
        assert status.time_left_s == pytest.approx(pace * left)
        assert status.warnings == []

    def test_a_folder_that_nodes_do_not_have(
        self, fake: Path, submitted: tuple[Path, RunFolder, list[str]]
    ) -> None:
        results, folder, ids = submitted
        (fake / "sacct").write_text("701_0|FAILED|n7\n701_1|CANCELLED by 5|n7\n", encoding="utf-8")
        status = {case.case_id: case for case in look(results).cases}
        assert status[ids[0]].status == "failed"
        assert status[ids[0]].detail == (
            f"job 701_0 ended as FAILED: it wrote no log: is results={results.resolve()} shared "
            "with n7? use a folder that all nodes have"
        )
        assert status[ids[2]].status == "cancelled"
        log = folder.jobs / "701_0_0_log.err"
        log.write_text("noise\nsrun: error: python: not found\n", encoding="utf-8")
        again = {case.case_id: case for case in look(results).cases}
        assert again[ids[0]].detail == "job 701_0 ended as FAILED: python: not found"

    def test_clocks_that_differ(
        self, fake: Path, submitted: tuple[Path, RunFolder, list[str]]
    ) -> None:
        results, folder, _ = submitted
        (fake / "squeue").write_text("701|0|RUNNING|n1|None\n", encoding="utf-8")
        folder.write_state(0, TaskState(job="701_0", node="n1", clock_offset_s=-40.0))
        (warning,) = look(results).warnings
        assert warning == clocks_differ("n1", -40.0)
        assert "40 s behind" in warning

    def test_records_of_another_schema_are_one_line(
        self, submitted: tuple[Path, RunFolder, list[str]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        results, folder, ids = submitted
        for case, case_id in zip(folder.read_share(0)[0], ids, strict=False):
            text = record_of(case_id, case).to_json()
            text = text.replace(f'"schema": {SCHEMA}', f'"schema": {SCHEMA + 1}')
            (results / "records" / f"{case_id}.json").write_text(text, encoding="utf-8")
        assert status_main([str(results)]) == 0
        said = capsys.readouterr().err
        assert f"schema {SCHEMA + 1}, this version reads {SCHEMA}: use the attnbench" in said
        assert said.endswith("; and 1 more files like it\n")
        assert said.count("\n") == 1

    def test_a_local_run(self, tmp_path: Path) -> None:
        request = compose_request([*SMALL[:3], f"results={tmp_path}", "seq_len=8,16"])
        first, second = request.cases

        class Silent:
            def started(self, case: Case) -> None: ...
            def stage(self, name: str) -> None: ...
            def finished(self, record: Record, *, measured_now: bool) -> None: ...

        store = RecordStore(tmp_path)
        store.create()
        pending = PendingCases(
            cases=request.cases,
            options=request.options,
            store=store,
            progress=Silent(),
            command="",
            predict=lambda case: 2.0 if case is first else 3.0,
        )
        with run_folder.local_run(pending, "local") as said:
            said.started(first)
            statuses = {case.case_id: case.status for case in look(tmp_path).cases}
            assert statuses == {first.id: "running", second.id: "pending"}
            assert look(tmp_path).time_left_s == 5.0
        assert runs_of(tmp_path) == []

    def test_cancel(
        self,
        fake: Path,
        submitted: tuple[Path, RunFolder, list[str]],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        results, _, _ = submitted
        (fake / "squeue").write_text(
            "701|0|RUNNING|n1|None\n701|1|PENDING||x\n9|0|RUNNING|n1|None\n", encoding="utf-8"
        )
        assert cancel_main([str(results), "9"]) == 2
        assert "JOB=9: not queued or running" in capsys.readouterr().err
        assert cancel_main([str(results), "701_1"]) == 0
        assert cancel_main([str(results)]) == 0
        asked = (fake / "scancel").read_text(encoding="utf-8").splitlines()
        assert asked == ["701_1", "701_0 701_1"]

    @pytest.mark.parametrize("main", [status_main, cancel_main])
    def test_no_such_folder(
        self, main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["nowhere"]) == 2
        assert "RESULTS=nowhere: no such folder\n" in capsys.readouterr().err


class TestRequeued:
    def test_failed_cases_measured_again_are_not_measured_once_more(self, tmp_path: Path) -> None:
        """With retry=true, a task that starts again knows which failures are its own."""
        (case,) = cases_of("seq_len=8")
        store = RecordStore(tmp_path)
        store.create()
        old = store.write(record_of(case.id, case, status="failed"))
        finished: list[tuple[int, bool]] = []

        class Seen:
            def started(self, case: Case) -> None:
                raise AssertionError("measured again")

            def stage(self, name: str) -> None: ...

            def finished(self, record: Record, *, measured_now: bool) -> None:
                finished.append((record.attempt, measured_now))

        store.write(record_of(case.id, case, status="failed"))
        options = RunOptions(results=tmp_path, retry=True)
        Runner(options, store, Seen()).run([case], {old.name})
        assert finished == [(2, False)]
        with pytest.raises(AssertionError, match="measured again"):
            Runner(options, store, Seen()).run([case])

    @pytest.mark.parametrize("remeasure", ["stale", "all"])
    def test_a_good_record_is_measured_again_once(self, remeasure: str, tmp_path: Path) -> None:
        """A task that starts again knows which attempts are its own."""
        (case,) = cases_of("seq_len=8")
        store = RecordStore(tmp_path)
        store.create()
        old = store.write(record_of(case.id, case))
        begun: list[str] = []

        class Seen:
            def started(self, case: Case) -> None:
                begun.append(case.id)
                raise KeyboardInterrupt

            def stage(self, name: str) -> None: ...

            def finished(self, record: Record, *, measured_now: bool) -> None: ...

        options = RunOptions(results=tmp_path, remeasure=remeasure)
        with pytest.raises(KeyboardInterrupt):
            Runner(options, store, Seen()).run([case], {old.name})
        store.write(record_of(case.id, case))
        Runner(options, store, Seen()).run([case], {old.name})
        assert begun == [case.id]


class TestAgents:
    def test_a_rank_is_told_its_place_on_its_host(self, tmp_path: Path) -> None:
        """By which it picks its GPU: the fourth of four ranks on two nodes is its node's second."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        keys = Keys(to_leader=b"there", to_agent=b"back")
        hosts = Hosts(local_ranks=1, ranks_per_node=2)
        hosts._agents[3] = Link.of_leader(ours, keys)
        start = RankStart(
            rank=3,
            local_rank=0,
            ranks_on_host=0,
            world_size=4,
            device="cuda",
            vote_timeout_s=1.0,
            timeout_s=1.0,
            rendezvous="",
        )
        hosts.start(start, logs=tmp_path, caches="")
        told = Link.of_agent(theirs, keys).receive(timeout_s=GUARD_S)
        assert isinstance(told, Start)
        assert (told.start["local_rank"], told.start["ranks_on_host"]) == (1, 2)

    def on_two_nodes(self, tmp_path: Path, *arguments: str) -> tuple[list[Record], str]:
        """Cases of one rank on each of two nodes, and the secret of these."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        nodes = ("launcher.nnodes=2", "launcher.ranks_per_node=1", "seq_len=8")
        nodes += (f"launcher.rdzv_endpoint=127.0.0.1:{port}", f"results={tmp_path}")
        secret = new_secret()
        nodes += (f"launcher.rdzv_secret={secret}",)
        tiny = ("task.warmup_steps=1", "task.measure_steps=2", "model.num_layers=1")
        tiny += ("model.d_model=16", "model.d_ff=16", "model.vocab_size=16")
        request = compose_request(["device=cpu", "model=tiny", *nodes, *tiny, *arguments])
        with ThreadPoolExecutor() as pool:
            served = pool.submit(
                serve_agent,
                address="127.0.0.1",
                port=port,
                rank=1,
                key=derived_key(secret, "attnbench agents"),
                run="attnbench",
                logs=tmp_path,
            )
            assert run_request(request) == 0
            assert served.result(timeout=GUARD_S) == 1
        records, _ = RecordStore(tmp_path).load()
        return list(records.values()), secret

    def test_two_nodes_without_slurm(self, tmp_path: Path) -> None:
        """Cases on one rank and on two, the second on another node, through one endpoint."""
        ranks = ("parallel=ddp_torch", "parallel.dp=1,2")
        records, secret = self.on_two_nodes(tmp_path, "attention=naive", *ranks)
        assert {len(record.memory) for record in records} == {1, 2}
        written = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert written
        assert not [path for path in written if secret.encode() in path.read_bytes()]

    def test_ranks_of_two_nodes_read_no_memory_of_each_other(self, tmp_path: Path) -> None:
        """Here they could, through files of the one host that both nodes are."""
        split = ("attention=ring", "parallel.cp=2", "attention.transport=symmetric,send_recv")
        records, _ = self.on_two_nodes(tmp_path, *split)
        said = {item.case["attention"]["transport"]: item for item in records}
        assert said["send_recv"].status == "ok"
        assert said["symmetric"].status == "unsupported"
        assert said["symmetric"].error is not None
        assert said["symmetric"].error["message"] == (
            "attention.transport=symmetric needs all ranks that share a sequence on one host: "
            "parallel.cp=2 x parallel.tp=1 ranks, and 1 run on each"
        )

    @pytest.mark.parametrize(
        ("override", "words"),
        [
            ("launcher.nnodes=2", "launcher.rdzv_endpoint=None: launcher.nnodes=2 needs HOST:PORT"),
            ("launcher.node_rank=1", "launcher.node_rank=1: must be from 0 to"),
        ],
    )
    def test_a_wrong_key(self, override: str, words: str) -> None:
        with pytest.raises(ValueError, match=words):
            compose_request(["model=tiny", "device=cpu", override])


def test_what_slurm_says_in_one_line() -> None:
    text = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    assert slurm.refusal(text) == "Batch job submission failed: Invalid qos specification"
    assert slurm.refusal("") == "it gave no reason"
    assert slurm.refusal("plain words\n") == "plain words"


@pytest.mark.parametrize(
    "said",
    [
        "sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host\n"
        "sinfo: fatal: Could not establish a configuration source\n",
        "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n",
    ],
)
def test_a_host_of_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    program = tmp_path / "sinfo"
    program.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(
        slurm.SlurmError, match=r"finds no Slurm controller; .*SLURM_CONF"
    ) as caught:
        slurm.require_partition("gpu")
    assert "\n" not in str(caught.value)
