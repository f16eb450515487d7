"""What users type that cannot be: one line that names the key or the file, before anything runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from announced import announced, manifest

from harness.cases.sweep import load_sweep
from harness.paths import SWEEPS
from harness.request.compose import compose_request

POINT = ("task=attention", "attention=naive", "device=cpu")


def refused(*arguments: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        compose_request(arguments)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("batch_size=10000000000", "must be at most 1,048,576"),
        ("seq_len=99999999999999999999", "must be at most 4,611,686,018,427,387,904"),
        ("seed=99999999999999999999999", "must be at most"),
        ("task.head_dim=99999999999999999999", "must be at most"),
        ("seed=-99999999999999999999", "must be at most"),
        ("seq_len='???'", "Missing mandatory value"),
        ("task.num_heads='???'", "Missing mandatory value"),
        ("timeout_s=nan", "must be a finite number"),
        ("budget_s=nan", "must be a finite number"),
        ("launcher.vote_timeout_s=inf", "must be a finite number"),
    ],
)
def test_sizes_that_nothing_has(typed: str, why: str) -> None:
    line = refused(*POINT, typed)
    assert line.startswith(typed.partition("=")[0])
    assert why in line


@pytest.mark.parametrize(
    "typed",
    [
        ("model=tiny", "parallel=ddp_bucketed", "parallel.dp=100000"),
        ("task=collectives", "task.ranks=100000"),
    ],
)
def test_more_ranks_than_a_host_has_memory_for(typed: tuple[str, ...]) -> None:
    line = refused(*typed, "device=cpu")
    assert line.startswith(f"{typed[-1]}: 100,000 processes need")


def test_a_time_limit_may_be_none() -> None:
    assert compose_request([*POINT, "timeout_s=inf"]).options.timeout_s == math.inf


@pytest.mark.parametrize("predicted_s", [1e20, math.inf])
def test_a_case_that_is_predicted_to_take_for_ever(predicted_s: float, tmp_path: Path) -> None:
    """It begins, and has its time limit."""
    with announced(tmp_path, ["case-1"], predicted_s):
        assert math.isfinite(manifest(tmp_path).predicted_s[0][0])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tables: 5", "tables must be a list of names"),
        ("figures: [1]", "figures must be a list of names"),
        ("title: 7", "title must be text"),
        ("about: [x]", "about must be text"),
        ("isolate: 2", "isolate: 2: must be true or false"),
        ("interleave: many", "interleave: many: must be a number of rounds"),
        ("interleave: 0", "interleave: 0: must be a number of rounds"),
        ("budget_s: .nan", "budget_s: nan: must be a number of seconds"),
        ("until: [decided]", "until: ['decided']: one of rounds, decided"),
        ("7: 8", "unknown key 7"),
        ("scales: {tiny: [{5: 6}]}", "scales.tiny must be a list of mappings"),
        ("scales: {tiny: [{model: {a: b}}]}", "scales.tiny must be a list of mappings"),
        ("scales: {tiny: [{seq_len: [[1]]}]}", "scales.tiny must be a list of mappings"),
        ("[" * 5000, "not valid YAML"),
    ],
)
def test_sweeps_of_the_wrong_type(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    scales = "" if "scales" in text or "[[[" in text else "\nscales: {tiny: [{}]}"
    path.write_text(text + scales)
    line = refused(f"sweeps={path}")
    assert line.startswith(f"{path}: ")
    assert why in line


def test_a_sweep_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert refused(f"sweeps={path}").startswith(f"{path}: not valid YAML")


def test_every_sweep_of_the_project_is_still_read() -> None:
    for path in SWEEPS.glob("*.yaml"):
        assert load_sweep(path.stem).scales
