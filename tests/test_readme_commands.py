"""Every command of the README and of docs: what it needs is said, and it plans in the time said.

Above a block of commands stands what they need: ``*Laptop, at most 2 minutes:*`` (the most that
``plan=true`` predicts of any of them on two cores), ``*1 GPU:*``, ``*4 GPUs:*``, ``*Slurm:*`` or
``*Several hosts:*``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import ROOT
from ranks import on_ranks

from harness.commands.questions import asked
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.run import local

PAGES = [ROOT / "README.md", ROOT / "results/README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
NEEDS = re.compile(
    r"\*(?P<what>Laptop|(?P<gpus>\d) GPUs?|Slurm|Several hosts)"
    r"(?:, at most (?P<minutes>\d+) minutes?[^*]*)?:\*"
)
MADE = {"make bench": "attnbench sweeps=quickstart"}
"""Targets of the Makefile that measure."""
CORES = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class Command:
    """One line of a page, and what the page says that it needs."""

    page: str
    program: str
    arguments: tuple[str, ...]
    needs: re.Match[str] | None

    @property
    def what(self) -> str:
        return self.needs["what"] if self.needs else ""

    def __str__(self) -> str:
        return f"{self.page} {self.program} {shlex.join(self.arguments)}"


def commands_of(page: Path) -> list[Command]:
    """The commands of a page's blocks that name no language."""
    found = []
    above, language = "", None
    for line in filter(None, page.read_text(encoding="utf-8").splitlines()):
        if line.startswith("```"):
            language = line[3:] if language is None else None
        elif language is None:
            above = line
        elif language == "" and MADE.get(line, line).split()[0] in SCRIPTS:
            line = MADE.get(line, line)
            program, *arguments = shlex.split(line, comments=True)
            found.append(
                Command(
                    page=str(page.relative_to(ROOT)),
                    program=program,
                    arguments=tuple(arguments),
                    needs=NEEDS.fullmatch(above),
                )
            )
    return found


COMMANDS = [command for page in PAGES for command in commands_of(page)]
ASKING = ("recommend", "fits")
"""Subcommands whose keys make a question, and not cases."""
QUESTIONS = [
    item for item in COMMANDS if item.program == "attnbench" and item.arguments[0] in ASKING
]
MEASURING = [
    command
    for command in COMMANDS
    if command.program == "attnbench"
    and command.arguments[0] not in ASKING
    and any("=" in item for item in command.arguments)
]
ON_LAPTOPS = [command for command in MEASURING if command.what == "Laptop"]
ON_GPUS = [command for command in MEASURING if command.what != "Laptop"]
WITH_OWN_FILES = "docs/extending.md"
"""A page whose commands need the files that it shows."""
QUICK = {
    "README.md attnbench model=tiny attention=naive,sdpa seq_len=128,512": (
        "task.warmup_steps=1",
        "task.measure_steps=2",
    ),
    "docs/splitting_sequences.md attnbench sweeps=flop_balance": (),
}
"""Commands that are run, and not only planned, and how to measure few passes with them."""


def test_there_are_many() -> None:
    assert len(COMMANDS) > 60
    assert len(ON_LAPTOPS) > 20


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_what_it_needs_is_said(command: Command) -> None:
    """And of measuring on a laptop, how long it takes."""
    assert command.needs, "no line such as *1 GPU:* above its block"
    assert not (command in ON_LAPTOPS and not command.needs["minutes"])


