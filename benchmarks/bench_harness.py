"""The cost of the harness itself: its help, plans and answers, and its overhead per case and round.

Run as ``python -m benchmarks.bench_harness`` in the repository. Help, plans and answers are whole
processes. Each is compared, in CPU time and in interleaved rounds, with a process that imports
Hydra and does nothing, so that the ratio means the same on a fast machine and on a busy one.
Exits with 1 if a ratio is beyond its limit.

``python -m benchmarks.bench_harness --only rounds`` prints the CPU time of small cases alone, in
three rounds of new processes: what a process costs, and what each case of a round adds to it. The
two come from runs of few and of many cases, whose measured passes take under a millisecond.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.run.runner import Runner
from harness.store.record import Record, RecordStore

ROUNDS = 15
ROUNDS_OF_ANSWERS = 3
WORKER_GOAL_S = 0.3
TURNS = 3
FEW_CASES, MANY_CASES = 2, 42


@dataclass(kw_only=True, slots=True)
class Command:
    """A process to time."""

    name: str
    arguments: list[str]
    limit: float | None = None
    """CPU time at most, as a multiple of importing Hydra; None for what others are compared with.

    Measured on two busy cores: help 2.9, plans of a case 3.3, a thousand cases 10.4, an answer 57
    to 66. Importing pandas as well would add 2, and torch 8.
    """
    rounds: int = ROUNDS
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def time(self) -> None:
        """Run it once more."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s, wall_s = used.ru_utime + used.ru_stime, time.perf_counter()
        subprocess.run([sys.executable, *self.arguments], check=True, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.wall_s.append(time.perf_counter() - wall_s)
        self.cpu_s.append(used.ru_utime + used.ru_stime - cpu_s)


def plan(name: str, *keys: str, limit: float) -> Command:
    """A plan of a folder without records, for a CPU."""
    arguments = ["-m", "harness", *keys, "device=cpu", "results=no/such/folder", "plan=true"]
    return Command(name=name, arguments=arguments, limit=limit)


def answer(name: str, *keys: str, limit: float, results: str) -> Command:
    """A recommendation for a machine that is not here, from its committed calibration."""
    arguments = ["-m", "attnbench", "recommend", *keys, "machine=h200", "measure=false"]
    arguments.append(f"results={results}")
    return Command(name=name, arguments=arguments, limit=limit, rounds=ROUNDS_OF_ANSWERS)


def commands(results: str) -> list[Command]:
    """Hydra comes second: the others are compared with it."""
    lengths = ",".join(str(64 * index) for index in range(1, 26))
    far = ["model=llama3_8b", "seq_len=131072", "gpus=64"]
    grid = ["model=tiny,small,medium,large", "attention=naive,compiled,sdpa,flex,sdpa_flash"]
    return [
        Command(name="python", arguments=["-c", ""]),
        Command(name="import hydra, omegaconf", arguments=["-c", "import hydra, omegaconf"]),
        Command(name="attnbench --help", arguments=["-m", "harness", "--help"], limit=5),
        plan("plan of one case", limit=5),
        plan("... attention=flash_triton", "task=attention", "attention=flash_triton", limit=5),
        plan("... attention=ring", "attention=ring", "parallel.cp=2", limit=5),
        plan("... parallel=fsdp", "parallel=fsdp", limit=5),
        plan("... task=decode", "task=decode", "attention=standard", limit=5),
        plan("plan of 1,000 cases", *grid, "precision=fp32,bf16", f"seq_len={lengths}", limit=20),
        # Some 800,000 combinations, 7,200 of them with a time.
        answer("recommend for 64 GPUs", *far, limit=90, results=results),
    ]


def compare_with_hydra() -> list[str]:
    """Print the table; the names of the commands that are beyond their limit."""
    with tempfile.TemporaryDirectory() as results:
        timed = commands(results)
        for number in range(ROUNDS):
            for command in timed:
                if number < command.rounds:
                    command.time()
    print(f"{'':<28} {'CPU (s)':>8} {'wall (s)':>9} {'ratio':>7} {'limit':>6}")
    beyond = []
    for command in timed:
        # The median over rounds of the ratio within a round: load changes over minutes.
        pairs = zip(command.cpu_s, timed[1].cpu_s, strict=False)
        ratio = statistics.median(cpu_s / hydra_s for cpu_s, hydra_s in pairs)
        cpu_s, wall_s = map(statistics.median, (command.cpu_s, command.wall_s))
        limit = "" if command.limit is None else f"{command.limit:.0f}"
        print(f"{command.name:<28} {cpu_s:8.2f} {wall_s:9.2f} {ratio:7.1f} {limit:>6}", flush=True)
        if command.limit is not None and ratio > command.limit:
            beyond.append(command.name)
    return beyond


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


def cpu_s_of_rounds(num_cases: int) -> float:
    """CPU seconds of the workers that measure some small attention cases in :data:`TURNS`."""
    lengths = ",".join(str(32 + index) for index in range(num_cases))
    arguments = ["task=attention", "attention=sdpa", "task.num_heads=1", f"seq_len={lengths}"]
    arguments += ["task.warmup_steps=1", f"task.measure_steps={2 * TURNS}", "batch_size=1"]
    with tempfile.TemporaryDirectory() as folder:
        request = compose_request(
            [*arguments, "device=cpu", f"interleave={TURNS}", f"results={folder}"]
        )
        store = RecordStore(Path(folder))
        store.create()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        before_s = used.ru_utime + used.ru_stime
        Runner(request.options, store, Stopwatch()).run(request.cases)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime - before_s


def print_rounds() -> None:
    """Print the CPU time of a new process, and of a small case in one round of it."""
    # Threads that wait for each other would count as work.
    os.environ["OMP_NUM_THREADS"] = "1"
    few, many = FEW_CASES, MANY_CASES
    few_s, many_s = cpu_s_of_rounds(few), cpu_s_of_rounds(many)
    case_s = (many_s - few_s) / (many - few) / TURNS
    start_s = few_s / TURNS - few * case_s
    print(
        f"Rounds on a CPU, in CPU time: {start_s:.2f} s for the new process of each round, and "
        f"{case_s:.3f} s for each small case in it ({many} cases in {TURNS} rounds: {many_s:.1f} s)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("rounds",))
    if parser.parse_args().only:
        print_rounds()
        return 0
    beyond = compare_with_hydra()
    with contextlib.redirect_stdout(io.StringIO()):
        overheads = worker_overheads()
    print(
        f"\nA warm worker adds {statistics.median(overheads):.3f} s to a small case on a CPU "
        f"(median; largest {max(overheads):.3f} s; goal {WORKER_GOAL_S} s)"
    )
    print_rounds()
    if beyond:
        print(f"bench_harness: beyond the limit: {', '.join(beyond)}", file=sys.stderr)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
