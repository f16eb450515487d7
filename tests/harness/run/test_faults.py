"""Failures of a case, a rank or a worker, and the records that they leave.

Every test runs the real command on one CPU; see :mod:`tests.support.fault_folders`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Command
from fault_folders import STEP, Folder, Limits
from ranks import on_ranks

SINGLE = {
    "naive": "ok",
    "fault_raise": "failed",
    "fault_raise_late": "failed",
    "fault_oom": "oom",
    "fault_oom_host": "oom",
    "fault_wrong": "wrong",
    "fault_nan": "wrong",
    "fault_unsupported": "unsupported",
    "fault_sigkill": "failed",
    "fault_segfault": "failed",
    "fault_exit": "failed",
    "witness": "ok",
}
"""The last case works: every fault before it has been overcome."""

TWO_RANKS = {
    "naive": "ok",
    "fault_raise_rank1": "failed",
    "fault_oom_rank1": "oom",
    "fault_raise_rank1_late": "failed",
    "fault_sigkill_rank1_late": "failed",
}

TIMED_OUT = {
    "fault_hang": "timeout",
    "fault_hang_rank1": "failed",
    "fault_oom_rank1_late": "oom",
    "witness": "ok",
}
"""Faults that a time limit ends, on one rank and on two."""

VOTE_TIMEOUT_S = 60.0
"""The default, which no healthy vote comes near."""


@dataclass(kw_only=True, slots=True)
class Ended:
    """A folder and the command that ran there."""

    folder: Folder
    done: subprocess.CompletedProcess[str]
    records: dict[str, dict[str, Any]]

    @property
    def statuses(self) -> dict[str, str]:
        return {name: record["status"] for name, record in self.records.items()}


def run(
    path: Path, command: Command, *grids: dict[str, Any], arguments: Sequence[str] = ()
) -> Ended:
    folder = Folder(path=path, command=command, grids=[STEP | grid for grid in grids])
    done = folder.run(*arguments)
    return Ended(folder=folder, done=done, records=folder.records())


@pytest.fixture(scope="module")
def single(
    tmp_path_factory: pytest.TempPathFactory, command: Command, waiting: Future[Ended]
) -> Ended:
    return run(tmp_path_factory.mktemp("single"), command, {"attention": list(SINGLE)})


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, command: Command) -> Ended:
    return run(
        tmp_path_factory.mktemp("two"),
        command,
        {
            "attention": ["naive", "fault_raise_rank1", "fault_oom_rank1"],
            "parallel": "ddp_bucketed",
        },
        # Without a collective in the step.
        {
            "attention": "fault_raise_rank1_late",
            "parallel": "ddp_torch",
            "task.mode": "forward",
            "task.warmup_steps": 3,
        },
        {"attention": "fault_sigkill_rank1_late", "parallel": "ddp_bucketed"},
    )


@pytest.fixture(scope="module")
def limits(two_ranks: Ended) -> Limits:
    """From the first case of fresh workers, as those that follow a fault are."""
    return Limits(healthy_s=two_ranks.records["naive"]["wall_s"])


@pytest.fixture(scope="module")
def waiting(
    tmp_path_factory: pytest.TempPathFactory, command: Command, limits: Limits
) -> Iterator[Future[Ended]]:
    """The sweep that time limits end, which leaves its cores to the tests of the others."""
    one, *two = TIMED_OUT
    with ThreadPoolExecutor() as pool:
        yield pool.submit(
            run,
            tmp_path_factory.mktemp("timed_out"),
            command,
            {"attention": one},
            {"attention": two, "parallel": "ddp_bucketed"},
            arguments=limits.arguments(),
        )


@pytest.fixture(scope="module")
def timed_out(waiting: Future[Ended]) -> Ended:
    return waiting.result()


def without_marks(cell: str) -> float:
    """The time in a cell, which a busy machine may have disturbed."""
    return float(cell.rstrip("†‡§‖◇"))


class TestOneRank:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, single: Ended) -> None:
        assert single.statuses == SINGLE

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fault_raise", "ValueError: this backend always raises"),
            ("fault_oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 PiB."),
            ("fault_unsupported", "the test says so"),
            ("fault_exit", "the worker exited with code 7 while checking"),
        ],
    )
    def test_messages(self, single: Ended, name: str, message: str) -> None:
        assert single.records[name]["error"]["message"] == message

    @pytest.mark.parametrize(
        ("name", "number", "signal_name"),
        [("fault_sigkill", 9, "SIGKILL"), ("fault_segfault", 11, "SIGSEGV")],
    )
    def test_a_signal_is_named(
        self, single: Ended, name: str, number: int, signal_name: str
    ) -> None:
        message = single.records[name]["error"]["message"]
        assert f"killed by signal {number} ({signal_name}" in message
        assert message.endswith("while checking")

    def test_a_segfault_keeps_the_stack_that_the_worker_printed(self, single: Ended) -> None:
        assert "in _segfault" in single.records["fault_segfault"]["error"]["log"]

    def test_an_error_says_where(self, single: Ended) -> None:
        early = single.records["fault_raise"]["error"]
        late = single.records["fault_raise_late"]["error"]
        assert (early["stage"], early["rank"]) == ("checking", 0)
        assert (late["stage"], late["rank"]) == ("warm-up", 0)
        assert "and says more on a second line" in early["traceback"]

    def test_host_memory_is_memory_too(self, single: Ended) -> None:
        assert "can't allocate memory" in single.records["fault_oom_host"]["error"]["message"]

    @pytest.mark.parametrize(
        ("name", "words"),
        [("fault_wrong", "against float64"), ("fault_nan", "every element has to be finite")],
    )
    def test_a_wrong_result_has_no_times(self, single: Ended, name: str, words: str) -> None:
        record = single.records[name]
        assert record["phases"] == {}
        assert words in record["error"]["message"]

    def test_wrong_by_how_much(self, single: Ended) -> None:
        errors = single.records["fault_wrong"]["check"]["errors"]
        assert errors["o"] == pytest.approx(0.01, rel=1e-3)
        assert errors["o"] > single.records["fault_wrong"]["check"]["tolerance"]

    def test_cells_of_the_table(self, single: Ended) -> None:
        table = single.folder.table()
        words = {
            "failed": "failed",
            "oom": "OOM",
            "wrong": "wrong result",
            "unsupported": "unsupported",
        }
        for name, status in SINGLE.items():
            if status == "ok":
                assert without_marks(table[name][0]) > 0
            else:
                assert table[name][0] == words[status]
                assert set(table[name][1:]) <= {words[status], "–"}  # noqa: RUF001

    def test_exit_code_and_summary(self, single: Ended) -> None:
        """Out of memory and unsupported are results; the others are failures."""
        assert single.done.returncode == 1
        assert "12 cases: 2 ok, 5 failed, 2 oom, 2 wrong, 1 unsupported" in (
            " ".join(single.done.stdout.split())
        )
        assert single.done.stderr.splitlines() == [
            "attnbench: 7 of 12 cases failed; the report says why, retry=true measures them again"
        ]

    def test_the_report_tells_every_reason(self, single: Ended) -> None:
        (report,) = single.folder.results.glob("sweeps/*/report.md")
        text = report.read_text(encoding="utf-8")
        for words in ("always raises", "killed by signal 9", "the test says so"):
            assert words in text

    def test_a_second_run_measures_nothing(self, single: Ended) -> None:
        before = single.folder.files()
        again = single.folder.run()
        assert single.folder.files() == before
        assert again.returncode == 1
        assert ": 12 cases, recorded already; " in again.stdout
        assert again.stderr == single.done.stderr


class TestRetry:
    def test_only_failed_cases_as_new_files(self, tmp_path: Path, command: Command) -> None:
        folder = Folder(path=tmp_path, command=command, grids=[STEP])
        attention = "attention=fault_flaky,fault_oom,fault_unsupported,fault_wrong,naive"
        (tmp_path / "broken").touch()
        assert folder.run(attention).returncode == 1
        before = folder.files()
        assert len(before) == 5

        (tmp_path / "broken").unlink()
        again = folder.run(attention, "retry=true")
        after = folder.files()
        assert {name: after[name] for name in before} == before
        second = {name: json.loads(after[name][1]) for name in after if name not in before}
        by_backend = {item["case"]["attention"]["name"]: item for item in second.values()}
        assert {name: item["status"] for name, item in by_backend.items()} == {
            "fault_flaky": "ok",
            "fault_wrong": "wrong",
        }
        assert all(item["attempt"] == 2 for item in second.values())
        assert all(name.endswith(".2.json") for name in second)
        assert again.returncode == 1
        # The newest attempt counts.
        assert without_marks(folder.table()["fault_flaky"][0]) > 0


class TestTwoRanks:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, two_ranks: Ended) -> None:
        assert two_ranks.statuses == TWO_RANKS
        assert two_ranks.done.returncode == 1

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("fault_raise_rank1", "rank 1: ValueError: this backend always raises"),
            ("fault_oom_rank1", "rank 1: OutOfMemoryError: CUDA out of memory."),
            ("fault_sigkill_rank1_late", "rank 1 was killed by signal 9 (SIGKILL"),
        ],
    )
    def test_the_guilty_rank_is_named(self, two_ranks: Ended, name: str, message: str) -> None:
        assert two_ranks.records[name]["error"]["message"].startswith(message)

    def test_a_vote_that_all_take_part_in_waits_for_nothing(self, two_ranks: Ended) -> None:
        assert two_ranks.records["fault_raise_rank1"]["wall_s"] < VOTE_TIMEOUT_S

    def test_a_rank_that_fails_in_a_step_meets_the_others_at_the_next(
        self, two_ranks: Ended
    ) -> None:
        """Without a collective in the step, the healthy rank is in the next step's barrier."""
        record = two_ranks.records["fault_raise_rank1_late"]
        assert record["error"]["message"] == "rank 1: ValueError: this backend always raises"
        assert record["wall_s"] < VOTE_TIMEOUT_S

    def test_samples_of_both_ranks(self, two_ranks: Ended) -> None:
        record = two_ranks.records["naive"]
        for phase in ("forward", "backward", "optimizer", "step"):
            samples = record["phases"][phase]["samples_ms"]
            assert [len(rank) for rank in samples] == [2, 2]
            assert samples[0] != samples[1]
            assert all(sample > 0 for rank in samples for sample in rank)
        assert len(record["memory"]) == 2
        assert record["case"]["parallel"]["dp"] == 2

    def test_the_loss_is_that_of_an_untrained_model(self, two_ranks: Ended) -> None:
        """About log of the vocabulary's 16 entries."""
        assert two_ranks.records["naive"]["notes"]["loss"] == pytest.approx(2.77, abs=1)


