"""The speed of a host, from steps that waited for it and steps that did not."""

from __future__ import annotations

import pytest

from harness.forecast.steps import LaunchTime, host_speed


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
