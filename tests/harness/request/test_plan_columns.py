"""The columns of a plan: what differs between cases, in a terminal of 80 characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.request.compose import compose_request
from harness.request.plan_columns import headers_of, in_blocks, in_one_column, keys_of
from harness.request.session import run_request


def planned(*arguments: str) -> list[tuple[dict[str, list[str]], str]]:
    """The columns and the common line of each block of a command's plan."""
    request = compose_request(["plan=true", "device=cpu", *arguments])
    return [keys_of(cases) for cases in in_blocks(request.cases)]


def test_keys_in_which_cases_differ() -> None:
    ((columns, same),) = planned("model=tiny", "attention=naive,sdpa", "seq_len=16,32")
    assert columns == {
        "attention": ["naive", "naive", "sdpa", "sdpa"],
        "seq_len": ["16", "32", "16", "32"],
    }
    assert same == "task=train_step model=tiny precision=fp32 batch_size=4"


def test_options_that_a_choice_has_by_itself_are_left_out() -> None:
    ((columns, _),) = planned("model=tiny,mini")
    assert columns == {"model": ["tiny", "mini"]}


def test_a_changed_option_is_said_even_if_all_cases_have_it() -> None:
    ((columns, same),) = planned("model=tiny", "model.num_layers=3", "parallel=ddp_torch")
    assert columns == {}
    assert "model.num_layers=3" in same.split()
    assert "parallel=ddp_torch" in same.split()
    assert "parallel.dp=2" in same.split(), "the strategy's own number of ranks"
    assert "parallel.tp=1" not in same.split()


def test_what_only_some_cases_choose_is_a_column() -> None:
    ((columns, _),) = planned("model=tiny", "checkpoint=none,every_k", "compile=none,block")
    assert sorted(set(columns["checkpoint"])) == ["every_k", "none"]
    assert sorted(set(columns["compile"])) == ["block", "none"]


def test_a_block_for_each_task() -> None:
    blocks = planned("sweeps=quickstart", "scale=tiny")
    assert [same.split()[0] for _, same in blocks] == ["task=train_step", "task=attention"]


def test_a_task_without_attention_says_nothing_of_it() -> None:
    ((columns, same),) = planned("sweeps=layer_norm")
    assert list(columns) == [
        *("task.dtype", "task.input_mean", "task.input_std", "task.statistics"),
    ]
    assert "attention" not in same
    assert "seq_len" not in same


def test_headers() -> None:
    assert headers_of(["task.mode", "compile", "seq_len"]) == ["mode", "compile", "seq_len"]
    assert headers_of(["task.mode", "compile.mode"]) == ["task.mode", "compile.mode"]


def test_words_of_one_column() -> None:
    request = compose_request(["device=cpu", "model=tiny", "parallel.cp=1,2", "attention=zigzag"])
    columns, _ = keys_of(request.cases)
    assert in_one_column(request.cases, columns) == {"case": ["", "cp=2"]}


@pytest.mark.parametrize(
    "sweep", ["quickstart", "layer_norm", "strategy_scaling", "context_parallel", "roofline"]
)
def test_a_row_for_each_case_in_80_characters(
    sweep: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    request = compose_request(
        ["plan=true", "device=cpu", "scale=tiny", f"sweeps={sweep}", f"results={tmp_path}"]
    )
    assert run_request(request) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.rstrip().endswith("to measure")]
    assert len(rows) == len(request.cases)