class TestTimeLimits:
    def test_every_fault_becomes_a_record_and_the_sweep_goes_on(self, timed_out: Ended) -> None:
        assert timed_out.statuses == TIMED_OUT

    def test_messages(self, timed_out: Ended, limits: Limits) -> None:
        messages = {
            "fault_hang": f"exceeded timeout_s={limits.case_s:g} (while checking)",
            "fault_hang_rank1": "no answer to the other ranks' vote from rank 1 (in checking)",
        }
        found = {name: timed_out.records[name]["error"]["message"] for name in messages}
        assert found == messages

    def test_a_peer_in_an_all_reduce_does_not_hide_what_happened(self, timed_out: Ended) -> None:
        """It sees the other rank disappear, which has waited for its vote in vain."""
        message = timed_out.records["fault_oom_rank1_late"]["error"]["message"]
        assert message.startswith("rank 1: OutOfMemoryError: CUDA out of memory.")

    def test_a_hang_ends_at_its_limit(self, timed_out: Ended, limits: Limits) -> None:
        """Not before; that it ended at this one and no other is in its message."""
        assert timed_out.records["fault_hang"]["wall_s"] >= limits.case_s
        assert timed_out.records["fault_hang_rank1"]["wall_s"] >= limits.vote_s

    def test_cells_of_the_table(self, timed_out: Ended) -> None:
        assert "timeout" in timed_out.folder.table()["fault_hang"]


