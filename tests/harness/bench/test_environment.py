"""The environment of a record, and the load around its passes."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch

from harness.bench import environment as module
from harness.bench.environment import environment, library_versions, revision, variables
from harness.bench.host_load import LoadWatch
from harness.source import history

CPU = torch.device("cpu")


def test_the_environment_names_the_host_and_its_settings() -> None:
    found = environment(CPU)
    assert found["host"] == socket.gethostname()
    assert found["num_threads"] == torch.get_num_threads()
    assert found["cpu_affinity"]
    assert found["plugins"] == {}


def test_variables_are_an_allow_list_without_secrets_and_paths() -> None:
    environ = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "HOME": "/somewhere",
        "AWS_SECRET": "x",
        "TORCH_TOKEN": "secret",
        "ATTNBENCH_API_KEY": "secret",
        "TRITON_CACHE_DIR": "/somewhere/cache",
        "NCCL_PROXY": "http://user:word@host",
        "ATTNBENCH_PARENT": "123",
        "ATTNBENCH_REVISION": "abc",
    }
    assert variables(environ) == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "TRITON_CACHE_DIR": "(set)",
        "NCCL_PROXY": "(set)",
    }


def test_libraries_that_are_not_installed_are_left_out() -> None:
    assert library_versions(["torch", "no-such-library"]) == {"torch": torch.__version__}


def test_affinity_in_short() -> None:
    assert module._ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_a_stated_revision_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert revision() == {"git_revision": None, "revision_stated": False}
    monkeypatch.setenv("ATTNBENCH_REVISION", "abc1234")
    assert revision() == {"git_revision": "abc1234", "revision_stated": True}


def test_a_history_goes_before_a_stated_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to hide that the tree had changes."""
    repository = with_history(tmp_path)
    (repository / "a.py").write_text("a = 2\n")
    monkeypatch.setattr(module, "ROOT", repository)
    monkeypatch.setenv("ATTNBENCH_REVISION", "abc1234")
    found = revision()
    assert found["git_revision"].endswith("+")
    assert not found["revision_stated"]


def test_the_index_is_neither_locked_nor_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was killed just then left a lock, and the user's next commit failed."""
    repository = with_history(tmp_path)
    monkeypatch.setattr(module, "ROOT", repository)
    os.utime(repository / "a.py", (0, 0))
    before = (repository / ".git" / "index").read_bytes()
    (repository / ".git" / "index.lock").touch()
    found = str(revision()["git_revision"])
    assert found
    assert not found.endswith("+"), "only its time has changed"
    (repository / ".git" / "index.lock").unlink()
    assert revision()["git_revision"] == found
    monkeypatch.setattr(history, "ROOT", repository)
    assert history.differing_since(found, ["a.py"]) == set()
    assert (repository / ".git" / "index").read_bytes() == before


def with_history(folder: Path) -> Path:
    """A repository of one file and one commit."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (folder / "a.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "One"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def _spin(seconds: float) -> None:
    """Use so much CPU time, however long a busy host takes to give it."""
    while time.process_time() < seconds:
        pass


def test_our_own_work_is_no_load_of_others() -> None:
    """A child of this process is ours: its CPU time must appear there."""
    watch = LoadWatch(CPU)
    child = multiprocessing.get_context("fork").Process(target=_spin, args=(0.5,))
    child.start()
    child.join()
    found = watch.load()
    assert found["own_cpus"] * found["seconds"] > 0.4
    assert 0 <= found["other_cpu_share"] <= 1
    assert found["other_cpus"] <= (os.cpu_count() or 1)


def test_work_of_others_is_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a CPU of the host was busy, and none of it was ours."""
    from harness.bench import host_load

    busy = iter([10.0, 10.0 + 5.0])
    monkeypatch.setattr(host_load, "_busy_s", lambda: next(busy))
    own = iter([3.0, 3.0 + 1.0])
    monkeypatch.setattr(host_load, "_cpu_s", lambda processes: next(own))
    moments = iter([100.0, 108.0])
    monkeypatch.setattr(host_load.time, "monotonic", lambda: next(moments))
    monkeypatch.setattr(host_load.psutil, "cpu_count", lambda: 4)
    found = LoadWatch(CPU).load()
    assert (found["other_cpus"], found["other_cpu_share"]) == (0.5, 0.125)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_named_by_its_uuid() -> None:
    found = environment(torch.device("cuda", 0))
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found["gpu_uuid"] in listed
    assert found["driver"]
    assert found["nccl"]
    assert isinstance(found["ecc"], bool)
    load = LoadWatch(torch.device("cuda", 0)).load()
    assert isinstance(load["device_processes"], list)
    assert 0 <= load["device_utilisation"] <= 100
