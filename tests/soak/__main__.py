"""``python -m tests.soak``: random faults against sweeps, and checks after each of them.

A sweep of ``--cases`` cases is started; while it runs, faults are inflicted on its processes and
files at random moments, and it is started again whenever it has ended, until every case has a
good record. Then comes the next sweep, until there were ``--faults`` faults. After each fault no
record that was ever seen may be lost or changed, and no case measured again that had a good one;
whenever no command runs, status and report must work and no process may be left.
Exits with 1 if any promise was broken. The same seed inflicts the same faults, though not at the
same instant of a sweep.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.soak.checks import Checks
from tests.soak.faults import FAULTS, SLURM_FAULTS, our_jobs
from tests.soak.sweep import Sweep

TMPFS_MB = 48
REPORT_EVERY = 10
"""Faults between two reports besides those that commands make."""


class Soak:
    """The faults so far, and how they ended."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.dice = random.Random(options.seed)
        faults = FAULTS + (SLURM_FAULTS if options.slurm else ())
        self.faults = [fault for fault in faults if fault.__name__ not in options.without]
        self.inflicted: Counter[str] = Counter()
        self.codes: Counter[tuple[str, int]] = Counter()
        self.num_records = 0
        self.num_sweeps = 0
        self.num_commands = 0
        self.violations: list[str] = []

    @property
    def done(self) -> bool:
        return self.inflicted.total() >= self.options.faults

    def sweep(self) -> None:
        """One sweep, with faults until it is complete."""
        path = self.folder / f"sweep-{self.num_sweeps}"
        self.num_sweeps += 1
        with _disk(path):
            sweep = Sweep(
                path=path,
                num_cases=self.options.cases,
                interleave=self.dice.choice((1, 1, 2)),
                slurm=self.options.slurm,
            )
            checks = Checks(sweep)
            try:
                self._until_complete(sweep, checks)
                self._end(sweep, checks)
            finally:
                for command in sweep.commands:
                    command.kill()
                if sweep.slurm:
                    subprocess.run(["scancel", *our_jobs()], capture_output=True, check=False)
                for process in sweep.processes():
                    with contextlib.suppress(Exception):
                        process.kill()
                self.num_records += len(checks.seen)
                self.violations += [f"{path.name}: {line}" for line in checks.violations]

    def _until_complete(self, sweep: Sweep, checks: Checks) -> None:
        last, starts_left = "", 3
        while True:
            if not sweep.commands:
                if checks.complete(checks.look()):
                    return
                if self.done:
                    starts_left -= 1
                    if starts_left < 0:
                        return
                sweep.start()
                self.num_commands += 1
            pause_s = self.dice.uniform(0.2, 4)
            until_s = time.monotonic() + pause_s
            while time.monotonic() < until_s and any(c.poll() is None for c in sweep.commands):
                time.sleep(0.02)
            if not self.done and any(c.poll() is None for c in sweep.commands):
                fault = self.dice.choice(self.faults)
                how = fault(sweep, checks, self.dice)
                if how is not None:
                    last = fault.__name__
                    self.inflicted[last] += 1
                    self._say(sweep, checks, f"{last}: {how}")
                checks.look()
                due = how is not None and self.inflicted.total() % REPORT_EVERY == 0
                if due and sweep.case_ids():
                    checks.report()
            over = sweep.ended()
            checks.commands_said(over)
            for command in over:
                self.codes[last, command.code] += 1
            if over and not sweep.commands:
                checks.look()
                # One that was stopped at once has not made its folder yet.
                if sweep.records.is_dir():
                    checks.status()
                if not sweep.slurm:
                    checks.nothing_left()

    def _end(self, sweep: Sweep, checks: Checks) -> None:
        found = checks.look()
        if not checks.complete(found):
            checks.broken(f"only {checks.num_good(found)} of {sweep.num_cases} cases are measured")
        checks.status()
        checks.report()
        if sweep.slurm:
            sweep.run("cancel")
            deadline_s = time.monotonic() + 90
            while (left := our_jobs()) and time.monotonic() < deadline_s:
                time.sleep(0.5)
            if left:
                checks.broken(f"jobs are left: {left}")
        checks.nothing_left()
        self._say(sweep, checks, "complete")

    def _say(self, sweep: Sweep, checks: Checks, line: str) -> None:
        number, seen = self.inflicted.total(), len(checks.seen)
        print(f"{number:4d}  {sweep.path.name:9} {seen:3d} records  {line}", flush=True)

    def table(self) -> str:
        """Faults by kind, and the exit codes of commands that ended next."""
        lines = [f"{'fault':18} {'times':>5}  exit codes of the commands that ended next"]
        for name, number in sorted(self.inflicted.items()):
            codes = sorted((code, n) for (fault, code), n in self.codes.items() if fault == name)
            lines.append(f"{name:18} {number:5d}  {', '.join(f'{n} x {c}' for c, n in codes)}")
        return "\n".join(lines)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    """A small file system for one sweep, where this process may mount one."""
    path.mkdir(parents=True)
    options = f"size={TMPFS_MB}m,mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "attnbench-soak", str(path)]
    mounted = (
        os.geteuid() == 0
        and shutil.which("mount") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(path)], check=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="a new one each time if none")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--cases", type=int, default=50, help="of each sweep")
    parser.add_argument("--slurm", action="store_true", help="on the cluster of make slurm-up")
    parser.add_argument("--without", nargs="*", default=[], help="kinds of faults to leave out")
    parser.add_argument("--keep", type=Path, help="a new folder, kept for looking into")
    options = parser.parse_args()
    options.seed = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        soak = Soak(options, folder)
        while not soak.done:
            soak.sweep()
    took_s = time.monotonic() - began_s
    print(soak.table())
    print(
        f"seed {options.seed}: {soak.inflicted.total()} faults in {took_s / 60:.1f} min, "
        f"{soak.num_sweeps} sweeps of {options.cases} cases, {soak.num_commands} commands, "
        f"{soak.num_records} records seen; {len(soak.violations)} violations"
    )
    for line in soak.violations:
        print(f"VIOLATION: {line}")
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
