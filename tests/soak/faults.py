"""Faults, each one function: what it did in a few words, or None where it did not apply."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from harness.run.slurm.jobs import PREFIX
from tests.soak.checks import Checks
from tests.soak.sweep import Sweep

Fault = Callable[[Sweep, Checks, random.Random], str | None]

ENDING = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

DAY_S = 86400.0

FILLER = "filler"


def signal_command(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    if not sweep.commands:
        return None
    number = dice.choice(ENDING)
    dice.choice(sweep.commands).send_signal(number)
    return number.name


def signal_group(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """Signal all processes of a terminal, as Ctrl-C and a closed window do."""
    if not sweep.commands:
        return None
    number = dice.choice((signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
    os.killpg(dice.choice(sweep.commands).pid, number)
    return number.name


def stop_command(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    if not sweep.commands:
        return None
    command = dice.choice(sweep.commands)
    command.send_signal(signal.SIGSTOP)
    time.sleep(dice.uniform(0.1, 2))
    command.send_signal(signal.SIGCONT)
    return "SIGSTOP, SIGCONT"


def signal_worker(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """A worker is one rank; two of them have a case on two ranks."""
    workers = sweep.workers()
    if not workers:
        return None
    number = dice.choice((*ENDING, signal.SIGSEGV, signal.SIGUSR2))
    with contextlib.suppress(psutil.NoSuchProcess):
        dice.choice(workers).send_signal(number)
    return number.name


def stop_worker(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    workers = sweep.workers()
    if not workers:
        return None
    worker = dice.choice(workers)
    with contextlib.suppress(psutil.NoSuchProcess):
        worker.send_signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.1, 1))
        worker.send_signal(signal.SIGCONT)
    return "SIGSTOP, SIGCONT"


def step_clock(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """As if the clock had been stepped since a run began: its file says another time."""
    step_s = dice.choice((-1, 1)) * dice.choice((10.0, 3600.0, DAY_S))
    done = 0
    for path in sweep.results.glob("runs/*/run.json"):
        # Junk that another fault has left there has no clock.
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            values = json.loads(path.read_text(encoding="utf-8"))
            values["created_s"] += step_s
            aside = path.with_suffix(".stepped")
            aside.write_text(json.dumps(values), encoding="utf-8")
            aside.replace(path)
            done += 1
    return f"{step_s:+.0f} s" if done else None


def fill_disk(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """No room for a while: a full tmpfs where there is one, else a limit on files' sizes."""
    if os.path.ismount(sweep.path):
        filler = sweep.path / FILLER
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"\0" * size):
                        pass
        time.sleep(dice.uniform(0.2, 2))
        filler.unlink(missing_ok=True)
        return "tmpfs full"
    if not sweep.commands or sweep.slurm:
        return None
    pid = dice.choice(sweep.commands).pid
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (100, most))
        time.sleep(dice.uniform(0.2, 2))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
    return "files of 100 bytes"


def junk(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """A file of junk in a folder that commands read."""
    name = f"{dice.randrange(1 << 32):08x}"
    places = ["records/{}.json", "records/{}.tmp", "records/{}", "rounds/{}.json", "rounds/{}"]
    places += ["runs/{}/run.json", "runs/{}", "runs/{}/state-0.json", "sweeps/{}/plan.json"]
    place = dice.choice(places)
    data = dice.choice(
        (
            b"",
            b"{",
            b"null",
            b"[]",
            b"\xff\xfe\0",
            b'{"schema": 1}',
            dice.randbytes(5000),
            b"[" * 9999,
        )
    )
    # One that says where it lies, for the harness's own files have ids for names.
    data += f"\n// {name}".encode() if data and dice.random() < 0.3 else b""
    path = sweep.results / place.format(name)
    _plant(path, data, checks)
    return place.format("JUNK")


def junk_record(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """Junk, half a record or another case's record under the name of a case without one."""
    names = {path.name for path in sweep.records.glob("*.json")}
    free = [case_id for case_id in sweep.case_ids() if f"{case_id}.json" not in names]
    good = [path for path in sweep.records.glob("*.json") if path.name in checks.seen]
    if not free or not good:
        return None
    data = dice.choice(good).read_bytes()
    kind, data = dice.choice(
        (
            ("another's", data + b"\n"),
            ("half a record", data[: len(data) // 2]),
            ("zeros", b"\0" * len(data)),
        )
    )
    _plant(sweep.records / f"{dice.choice(free)}.json", data, checks)
    return kind


def strange_file(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """A FIFO, a folder, a dangling link, or a link to a device, where records lie."""
    path = sweep.records / f"strange-{dice.randrange(1 << 32):08x}.json"
    if not path.parent.is_dir():
        return None
    kind = dice.choice(("fifo", "folder", "dangling link", "endless link"))
    with contextlib.suppress(OSError):
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("nowhere" if kind == "dangling link" else "/dev/zero")
    return kind


def truncate_round(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    paths = [path for path in sweep.results.glob("rounds/*") if path.is_file()]
    if not paths:
        return None
    path = dice.choice(sorted(paths))
    with contextlib.suppress(OSError):
        os.truncate(path, int(path.stat().st_size * dice.random()))
    return "truncated"


def second_command(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    if not sweep.commands or len(sweep.commands) > 2:
        return None
    sweep.start()
    return "started"


def remove_runs(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """Somebody tidies up."""
    if sweep.slurm:
        return None
    shutil.rmtree(sweep.results / "runs", ignore_errors=True)
    return "removed"


def _plant(path: Path, data: bytes, checks: Checks) -> None:
    checks.planted.add(hashlib.sha256(data).hexdigest())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data)


def our_jobs() -> list[str]:
    """Jobs and tasks of arrays in the queue."""
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i|%j"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    return [job for job, name in rows if name.startswith(PREFIX)]


def signal_job(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """Cancelled, warned of its end, or requeued."""
    jobs = our_jobs()
    if not jobs:
        return None
    warn = ["scancel", "--signal=USR2"]
    command = dice.choice((["scancel"], warn, [*warn, "--full"], ["scontrol", "requeue"]))
    subprocess.run([*command, dice.choice(jobs)], capture_output=True, check=False)
    return " ".join(command)


def stop_controller(sweep: Sweep, checks: Checks, dice: random.Random) -> str | None:
    """slurmctld does not answer for some seconds."""
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "slurmctld":
            process.send_signal(signal.SIGSTOP)
            time.sleep(dice.uniform(1, 12))
            process.send_signal(signal.SIGCONT)
            return "SIGSTOP, SIGCONT"
    return None


FAULTS: tuple[Fault, ...] = (signal_command, signal_group, stop_command, signal_worker)
FAULTS += (stop_worker, step_clock, fill_disk, junk, junk_record, strange_file)
FAULTS += (truncate_round, second_command, remove_runs)

SLURM_FAULTS: tuple[Fault, ...] = (signal_job, signal_job, signal_job, stop_controller)
