"""``attnbench recommend`` and ``attnbench fits`` as typed."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from harness import forecast
from harness.analysis.stats import median, slowest_rank
from harness.commands import fits, recommend
from harness.commands.questions import asked
from harness.forecast import machines
from harness.forecast.calibration import Calibration, read
from harness.paths import ROOT
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.run import local
from harness.store.record import RecordStore
from kernels import BACKENDS

ELSEWHERE = ["machine=h200", "gpus=2", "seq_len=2048", "attention=sdpa,zigzag"]

WRONG = {
    "no model": ([], ["model: missing"]),
    "mistyped key": (["modle=tiny"], ["modle: no such key", "did you mean model?"]),
    "mistyped model": (["model=tinny"], ["model=tinny:", "did you mean tiny?"]),
    "mistyped machine": (["model=tiny", "machine=h20"], ["machine=h20:", "did you mean h200"]),
    "mistyped goal": (["model=tiny", "goal=memry"], ["goal=memry:", "did you mean memory?"]),
    "mistyped strategy": (["model=tiny", "parallel=fsd"], ["parallel=fsd:", "did you mean fsdp"]),
    "tokens that make no sequences": (
        ["model=tiny", "seq_len=512", "batch_tokens=1000"],
        ["batch_tokens=1000:", "multiple of seq_len=512", "512 or 1024"],
    ),
    "GPUs that no hosts share evenly": (
        ["model=tiny", "machine=h200", "gpus=11"],
        ["gpus=11: do not divide over hosts of 8 GPUs"],
    ),
    "measuring elsewhere": (
        ["model=tiny", "machine=h200", "measure=true"],
        ["measure=true:", "machine=h200 is not here"],
    ),
    "an option without its choice": (
        ["model=tiny", "attention.kernel=math"],
        ["attention.kernel:", "attention="],
    ),
    "layers without a window that no layer has": (
        ["model=tiny", "model.full_attention_every=2"],
        ["model.full_attention_every=2:", "set attention.window"],
    ),
    "a window of no keys": (
        ["model=tiny", "attention.window=0"],
        ["attention.window=0:", "least 1"],
    ),
    "a prefix in a window": (
        ["model=tiny", "attention.window=64", "attention.prefix_len=16"],
        ["attention.prefix_len=16:", "attention.window=64"],
    ),
    "words for a number": (["model=tiny", "seq_len=many"], ["seq_len=many:", "whole number"]),
    "neither captured nor launched": (
        ["model=tiny", "task.cuda_graph=perhaps"],
        ["task.cuda_graph=perhaps:", "true or false"],
    ),
    "no GPUs": (["model=tiny", "machine=h200", "gpus=0"], ["gpus=0:", "at least 1"]),
    "too many GPUs": (["model=tiny", "machine=h200", "gpus=4097"], ["gpus=4097:", "at most 4,096"]),
    "GPUs that are not here": (["model=tiny", "gpus=8"], ["gpus=8:", "machine=h200"]),
    "a time without a number": (["model=tiny", "budget_s=long"], ["budget_s=long:", "number"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "probe_cuda", lambda: {"names": [], "reason": "no GPU here"})
    arguments, words = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        asked("recommend", arguments)
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text


def test_without_a_calibration_only_times_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model=tiny", "machine=rtx_4090", "gpus=1", f"results={tmp_path / 'new'}"]
    with pytest.raises(ValueError, match=r"^machine=rtx_4090: no calibration.*h200.*memory.*$"):
        recommend.main(arguments)
    assert not (tmp_path / "new").exists()
    assert recommend.main([*arguments, "goal=memory"]) == 0
    assert "For the least memory run" in capsys.readouterr().out


def test_this_machines_calibration_is_that_of_the_results_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["model=tiny", "device=cpu", "measure=false"]
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/sweeps/calibration holds no")):
        recommend.main([*arguments, f"results={tmp_path}"])
    # Where a sweep that names no folder puts it.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="results/local/sweeps/calibration holds no"):
        forecast.machine("here")


def test_a_folder_that_cannot_be_written_is_said_before_anything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"results=.*file: cannot be written \(Not a directory\)"):
        recommend.main(["model=tiny", *ELSEWHERE, f"results={tmp_path / 'file'}"])
    assert not capsys.readouterr().out


def test_answers_for_a_machine_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["model=medium", *ELSEWHERE, "measure=false", f"results={tmp_path}"]
    assert recommend.main(arguments) == 0
    said = capsys.readouterr().out
    words = " ".join(said.split())
    assert re.search(r"Run \w+.*tokens/s predicted \(90%", words)
    assert "attnbench model=medium seq_len=2048" in said
    second = re.search(r"Runner-up: (.*?), (as fast|[\d.]+% slower)", words)
    assert second
    ties = words.partition("Tied as well:")[2].partition("combination")[0]
    assert second[1] not in ties.replace(", and", ";").split(";")[0]
    # What is to be copied stays on one line, however long.
    drawn = [line for line in said.splitlines() if not re.match("attnbench |  report", line)]
    assert max(map(len, drawn)) <= 80
    (page,) = tmp_path.glob("sweeps/recommend-*/recommendation.md")
    text = page.read_text()
    assert "![" in text
    assert "attnbench model=medium" in text
    html = page.with_suffix(".html").read_text()
    assert "<svg" in html
    assert "<title>medium" in html


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        ("model=tiny attention=zigzag", "0 combinations, none of them legal."),
        (
            "model=llama3_8b attention=naive checkpoint=none compile=none",
            "6 combinations, 6 of them legal, none fits.",
        ),
    ],
)
def test_counts_end_where_nothing_is_left(
    words: str, counted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*words.split(), "seq_len=65536", "gpus=1", "machine=h200", f"results={tmp_path}"]
    recommend.main(arguments)
    assert capsys.readouterr().out.splitlines()[0] == counted


def test_nothing_falls_out_without_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model=medium", "gpus=1", "machine=h200", f"results={tmp_path}"]
    arguments += ["attention=sdpa,flash_torch,flash_attn_4", "compile=none", "checkpoint=none"]
    assert recommend.main(arguments) == 0
    said = capsys.readouterr().out
    assert "no time  h200: flash_torch was not measured in bfloat16" in said
    # Of another machine a laptop cannot say what is installed.
    if not BACKENDS["flash_attn_4"].target(name="flash_attn_4").version():
        assert "not installed on this host, so not known of h200" in " ".join(said.split())


def test_an_answer_says_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_captured_steps(path: Path) -> Calibration:
        known = read(path)
        factors = {name: x for name, x in known.factors.items() if name != "captured_gap_us"}
        return replace(known, factors=factors)

    monkeypatch.setattr(machines, "read", without_captured_steps)
    arguments = ["model=small", "seq_len=256", "machine=h200", "gpus=2", f"results={tmp_path}"]
    arguments += ["attention=sdpa", "compile=none", "checkpoint=none"]
    assert recommend.main(arguments) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Run sdpa, \w+, dp 2, captured, micro-batch 2: [\d,]+ tokens/s pred", said)
    assert "GiB predicted as if launched on each GPU" in said
    assert "Extrapolated: " in said
    assert "no captured step calibrates a prediction" in said
    assert "what CUDA graphs keep besides is not predicted" in said
    assert "task.cuda_graph=true" in said
    assert re.search(r"zero_2[\w, ]*: not captured in a CUDA graph", said)
    (page,) = tmp_path.glob("sweeps/recommend-*/recommendation.md")
    text = page.read_text()
    assert "no captured step calibrates" in text
    assert "Hollow: captured" in text
    assert recommend.main([*arguments, "task.cuda_graph=false"]) == 0
    assert "captured" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [recommend, fits])
def test_help_keeps_its_lines(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out == command.HELP


def test_fits_prints_a_row_for_each_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    assert fits.main(["model=medium", *ELSEWHERE, "parallel=fsdp,ddp_torch"]) == 0
    said = capsys.readouterr().out
    assert "medium: 423 M parameters" in said
    assert len(re.findall(r"^(fsdp|ddp_torch) +(none|block) +1 ", said, re.MULTILINE)) == 4


def test_fits_of_captured_steps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model=medium", *ELSEWHERE, "parallel=fsdp,ddp_bucketed", "checkpoint=none"]
    tables = []
    for captured in ("false", "true"):
        assert fits.main([*arguments, f"task.cuda_graph={captured}"]) == 0
        tables.append(capsys.readouterr().out)
    launched, captured = (re.findall(r"^(?:fsdp|ddp_).*", text, re.MULTILINE) for text in tables)
    assert captured == [row for row in launched if row.startswith("ddp_bucketed")]
    assert len(launched) == 2
    assert "A captured step is taken to need the memory" in tables[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpus=2", "task.cuda_graph=true"], "no step of parallel=fsdp can be captured in CUDA"),
        (["gpus=1"], "parallel=fsdp: needs several GPUs"),
    ],
)
def test_fits_says_why_nothing_can_train(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fits.main(["model=medium", "machine=h200", "seq_len=2048", "parallel=fsdp", *words])


def test_measures_on_this_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is faster, both candidates have records of five rounds or more, and one is named."""
    # Not to wait for other commands on this machine.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = ["model=tiny", "model.num_layers=1", "seq_len=32", "batch_size=4", "device=cpu"]
    arguments += ["attention=naive,sdpa", "compile=none", "checkpoint=none", "budget_s=1"]
    arguments += ["batch_tokens=128"]
    arguments += ["task.warmup_steps=1", "task.measure_steps=5", f"results={tmp_path}"]
    assert recommend.main(arguments) == 0
    said = capsys.readouterr().out
    assert "tokens/s measured" in said
    assert said.startswith(
        "No calibration of this machine: short runs find what is best, about 1 s"
    )
    records, problems = RecordStore(tmp_path).load()
    assert not problems
    whole = list(records.values())
    assert {item.case["attention"]["name"] for item in whole} == {"naive", "sdpa"}
    assert {item.case["model"]["num_layers"] for item in whole} == {1}
    assert all(len(item.rounds) >= 5 for item in whole)
    best = re.search(r"Run (naive|sdpa), micro-batch 4", said)
    assert best
    times = {
        item.case["attention"]["name"]: median(slowest_rank(item.phases["step"].samples_ms))
        for item in whole
    }
    assert best[1] == min(times, key=lambda name: times[name])


