"""What the harness itself costs: its help, planning, and a warm worker's overhead per case.

Run as ``python -m benchmarks.bench_harness`` in the repository. Goals: help under 1 s, 1,000
cases planned in under 5 s, overhead under 0.3 s per small CPU case.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run.runner import Runner
from harness.store.record import Record, RecordStore

REPEATS = 5


def seconds(command: list[str]) -> list[float]:
    """Wall time of a whole process, several times."""
    samples = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        samples.append(time.perf_counter() - started)
    return samples


class Stopwatch:
    """Progress that notes how long each case took beyond its measured passes."""

    def __init__(self) -> None:
        self.overheads_s: list[float] = []
        self._last = 0.0

    def started(self, case: Case) -> None:
        self._last = time.perf_counter()

    def stage(self, name: str) -> None:
        if name == "starting workers":
            self._last = float("nan")

    def finished(self, record: Record, *, measured_now: bool) -> None:
        elapsed = time.perf_counter() - self._last
        whole = record.phases.get("step") or record.phases["forward_backward"]
        self.overheads_s.append(elapsed - sum(whole.samples_ms[0]) / 1e3)


def worker_overheads() -> list[float]:
    """Overhead of each of some small cases, the first (which starts the worker) left out."""
    with tempfile.TemporaryDirectory() as folder:
        watch = Stopwatch()
        values = [f"results={folder}", "device=cpu", "attention=naive,sdpa", "seq_len=64,96,128"]
        small = ["task.warmup_steps=1", "task.measure_steps=5", "batch_size=1"]
        for task in (["task=train_step", "model=tiny"], ["task=attention", "task.num_heads=2"]):
            request = compose_request([*task, *values, *small])
            store = RecordStore(Path(folder))
            store.create()
            Runner(request.options, store, watch).run(request.cases)
        return [value for value in watch.overheads_s if value == value]


def plan_command() -> list[str]:
    lengths = ",".join(str(64 * index) for index in range(1, 26))
    keys = ["model=tiny,small,medium,large", "attention=naive,compiled,sdpa,flex,sdpa_flash"]
    values = ["precision=fp32,bf16", f"seq_len={lengths}", "device=cpu", "plan=true"]
    return [sys.executable, "-m", "harness", *keys, *values]


def show(name: str, samples: list[float], goal_s: float) -> None:
    median, worst = statistics.median(samples), max(samples)
    met = "met" if median < goal_s else "MISSED"
    print(f"{name:<42} {median:7.3f} s {worst:9.3f} s {goal_s:7.1f} s  {met}", flush=True)


def main() -> None:
    print(f"{'':<42} {'median':>9} {'largest':>11} {'goal':>9}")
    show("attnbench --help", seconds([sys.executable, "-m", "harness", "--help"]), 1.0)
    show("plan 1,000 cases", seconds(plan_command()), 5.0)
    with contextlib.redirect_stdout(io.StringIO()):
        overheads = worker_overheads()
    show("warm worker, overhead per small CPU case", overheads, 0.3)


if __name__ == "__main__":
    main()
