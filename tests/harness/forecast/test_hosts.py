"""The speed of a host, from steps that waited for it and steps that did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from harness.forecast.schedule import Phase, predict
from harness.forecast.steps import LaunchTime, host_speed, launch_times


def times(*us: float, waited: bool) -> list[LaunchTime]:
    return [LaunchTime(phase="forward", us=one, waited=waited) for one in us]


def test_one_step_of_a_host_is_held_against_other_hosts() -> None:
    # The geometric mean of it and of the usual one.
    assert host_speed(times(40.0, waited=True), [10.0]) == pytest.approx(20)


def test_several_steps_outweigh_other_hosts_and_one_slow_step() -> None:
    assert host_speed(times(16.0, 17.0, 18.0, 90.0, waited=True), [20.0]) == pytest.approx(18)


def test_a_host_is_at_least_as_fast_as_steps_that_did_not_wait() -> None:
    assert host_speed([*times(30.0, waited=True), *times(12.0, waited=False)], [20.0]) == 12
    assert host_speed(times(14.0, 11.0, waited=False), [20.0]) == 11


def test_a_host_of_which_no_step_tells_is_as_fast_as_usual() -> None:
    assert host_speed([], [20.0, 5.0]) == pytest.approx(10)


def phase(name: str, device_ms: float, enqueued: float, last_ms: float = 0.0) -> Phase:
    return Phase(
        name=name,
        parts={"a": device_ms},
        errors={"a": 0.0},
        launches=1,
        enqueued=enqueued,
        last_ms=last_ms,
    )


@dataclass
class Enqueues:
    """Stands for a machine whose steps have given phases."""

    phases: list[Phase]

    def enqueued(self, case: object) -> list[Phase]:
        return self.phases


@dataclass
class Took:
    """Stands for a measured step."""

    phases_ms: dict[str, float]
    case: None = None


def told(phases: list[Phase], host_us: dict[str, float], known: dict[str, float]) -> Any:
    """What a step tells that took as long as the schedule says of a host."""
    found = predict(phases, (), host_us, 0.0, 1.0, set())
    took = cast(Any, Took({"step": found.median_ms, **found.phases_ms}))
    return {one.phase: one for one in launch_times(cast(Any, Enqueues(phases)), took, known)}


HOST = {"forward": 10.0, "backward": 20.0, "optimizer": 8.0}


def test_steps_that_wait_tell_the_host_that_they_waited_for() -> None:
    phases = [phase("forward", 3, 1000, 1), phase("backward", 5, 1000)]
    found = told([*phases, phase("optimizer", 2, 200, last_ms=2)], HOST, {})
    assert {name: one.us for name, one in found.items()} == pytest.approx(HOST)
    assert all(one.waited for one in found.values())


def test_a_host_that_was_ahead_may_be_slower_than_the_phase_was_long() -> None:
    # It had 30 of the device's 40 ms left when it began the backward pass.
    phases = [phase("forward", 40, 1000), phase("backward", 18, 1000)]
    found = told(phases, HOST, HOST)
    assert not found["backward"].waited
    assert found["backward"].us == pytest.approx(48)
    # Nor does a short optimizer tell anything, whose kernels it launched before their turn.
    assert "optimizer" not in told([*phases, phase("optimizer", 2, 200, last_ms=2)], HOST, HOST)


def test_an_optimizer_lists_its_tensors_before_its_kernels_run() -> None:
    one = phase("optimizer", 3.0, 250, last_ms=3.0)
    found = predict([one], (), HOST, 0.0, 1.0, set())
    assert found.median_ms == pytest.approx(3.0 + 250 * 8e-3)
