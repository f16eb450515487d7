"""The promises that no fault may break."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.store.record import file_case
from tests.soak.sweep import Ended, Sweep

GONE_S = 60.0
"""How long processes may take to end after their command."""


@dataclass(slots=True)
class Checks:
    """What has been seen of a sweep, and what was broken."""

    sweep: Sweep
    planted: set[str] = field(default_factory=set)
    """Hashes of files that a fault put into records/; they are nobody's records."""
    seen: dict[str, str] = field(default_factory=dict)
    """The hash of every record file ever seen, by its name."""
    violations: list[str] = field(default_factory=list)

    def look(self) -> dict[str, dict[str, Any]]:
        """Compare record files with those seen before; returns the records by file name."""
        found: dict[str, dict[str, Any]] = {}
        hashes: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.sweep.records)):
                data = _content(self.sweep.records / name)
                if data is None or file_case(name) is None:
                    continue
                digest = hashlib.sha256(data).hexdigest()
                if digest in self.planted:
                    continue
                with contextlib.suppress(ValueError, RecursionError):
                    found[name] = json.loads(data)
                    hashes[name] = digest
        for name, digest in self.seen.items():
            if name not in hashes:
                self.broken(f"record {name} is lost")
            elif hashes[name] != digest:
                self.broken(f"record {name} is changed")
        self.seen |= hashes
        self._measured_once(found)
        return found

    def _measured_once(self, found: dict[str, dict[str, Any]]) -> None:
        attempts: dict[str, list[tuple[int, str]]] = {}
        for record in found.values():
            attempts.setdefault(record["case_id"], []).append((record["attempt"], record["status"]))
        for case_id, items in attempts.items():
            statuses = [status for _, status in sorted(items)]
            if "ok" in statuses[:-1]:
                self.broken(f"{case_id} was measured again: {statuses}")

    def commands_said(self, ended: list[Ended]) -> None:
        for command in ended:
            if "Traceback (most recent call last)" in command.said:
                self.broken(
                    f"traceback of a command that ended with {command.code}:\n{command.said}"
                )

    def status(self) -> None:
        self._works("status", (0,))

    def report(self) -> None:
        """The report is made anew, whatever else lies in the folder and is complained of."""
        for path in self.sweep.results.glob("sweeps/soak/report.md"):
            path.unlink()
        self._works("report", (0, 1, 2))
        if not (self.sweep.results / "sweeps" / "soak" / "report.md").is_file():
            self.broken("no report was made")

    def _works(self, function: str, codes: tuple[int, ...]) -> None:
        done = self.sweep.run(function)
        self.commands_said([done])
        if done.code not in codes:
            self.broken(f"attnbench-{function} ended with {done.code}: {done.said[-600:]}")

    def nothing_left(self) -> None:
        """No process, once no command and no job runs."""
        deadline = time.monotonic() + GONE_S
        while left := self.sweep.processes():
            if time.monotonic() > deadline:
                self.broken(f"processes are left: {[str(process) for process in left]}")
                for process in left:
                    process.kill()
                return
            time.sleep(0.05)

    def complete(self, found: dict[str, dict[str, Any]]) -> bool:
        """Whether every case has a good record."""
        return self.num_good(found) == self.sweep.num_cases

    def num_good(self, found: dict[str, dict[str, Any]]) -> int:
        return len({record["case_id"] for record in found.values() if record["status"] == "ok"})

    def broken(self, line: str) -> None:
        if line not in self.violations:
            self.violations.append(line)
            print(f"VIOLATION: {line}", flush=True)


def _content(path: Path) -> bytes | None:
    """A regular file's content."""
    with contextlib.suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            return path.read_bytes()
    return None
