"""Times a sweep of 10,000 cases on a cluster's login node: planning, submitting, status.

Run as ``python -m benchmarks.bench_cluster`` in the repository. The cases are planned, packed and
submitted as arrays to a simulated Slurm, whose commands are scripts that answer at once; half of
the tasks get simulated records, and status is asked. Goals: planning and submitting under 30 s,
status under 2 s, each under 1 GiB of memory; and reading while hundreds of tasks write never fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness.cases.case import Case
from harness.run.run_folder import TaskState, runs_of
from harness.store.heads import read_heads
from harness.store.record import Phase, Record, RecordStore

NUM_CASES = 10_000

SCRIPTS = {
    "sbatch": "echo Submitted batch job 70",
    "srun": "exit 0",
    "sinfo": "echo gpu",
    "scontrol": "echo MaxArraySize = 1001",
    "scancel": "exit 0",
    "sacct": "exit 0",
    "squeue": 'cat "$FAKE_QUEUE"',
}

_MEASURED = """
import resource, runpy, sys, time
started = time.perf_counter()
sys.argv = sys.argv[1:]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
seconds = time.perf_counter() - started
peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(f"{seconds} {peak_mib}", file=sys.stderr)
"""


def measured(module: str, *arguments: str) -> tuple[float, float]:
    """Seconds and peak MiB of one command."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, module, *arguments],
        check=True,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    seconds, peak_mib = done.stderr.strip().splitlines()[-1].split()
    return float(seconds), float(peak_mib)


def fake_slurm(folder: Path) -> None:
    """Put commands on the path that answer as a cluster would."""
    for name, body in SCRIPTS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ["FAKE_QUEUE"] = str(folder / "queue")


def command(results: Path) -> list[str]:
    lengths = ",".join(str(64 * index) for index in range(1, 126))
    keys = ["launcher=slurm", "task=attention", "attention=naive,compiled,sdpa,flex,sdpa_flash"]
    values = ["precision=fp32,bf16", f"seq_len={lengths}", "batch_size=1,2", "seed=0,1"]
    return [*keys, *values, "task.head_dim=64,128", "device=cuda", f"results={results}"]


def record_of(case_id: str, case: Case, status: str = "ok") -> Record:
    """A record of usual length: a hundred passes of three phases."""
    samples = [1.0 + index / 1000 for index in range(100)]
    return Record(
        case_id=case_id,
        case=case.to_dict(),
        status=status,
        error={"message": "OutOfMemoryError: CUDA out of memory."} if status != "ok" else None,
        phases={
            name: Phase(clock="cuda_event", samples_ms=[samples])
            for name in ("forward", "backward", "forward_backward")
        },
        environment={"device_name": "NVIDIA H200", "torch": "2.11.0", "driver": "580.1"},
        wall_s=2.0,
    )


def simulate(results: Path) -> None:
    """Half of the cases have records; the other tasks run, each at its first case."""
    store = RecordStore(results)
    ((folder, run),) = runs_of(results)
    lines = []
    for index, job in enumerate(run.jobs):
        if index < len(run.case_ids) // 2:
            cases, _, _ = folder.read_share(index)
            for case_id, case in zip(run.case_ids[index], cases, strict=True):
                record = record_of(case_id, case, "oom" if case.seed else "ok")
                store.path(case_id, 1).write_text(record.to_json(), encoding="utf-8")
            continue
        assert job is not None
        array, _, task = job.partition("_")
        lines.append(f"{array}|{task or 'N/A'}|RUNNING|node{index}|None")
        state = TaskState(job=job, node=f"node{index}", case_id=run.case_ids[index][0])
        folder.write_state(index, state)
    Path(os.environ["FAKE_QUEUE"]).write_text("\n".join(lines), encoding="utf-8")


def write_records(results: str, writers: range, stop_s: float) -> int:
    """Write states and records as a cluster's tasks do; returns the number of records."""
    store = RecordStore(Path(results))
    ((folder, _),) = runs_of(store.results)
    case = folder.read_share(0)[0][0]
    number = 0
    while time.time() < stop_s:
        for writer in writers:
            case_id = f"simulated-{number:06d}-{writer:010x}"
            folder.write_state(NUM_CASES + writer, TaskState(case_id=case_id))
            store.write(record_of(case_id, case))
            number += 1
    return number


def read_while_writing(results: Path, num_tasks: int = 200) -> tuple[int, int]:
    """Read while processes write as ``num_tasks`` tasks do; numbers of records and readings."""
    store = RecordStore(results)
    ((folder, _),) = runs_of(results)
    stop_s = time.time() + 15
    shares = [range(first, num_tasks, 4) for first in range(4)]
    readings = 0
    with ProcessPoolExecutor(max_workers=len(shares)) as pool:
        writers = [pool.submit(write_records, str(results), share, stop_s) for share in shares]
        while time.time() < stop_s:
            heads, problems = read_heads(store)
            assert heads, "no record is readable"
            assert not problems, problems[0]
            for task in range(num_tasks):
                folder.read_state(NUM_CASES + task)
            readings += 1
        written = sum(writer.result() for writer in writers)
    records, problems = store.load()
    assert not problems, problems[0]
    assert sum(name.startswith("simulated-") for name in records) == written
    return written, readings


def show(name: str, seconds: float, goal_s: float, peak_mib: float) -> None:
    met = "met" if seconds < goal_s and peak_mib < 1024 else "MISSED"
    print(f"{name:<34} {seconds:7.2f} s {goal_s:5.0f} s {peak_mib:8.0f} MiB  {met}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        results = Path(name) / "results"
        fake_slurm(Path(name))
        print(f"{'':<34} {'took':>9} {'goal':>7} {'memory':>12}")
        show(
            "plan and submit 10,000 cases", *_with_goal(measured("harness", *command(results)), 30)
        )
        ((_, run),) = runs_of(results)
        assert sum(map(len, run.case_ids)) == NUM_CASES
        simulate(results)
        show(
            "status of 10,000 cases",
            *_with_goal(measured("harness.commands.status", str(results)), 2),
        )
        done = subprocess.run(
            [sys.executable, "-m", "harness.commands.status", "--json", str(results)],
            check=True,
            capture_output=True,
        )
        assert len(json.loads(done.stdout)["cases"]) == NUM_CASES
        written, readings = read_while_writing(results)
        print(f"read {readings} times while 200 tasks wrote {written:,} records; nothing failed")


def _with_goal(result: tuple[float, float], goal_s: float) -> tuple[float, float, float]:
    seconds, peak_mib = result
    return seconds, goal_s, peak_mib


if __name__ == "__main__":
    main()