def planned(command: Command, results: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``plan=true`` prints, in one line."""
    arguments = [item for item in command.arguments if not item.startswith(("results=", "plan="))]
    request = compose_request([*_without_folder(arguments), f"results={results}", "plan=true"])
    assert run_request(request) == 0
    return " ".join(capsys.readouterr().out.split())


def _without_folder(arguments: list[str]) -> list[str]:
    """The page names a folder of the reader's own, and a preset in it that is a copy of ours."""
    if "--config-dir" not in arguments:
        return arguments
    place = arguments.index("--config-dir")
    rest = arguments[:place] + arguments[place + 2 :]
    return [item.replace("=mine", "=example_cluster") for item in rest]


@pytest.mark.parametrize(
    "command", [item for item in ON_LAPTOPS if item.page != WITH_OWN_FILES], ids=str
)
def test_laptops_take_as_long_as_said(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    with_gpus(monkeypatch, 0)
    said = planned(command, tmp_path, capsys)
    times = re.search(r"predicted time ([\d.]+) min(?:, and up to ([\d.]+) min)?", said)
    assert times, said
    assert command.needs
    assert sum(map(float, filter(None, times.groups()))) <= int(command.needs["minutes"])


@pytest.mark.parametrize("command", QUESTIONS, ids=str)
def test_questions_can_be_asked(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and choices exist, and a laptop needs no GPU for what it predicts."""
    with_gpus(monkeypatch, int(command.needs["gpus"] or 0) if command.needs else 0)
    name, *arguments = command.arguments
    assert asked(name, arguments).question.gpus >= 1


@pytest.mark.parametrize("command", ON_GPUS, ids=str)
def test_gpus_suffice(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Choices and scales exist, and no case needs more GPUs than are said."""
    assert command.needs
    with_gpus(monkeypatch, int(command.needs["gpus"] or 8))
    said = planned(command, tmp_path, capsys)
    assert "to measure on cuda" in said


def with_gpus(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let launchers find so many GPUs on this host."""
    found: dict[str, Any] = {"names": ["NVIDIA H200"] * number, "reason": "this host has none"}
    found["memory_bytes"] = [2**37] * number
    monkeypatch.setattr(local, "probe_cuda", lambda: found)


@pytest.mark.parametrize("quick", QUICK)
def test_quick_ones_run(quick: str, tmp_path: Path) -> None:
    """As they stand, in one round of few passes."""
    (command,) = [item for item in COMMANDS if str(item) == quick]
    once = [*command.arguments, *QUICK[quick], "until=rounds", "interleave=1", "device=cpu"]
    done = run_program("attnbench", [*once, f"results={tmp_path}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("sweeps/*/report.md"))


def test_commands_with_files_of_the_page(tmp_path: Path) -> None:
    """Modules and a model of one's own, in a folder, with the variables that the page exports."""
    page = (ROOT / WITH_OWN_FILES).read_text(encoding="utf-8")
    for name, text in re.findall(r"^```python\n# (outer/\w+\.py)\n(.*?)^```$", page, _BLOCKS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    ((name, text),) = re.findall(r"`([\w/]+\.yaml)`:\n\n```yaml\n(.*?)^```$", page, _BLOCKS)
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    (plugins,) = re.findall(r"^export .*ATTNBENCH_PLUGINS=(\S+)$", page, re.MULTILINE)
    variables = {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
        "ATTNBENCH_PLUGINS": plugins,
    }
    commands = [item for item in COMMANDS if item.page == WITH_OWN_FILES]
    assert len(commands) == 2
    for command in commands:
        arguments = [*command.arguments, "plan=true", "device=cpu"]
        done = run_program("attnbench", arguments, cwd=tmp_path, **variables)
        assert "2 of 2 cases to measure" in done.stdout, done.stderr


_BLOCKS = re.MULTILINE | re.DOTALL


def run_the_port(group: dist.ProcessGroup, code: str) -> list[int]:
    """The program on these ranks, which have met already."""
    names: dict[str, Any] = {}
    exec(compile(code, "check_port.py", "exec"), names)
    return list(names["o"].shape)


def test_the_port_of_ring_flash_attention_checks_itself() -> None:
    """On ranks of gloo: it compares its results with one process by itself."""
    page = (ROOT / "docs/ring_flash_attention.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(# check_port.*?)^```$", page, _BLOCKS)
    own = "".join(line for line in code.splitlines(keepends=True) if "process_group(" not in line)
    assert own.count("assert_close") == 2
    assert on_ranks(4, run_the_port, own) == [[8, 4, 16]] * 4


COMPARISONS = {
    item.arguments: item
    for item in COMMANDS
    if item.program == "attnbench-compare" and "--in" in item.arguments
}


@pytest.mark.parametrize("arguments", COMPARISONS, ids=shlex.join)
def test_comparisons_show_rows(arguments: tuple[str, ...]) -> None:
    """Of committed results; a quickstart of one's own stands for what the reader has measured."""
    own = str(ROOT / "results/cpu-2core")
    found = [own if item == "results/local" else item for item in arguments]
    done = run_program("attnbench-compare", found)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ cases: ", done.stdout)


def test_flags_of_comparisons_exist() -> None:
    named = [item for item in COMMANDS if item.program == "attnbench-compare"]
    flags = {word for item in named for word in item.arguments if word.startswith("--")}
    said = run_program("attnbench-compare", ["--help"]).stdout
    assert len(flags) >= 3
    assert not [flag for flag in flags if flag not in said]


def run_program(
    program: str, arguments: list[str], *, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    module, _, function = SCRIPTS[program].partition(":")
    code = f"import sys, {module}; sys.exit({module}.{function}())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