def test_the_answer_names_what_there_was_no_time_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three go on after a round, which takes longer than the time; the third later."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    arguments = ["model=tiny", "model.num_layers=1", "seq_len=32", "batch_size=4", "device=cpu"]
    arguments += ["attention=naive,sdpa,sdpa_math", "compile=none", "checkpoint=none"]
    arguments += ["batch_tokens=128", "budget_s=0.1", f"results={tmp_path}"]
    left = re.compile(r"^(\w+), micro-batch 4: in one round, in which others were faster", re.M)
    for number in (2, 3):
        assert recommend.main(arguments) == 0
        records, problems = RecordStore(tmp_path).load()
        assert not problems
        measured = {item.case["attention"]["name"] for item in records.values()}
        assert len(measured) == number
        assert {*left.findall(capsys.readouterr().out)} == {"naive", "sdpa", "sdpa_math"} - measured


def test_what_has_one_prediction_is_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that is never waited for takes as long without the host's launches."""
    asked = ["model=medium", "seq_len=8192", "machine=h200", "gpus=1", f"results={tmp_path}"]
    asked += ["attention=flash_triton,sdpa_cudnn", "compile=block", "checkpoint=none"]
    answer = recommend.recommend(*asked)
    best, same = answer.groups[0]
    assert same.step_ms == pytest.approx(best.step_ms, rel=1e-3)
    assert same.memory_gib == pytest.approx(best.memory_gib, abs=0.01)
    assert (best.base.attention.name, same.base.attention.name) == ("flash_triton",) * 2
    assert answer.runner_up is answer.groups[1][0]
    assert answer.runner_up.step_ms > 1.001 * best.step_ms
    assert recommend.main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The same is predicted with compile=block (reduce-overhead)." in said
    assert f"Runner-up: {answer.runner_up.name}, " in said
    assert same.name not in said
    (page,) = tmp_path.glob("sweeps/recommend-*/recommendation.md")
    text = page.read_text()
    assert f"| {best.name} (1 more alike) |" in text
    assert "The same is predicted with compile=block (reduce-overhead)." in text
    # What was measured is told apart by its own rounds.
    answer.ranked = [replace(item, measured_ms=1.0) for item in answer.ranked]
    assert [len(group) for group in answer.groups] == [1] * len(answer.ranked)


