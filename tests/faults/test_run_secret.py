"""The secret of a run over several hosts: who makes it, who is given it, and where it is not."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import free_port
from fake_slurm import install
from fault_folders import GUARD_S

from harness.bench.environment import variables
from harness.request.compose import compose_request
from harness.request.plan import sweep_plan
from harness.request.session import run_request
from harness.run import local
from harness.run.nodes.errors import HostError
from harness.run.nodes.secret import (
    SECRET_FILE,
    VARIABLE,
    derived_key,
    given_secret,
    new_secret,
    read_secret,
    write_secret,
)
from harness.run.run_folder import RunFolder, runs_of
from harness.run.slurm.launcher import Slurm
from harness.run.slurm.task import ShareTask

SECRET = "k0123456789abcdef"


def private_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    path = folder / "mine"
    path.write_text(text)
    path.chmod(mode)
    return path


class TestGiven:
    def test_by_each_way(self, tmp_path: Path) -> None:
        file = str(private_file(tmp_path, SECRET + "\n"))
        assert given_secret(typed=SECRET, file=None, environment={}) == SECRET
        assert given_secret(typed=None, file=file, environment={}) == SECRET
        assert given_secret(typed=None, file=None, environment={VARIABLE: SECRET}) == SECRET
        assert given_secret(typed=SECRET, file=file, environment={VARIABLE: SECRET}) == SECRET
        assert given_secret(typed=None, file=None, environment={}) is None

    def test_workers_do_not_inherit_it(self) -> None:
        environment = {VARIABLE: SECRET, "HOME": "/x"}
        given_secret(typed=None, file=None, environment=environment)
        assert environment == {"HOME": "/x"}

    def test_two_that_differ(self) -> None:
        with pytest.raises(ValueError, match=f"launcher.rdzv_secret and {VARIABLE}: are different"):
            given_secret(typed=SECRET, file=None, environment={VARIABLE: SECRET + "x"})

    @pytest.mark.parametrize("text", ["", "attnbench", "                    "])
    def test_one_that_protects_nothing(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"launcher\.rdzv_secret: needs 16 characters"):
            given_secret(typed=text, file=None, environment={})

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda folder: private_file(folder, mode=0o644), "others may read it; use chmod 600"),
            (lambda folder: private_file(folder, mode=0o620), "others may read it; use chmod 600"),
            (lambda folder: private_file(folder, "é" * 20), "one line of ASCII"),
            (lambda folder: folder / "none", "cannot be read"),
            (lambda folder: folder, "Is a directory"),
            (lambda folder: Path("/dev/null"), "is not a file"),
        ],
    )
    def test_a_file_that_is_not_private(
        self, tmp_path: Path, make: Callable[[Path], Path], words: str
    ) -> None:
        with pytest.raises(ValueError, match=rf"^launcher\.rdzv_secret_file=.*: .*{words}"):
            given_secret(typed=None, file=str(make(tmp_path)), environment={})

    def test_a_fifo_does_not_keep_the_command_waiting(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo", 0o600)
        with pytest.raises(ValueError, match="is not a file"):
            given_secret(typed=None, file=str(tmp_path / "fifo"), environment={})


class TestMade:
    def test_each_is_another(self) -> None:
        made = {new_secret() for _ in range(100)}
        assert len(made) == 100
        assert all(len(secret) == 33 for secret in made)

    def test_a_command_line_takes_it_for_text(self) -> None:
        """Hexadecimal digits alone may be a number such as 12e45."""
        for _ in range(5):
            secret = new_secret()
            launcher = compose_request([*NODES, f"launcher.rdzv_secret={secret}"]).launcher
            assert getattr(launcher, "rdzv_secret", None) == secret

    def test_in_a_file_for_its_owner(self, tmp_path: Path) -> None:
        write_secret(tmp_path / "secret")
        assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
        assert len(read_secret(tmp_path / "secret")) == 33

    def test_a_planted_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(FileExistsError):
            write_secret(tmp_path / "secret")
        assert not (tmp_path / "elsewhere").exists()


NODES = ["device=cpu", "model=tiny", "attention=naive", "seq_len=8", "launcher.nnodes=2"]
NODES += ["launcher.ranks_per_node=1", "launcher.rdzv_endpoint=127.0.0.1:29500"]


def on_nodes(results: Path, *further: str) -> list[str]:
    endpoint = f"launcher.rdzv_endpoint=127.0.0.1:{free_port()}"
    return [*NODES[:-1], f"results={results}", endpoint, *further]


class TestLocal:
    def test_a_node_without_it_refuses_to_start(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        request = compose_request(on_nodes(tmp_path, "launcher.node_rank=1"))
        assert run_request(request) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attnbench: launcher.node_rank=1: add the launcher.rdzv_secret=...")

    def test_one_that_protects_nothing_is_an_error_of_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run_request(compose_request(on_nodes(tmp_path, "launcher.rdzv_secret=x"))) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("attnbench: launcher.rdzv_secret: needs 16 characters")

    def test_the_leader_prints_the_key_that_the_others_need(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("harness.run.nodes.hosts.CONNECT_TIMEOUT_S", 0.05)
        assert run_request(compose_request(on_nodes(tmp_path))) == 1
        said = capsys.readouterr().err
        (key,) = [word for word in said.split() if word.startswith("launcher.rdzv_secret=")]
        assert "run this command with launcher.node_rank=1" in said
        given = key.partition("=")[2]
        assert compose_request([*NODES, key]).launcher.rdzv_secret == given  # type: ignore[attr-defined]
        assert not [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and given.encode() in path.read_bytes()
        ]

    def test_one_that_was_given_is_not_printed(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("harness.run.nodes.hosts.CONNECT_TIMEOUT_S", 0.05)
        monkeypatch.setenv(VARIABLE, SECRET)
        assert run_request(compose_request(on_nodes(tmp_path))) == 1
        assert SECRET not in "".join(capsys.readouterr())
        assert VARIABLE not in os.environ

    def test_the_command_is_kept_without_it(self) -> None:
        """In plans, reports and the files of runs."""
        request = compose_request([*NODES, f"launcher.rdzv_secret={SECRET}"])
        assert request.command.startswith("attnbench device=cpu")
        assert SECRET not in request.command
        assert SECRET not in sweep_plan(request).command

    def test_records_keep_no_variable_with_it(self) -> None:
        assert variables({VARIABLE: SECRET, "ATTNBENCH_X": "1"}) == {"ATTNBENCH_X": "1"}

    @pytest.mark.parametrize("endpoint", ["0.0.0.0:29500", "[::]:29500", "host:0", "host:70000"])
    def test_an_endpoint_that_nobody_reaches(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="needs HOST:PORT of the host"):
            compose_request([*NODES[:-1], f"launcher.rdzv_endpoint='{endpoint}'"])

    def test_another_way_to_write_the_endpoint(self) -> None:
        launcher = compose_request([*NODES[:-1], "launcher.rdzv_endpoint='[::1]:29500'"]).launcher
        assert isinstance(launcher, local.Local)


class TestSlurm:
    def submitted(self, results: Path) -> RunFolder:
        ((folder, _),) = runs_of(results)
        return folder

    def test_it_lies_in_the_runs_folder_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        install(tmp_path / "slurm", monkeypatch)
        results = tmp_path / "results"
        ranks = ["parallel=ddp_torch", "parallel.dp=2", "launcher.gpus_per_node=1"]
        arguments = ["device=cpu", "model=tiny", "launcher=slurm", "batch_size=2", *ranks]
        assert run_request(compose_request([*arguments, f"results={results}"])) == 0
        path = self.submitted(results).path / SECRET_FILE
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = read_secret(path)
        files = [other for other in tmp_path.rglob("*") if other.is_file() and other != path]
        assert any(other.suffix == ".pkl" for other in files)
        assert not [other for other in files if secret.encode() in other.read_bytes()]
        assert secret not in "".join(capsys.readouterr())

    def test_each_task_has_a_key_of_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = RunFolder(tmp_path, "run")
        folder.path.mkdir(parents=True)
        write_secret(folder.path / SECRET_FILE)

        def key(index: int, job: str) -> bytes:
            monkeypatch.setenv("SLURM_JOB_ID", job)
            return ShareTask(str(tmp_path), "run", index, 1, 60, 90).key()

        assert key(0, "7") == key(0, "7")
        assert len({key(0, "7"), key(1, "7"), key(0, "8")}) == 3

    def test_a_run_without_it(self, tmp_path: Path) -> None:
        with pytest.raises(HostError, match=r"secret: cannot be read .*; submit the cases again"):
            ShareTask(str(tmp_path), "run", 0, 1, 60, 90).key()

    def test_its_launcher_has_no_key_for_it(self) -> None:
        values: dict[str, Any] = {"name": "slurm", "time_min": int(GUARD_S)}
        assert not hasattr(Slurm(**values), "rdzv_secret")


def test_keys_for_two_purposes() -> None:
    assert derived_key(SECRET, "a") == derived_key(SECRET, "a") != derived_key(SECRET, "b")
    assert derived_key(SECRET, "a") != derived_key(SECRET + "x", "a")
