"""Flags of the command: what each prints, and one line for what has no meaning here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from harness import __version__
from harness.commands.attnbench import main
from harness.commands.flags import configuration, run_flags


def refused(*arguments: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        run_flags(arguments)
    (line,) = str(caught.value).splitlines()
    return line


def code_and_lines(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    monkeypatch.setattr("sys.argv", ["attnbench", *arguments])
    code = main()
    return code, capsys.readouterr().err.splitlines()


def test_the_version_is_the_projects(capsys: pytest.CaptureFixture[str]) -> None:
    run_flags(["--version"])
    assert re.fullmatch(
        rf"attnbench {re.escape(__version__)} \(Hydra [\d.]+\)\n", capsys.readouterr().out
    )


class TestConfiguration:
    def test_values_of_the_command_line(self) -> None:
        found = yaml.safe_load(configuration(["model=tiny", "seq_len=64"], None, resolve=False))
        assert (found["model"]["name"], found["seq_len"]) == ("tiny", 64)

    def test_a_part(self) -> None:
        found = yaml.safe_load(configuration(["model=tiny"], "model", resolve=False))
        assert found["d_model"] == 128

    def test_a_sweep_shows_its_grids_and_what_they_leave_open(self) -> None:
        text = configuration(
            ["sweeps=head_dim_and_gqa", "scale=tiny", "seq_len=64", "device=cpu"],
            None,
            resolve=False,
        )
        first, grids, rest = re.split(r"^#.*\n", text, flags=re.M)
        assert not first
        (grid,) = yaml.safe_load(grids)
        assert grid["attention"] == ["naive", "flash_torch", "sdpa"]
        assert grid["seq_len"] == 64
        assert "device" not in grid
        assert yaml.safe_load(rest)["device"] == "cpu"

    def test_the_scale_of_a_sweep_follows_the_device(self) -> None:
        small = configuration(["sweeps=quickstart", "device=cpu"], None, resolve=False)
        assert small.startswith("# sweeps=quickstart, scale tiny: ")


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (
            "--cfg job attention=naive,sdpa",
            "--cfg job: shows one configuration; give attention one value",
        ),
        (
            "--cfg job sweeps=quickstart seq_len=64,128",
            "--cfg job: shows one configuration; give seq_len one value",
        ),
        (
            "--info all attention=naive,sdpa",
            "--info: shows one configuration; give attention one value",
        ),
        ("--cfg job --package nowhere", "--package nowhere: no such part of the configuration"),
        ("--package model", "--package: goes with --cfg job; leave it out to run cases"),
        ("--resolve", "--resolve: goes with --cfg job; leave it out to run cases"),
        (
            "--config-name mine",
            "--config-name: attnbench has one configuration; add files to it with --config-dir DIR",
        ),
        (
            "-cp conf",
            "--config-path: attnbench has one configuration; add files to it with --config-dir DIR",
        ),
        ("--model tiny", "--model: no such flag; write model=tiny"),
        (
            "--cfg job sweeps=quickstart,windows",
            "--cfg job: shows one configuration; give sweeps one value",
        ),
        (
            "--cfg job --package model.name",
            "--package model.name: is the value small and no part; leave out the last name",
        ),
        (
            "--shell-completion",
            "--shell-completion: write --shell-completion install=bash, zsh or fish",
        ),
        ("--", "--: marks the end of flags, which needs no mark here; leave it out"),
    ],
)
def test_what_has_no_meaning_is_one_line(typed: str, line: str) -> None:
    assert refused(*typed.split()) == line


@pytest.mark.parametrize(
    "typed", ["--info=nix", "--cfg=nix", "--cfg job attention=nix", "--cfg job sweeps=nix"]
)
def test_values_that_there_are_not(typed: str) -> None:
    assert "nix" in refused(*typed.split())


def test_a_mistyped_choice_is_one_of_the_group() -> None:
    assert refused("--cfg", "job", "model=smal").startswith(
        "model=smal: no such choice (did you mean small?); there are "
    )


def test_a_mistyped_size_of_a_sweep() -> None:
    said = refused("--cfg", "job", "sweeps=quickstart", "scale=tinny")
    assert said.startswith("scale=tinny: must be one of ")
    assert said.endswith(" (did you mean tiny?)")


def test_a_mistake_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = code_and_lines(["--cfg", "job", "attention=naive,sdpa"], monkeypatch, capsys)
    assert code == 2
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("quickstart", "attnbench: quickstart: a sweep; write sweeps=quickstart"),
        ("backend", "attnbench: backend: write attnbench backends"),
        ("compare", "attnbench: compare: write attnbench-compare A B"),
        ("nonsense", "attnbench: nonsense: write KEY=VALUE or KEY=VALUE,VALUE"),
        ("results=/dev/null", "attnbench: results=/dev/null: is a file; must be a folder"),
        (
            "results=/dev/null/x",
            "attnbench: results=/dev/null/x: /dev/null is a file; must be a folder",
        ),
        ("help", "attnbench: help: write attnbench --help"),
        ("quick", "attnbench: quick: did you mean sweeps=quickstart?"),
        (
            "seq_len=64,,128",
            "attnbench: seq_len=64,,128: a comma without a value beside it; write KEY=VALUE or "
            "KEY=VALUE,VALUE",
        ),
        (
            "results=a,b",
            "attnbench: results: takes one value; quote a folder whose name holds a comma: "
            "'results=\"a,b\"'",
        ),
        (
            "hydra/sweeper=basic",
            "attnbench: hydra/sweeper: Hydra only composes here; its own settings have no effect; "
            "leave it out",
        ),
        ("task@x=attention", "attnbench: task@x: a choice has one place here; write task="),
        (
            "scale=tiny",
            "attnbench: scale=tiny: is a size of a sweep; add sweeps=NAME, or leave it out",
        ),
    ],
)
def test_words_that_are_no_keys(
    typed: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [typed, "model=tiny", "device=cpu", "plan=true"]
    assert code_and_lines(arguments, monkeypatch, capsys) == (2, [line])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("attention=flash", "flash_triton"),
        ("attention=zigzg", "zigzag"),
        ("task=atention", "attention"),
        ("sweeps=quickstar", "quickstart"),
        ("model=smal", "small"),
        ("attention=falsh", "flash_triton"),
        ("attention=NAIVE", "naive"),
        ("parallel=FSDP", "fsdp"),
    ],
)
def test_what_was_meant(
    typed: str, meant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (line,) = code_and_lines([typed], monkeypatch, capsys)
    assert code == 2
    assert line.startswith(f"attnbench: {typed}: no such ")
    assert f"(did you mean {meant}?)" in line


def test_a_path_may_hold_any_sign(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    results = "results=~/a b (ü) 50% 'q'"
    arguments = ["task=attention", "attention=naive", "device=cpu", "task.num_heads=1"]
    arguments += ["seq_len=16", "task.warmup_steps=0", "task.measure_steps=1", results]
    monkeypatch.setattr("sys.argv", ["attnbench", *arguments])
    assert main() == 0
    assert list((tmp_path / "a b (ü) 50% 'q'" / "records").glob("*.json"))