def test_commands_for_several_hosts_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["model=medium", "seq_len=8192", "machine=h200", f"results={tmp_path}"]
    few = ["parallel=zero_2,fsdp", "attention=zigzag", "compile=none", "parallel.tp=1"]
    for gpus, ending in ((8, ""), (16, " launcher=slurm")):
        answer = recommend.recommend(*asked, *few, f"gpus={gpus}")
        assert answer.best is not None
        _, *command = answer.command(answer.best).split()
        assert " ".join(command).endswith(ending)
        assert ("launcher=slurm" in command) == bool(ending)
        plan = ["machine=h200", "plan=true", f"results={tmp_path}"]
        assert run_request(compose_request([*command, *plan])) == 0
        assert "1 of 1 case to measure on cuda" in " ".join(capsys.readouterr().out.split())


def test_masks_are_asked_of_every_attention(tmp_path: Path) -> None:
    arguments = ["model=small", "seq_len=8192", "machine=h200", "gpus=2", f"results={tmp_path}"]
    arguments += ["parallel=zero_2", "checkpoint=none"]
    plain = recommend.recommend(*arguments)
    local = recommend.recommend(*arguments, "attention.window=256")
    assert all(item.base.attention.window == 256 for item in local.found.bases)
    assert {item.base.parallel.cp for item in local.found.bases} == {1, 2}
    assert local.best is not None
    assert plain.best is not None
    assert "attention.window=256" in local.command(local.best)
    # Attention of 8,192 tokens is more than a tenth of this step.
    assert local.best.step_ms < 0.9 * plain.best.step_ms
    assert any("takes no attention.window=256" in reason for reason in local.found.fallen)