def _gradients_of_rank(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
    """Gradients of the rank's part of the batch, through the strategy."""
    from parallel import STRATEGIES

    entry = STRATEGIES["ddp_torch"]
    strategy = entry.target(name=entry.name, **{**entry.preset, "dp": dist.get_world_size(group)})
    model, tokens, targets = _model_and_batch()
    wrapped = strategy.wrap(model)
    own = slice(dist.get_rank(group), dist.get_rank(group) + 1)
    _loss(wrapped, tokens[own], targets[own]).backward()
    strategy.after_backward(model)
    return [parameter.grad for parameter in model.parameters()]


def _model_and_batch() -> tuple[Any, torch.Tensor, torch.Tensor]:
    from kernels import BACKENDS
    from models.config import ModelConfig
    from models.transformer import Transformer

    torch.manual_seed(3)
    sizes = {"vocab_size": 19, "d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    attention = BACKENDS["naive"].target(name="naive")
    device = torch.device("cpu")
    model = Transformer(ModelConfig(name="test", **sizes), attention, device=device)
    tokens, targets = torch.randint(19, (2, 4, 12))
    return model, tokens, targets


def _loss(model: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, torch.arange(tokens.shape[1]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_gradients_of_four_ranks_are_those_of_one_process() -> None:
    model, tokens, targets = _model_and_batch()
    _loss(model, tokens, targets).backward()
    for gradients in on_ranks(4, _gradients_of_rank):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad)
