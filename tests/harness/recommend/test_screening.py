"""Candidates found by short runs: which are tried, and how many go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from questions import question

from harness.predictions.capacity import GIB, Machine
from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration, enumerate_combinations
from harness.recommend.fitting import MemoryModel, fit
from harness.recommend.measuring import Bench
from harness.recommend.screening import screen


@dataclass
class Clock:
    """A bench whose steps take what is told, and no time."""

    budget_s: float
    ms: dict[str, float]
    compiled: dict[str, float] = field(default_factory=dict)
    """As ms, where it is compiled."""
    tried: list[Combination] = field(default_factory=list)

    def screen(self, candidates: list[Combination]) -> None:
        for item in candidates:
            ms = self.compiled if item.case.compiles else self.ms
            item.measured_ms = ms[item.base.attention.name] * item.base.batch_size
        self.tried += candidates


def fitting_on(device: str, *compile: str) -> tuple[Enumeration, list[Combination]]:
    machine = Machine(
        name="host", device=device, memory_bytes=16 * GIB, num_devices=1, is_here=True
    )
    asked = question(
        "tiny",
        seq_len=64,
        gpus=1,
        sequences=4,
        precision="fp32",
        machine=machine,
        attention=["naive", "sdpa"],
        compile=["none", *compile],
    )
    found = enumerate_combinations(asked)
    return found, fit(found, machine, MemoryModel())[0]


def finalists(budget_s: float) -> tuple[Clock, list[Combination]]:
    found, fitting = fitting_on("cpu")
    clock = Clock(budget_s=budget_s, ms={"naive": 100.0, "sdpa": 90.0})
    return clock, screen(found, fitting, cast(Bench, cast(Any, clock)))


def test_a_cpu_tries_attention_on_the_smallest_micro_batch() -> None:
    clock, best = finalists(1e6)
    assert [item.base.batch_size for item in clock.tried[:2]] == [1, 1]
    # Then the fastest of them on the others.
    assert {(item.base.attention.name, item.base.batch_size) for item in clock.tried[2:]} == {
        ("sdpa", 2),
        ("sdpa", 4),
    }
    assert len(best) == 3


def test_a_gpu_tries_the_best_captured_too() -> None:
    found, fitting = fitting_on("cuda")
    clock = Clock(budget_s=1e6, ms={"naive": 100.0, "sdpa": 90.0})
    screen(found, fitting, cast(Bench, cast(Any, clock)))
    (captured,) = (item for item in clock.tried if item.is_captured)
    assert captured.base.attention.name == "sdpa"


@pytest.mark.parametrize(("budget_s", "number"), [(0.0, 1), (4.0, 1), (1e6, 3)])
def test_as_many_go_on_as_the_budget_allows(budget_s: float, number: int) -> None:
    _, best = finalists(budget_s)
    assert len(best) == number
    assert best[0].base.attention.name == "sdpa"


@pytest.mark.parametrize(("compiled", "fastest"), [(50.0, "naive"), (85.0, "sdpa")])
def test_attention_is_tried_again_in_the_best_variant(compiled: float, fastest: str) -> None:
    """What compilation gains differs from attention to attention."""
    found, fitting = fitting_on("cpu", "block")
    clock = Clock(
        budget_s=1e6,
        ms={"naive": 100.0, "sdpa": 90.0},
        compiled={"naive": compiled, "sdpa": 80.0},
    )
    best = screen(found, fitting, cast(Bench, cast(Any, clock)))
    assert best[0].case.compiles
    assert best[0].base.attention.name == fastest
    # And the winner's micro-batches, too.
    sizes = {
        item.base.batch_size
        for item in clock.tried
        if item.case.compiles and item.base.attention.name == fastest
    }
    assert sizes == {1, 2, 4}
    assert len({item.case.id for item in clock.tried}) == len(clock.tried)


def test_nothing_is_tried_again_where_the_plain_one_is_fastest() -> None:
    found, fitting = fitting_on("cpu", "block")
    clock = Clock(
        budget_s=1e6,
        ms={"naive": 100.0, "sdpa": 90.0},
        compiled={"naive": 50.0, "sdpa": 95.0},
    )
    best = screen(found, fitting, cast(Bench, cast(Any, clock)))
    assert not best[0].case.compiles
    assert sum(item.case.compiles for item in clock.tried) == 1


def test_attention_is_tried_again_before_further_variants() -> None:
    """Compilation of whole models takes long, and time may end before it."""
    found, fitting = fitting_on("cpu", "block", "model")
    clock = Clock(
        budget_s=1e6,
        ms={"naive": 100.0, "sdpa": 90.0},
        compiled={"naive": 50.0, "sdpa": 80.0},
    )
    screen(found, fitting, cast(Bench, cast(Any, clock)))
    tried = [
        (item.case.compile.scope, item.base.attention.name)
        for item in clock.tried
        if item.case.compiles
    ]
    assert tried[:2] == [("block", "sdpa"), ("block", "naive")]
    # And as the leader is now, not as it was.
    assert tried[-1] == ("model", "naive")
