"""What a plan says of each case: measured, recorded, or why it would give no time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.run import local


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "probe_cuda", lambda: {"names": [], "reason": "no GPU here"})


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The plan in one line, from a host without a GPU."""
    keys = ["plan=true", f"results={tmp_path}", "precision=bf16", *arguments]
    assert run_request(compose_request(keys)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_of_a_machine_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    model = ["model=xl", "machine=h200", "parallel=fsdp", "attention=sdpa"]
    said = planned(tmp_path, capsys, *model, "seq_len=512,262144", "parallel.dp=4,16")
    assert said.count("to measure ") == 2
    assert said.count("needs 16 GPUs, has 8") == 2
    (needs,) = re.findall(r"does not fit \(needs ([\d,]+) GiB, has 134\)", said)
    assert float(needs.replace(",", "")) > 134
    assert "3 cases would end without a time" in said
    assert "1 of 4 cases to measure on cuda" in said


def test_of_hosts_that_slurm_starts_ranks_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    case = ["model=xl", "machine=h200", "seq_len=4096", "launcher=slurm"]
    said = planned(tmp_path, capsys, *case, "parallel=fsdp", "parallel.dp=16", "attention=sdpa")
    assert "1 of 1 case to measure on cuda" in said
    ring = ["attention=ring", "attention.transport=symmetric", "parallel.cp=8"]
    said = planned(tmp_path, capsys, *case, *ring)
    assert "1 of 1 case to measure on cuda" in said
    said = planned(tmp_path, capsys, *case, *ring, "launcher.gpus_per_node=4")
    assert "needs all ranks that share a sequence on one host" in said
    with pytest.raises(ValueError, match="11 ranks: do not divide over nodes"):
        planned(tmp_path, capsys, *case, "parallel=fsdp", "parallel.dp=11", "attention=sdpa")


def test_names_what_a_backend_refuses_and_what_takes_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    said = planned(tmp_path, capsys, "model=tiny", "machine=here", "attention=sdpa,sdpa_cudnn")
    assert "unsupported (attention=sdpa_cudnn: PyTorch's cudnn attention runs on CUDA" in said
    assert "1 of 2 cases to measure on cpu" in said
    said = planned(tmp_path, capsys, "model=tiny", "machine=here", "timeout_s=0.01")
    assert "exceeds timeout_s=0.01" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["machine=h200"], "machine=h200: says what a plan is made for; add plan=true"),
        (["machine=h20", "plan=true"], "machine=h20: no such hardware (did you mean h200"),
    ],
)
def test_a_wrong_machine_is_one_line(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        compose_request(["model=tiny", *arguments])


def test_without_a_machine_nothing_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that a plan imports no torch."""
    said = planned(tmp_path, capsys, "model=tiny", "attention=sdpa,sdpa_cudnn", "device=cpu")
    assert "2 of 2 cases to measure on cpu" in said