def test_the_opening_of_fits_says_the_mask_and_counts_sinks() -> None:
    arguments = ["model=medium", "machine=h200", "attention=naive"]
    plain = fits.opening(asked("fits", arguments).question)
    found = fits.opening(asked("fits", [*arguments, "attention.sinks=true"]).question)
    # 24 layers of 16 heads.
    assert "384 of them sinks" in found
    assert "attention.sinks=true" in found
    assert "sinks" not in plain


ANSWERS = re.compile(r"^`attnbench recommend ([^`]+)` answers.*:\n\n((?:> .*\n)+)", re.MULTILINE)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param(command, answer, id=command)
        for page in ("README.md", "docs/recommend.md")
        for command, answer in ANSWERS.findall((ROOT / page).read_text())
    ],
)
def test_pages_quote_what_is_answered(
    command: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no library of attention is installed that a page did not have."""
    # Nothing elsewhere is measured, whether a command says so or not.
    assert recommend.main([*command.split(), f"results={tmp_path}"]) == 0
    quoted = " ".join(line.removeprefix("> ") for line in answer.splitlines())
    assert quoted in " ".join(capsys.readouterr().out.split())


def test_three_answers_are_quoted() -> None:
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/recommend.md")]
    assert sum(len(ANSWERS.findall(page)) for page in pages) == 3
