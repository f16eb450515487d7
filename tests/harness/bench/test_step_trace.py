"""Traced steps of training leave nothing under way where the profiler stops."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.profiler import profile

from harness.bench.bench import Bench
from harness.bench.step_trace import STEPS, note_timeline


def test_steps_are_finished_before_the_profiler_moves_on() -> None:
    """Work of gloo's that ended later would end the process."""
    bench, events, move_on = Bench(device=torch.device("cpu")), [], profile.step

    def step(timer: Any) -> None:
        events.append("step")
        with timer.phase("forward"):
            torch.ones(8).sum()

    def noting(profiler: profile) -> None:
        events.append("moves on")
        move_on(profiler)

    with mock.patch.object(profile, "step", noting):
        note_timeline(bench, step, lambda: events.append("finish"))
    assert events == ["step", "finish", "moves on", *["step"] * STEPS, "finish", "moves on"]
    ((rank,),) = bench.outcome.notes["timeline"]
    assert {phase for phase, *_ in rank["spans"]} == {"forward"}
