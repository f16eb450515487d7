"""Local runs that are announced in a results folder and measure nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from harness.cases.case import Case
from harness.run.launcher import PendingCases
from harness.run.progress import Progress
from harness.run.rounds.options import RunOptions
from harness.run.run_files import RunManifest
from harness.run.run_folder import RunFolder, local_run, runs_of
from harness.store.record import Record, RecordStore

LAZILY = "from harness.commands import lazy_imports; lazy_imports.install()\n"
"""How a program of a test begins that announces a run; as a command does, it loads no torch."""


class Silent:
    """A progress that shows nothing."""

    def started(self, case: Case) -> None: ...
    def stage(self, name: str) -> None: ...
    def finished(self, record: Record, *, measured_now: bool) -> None: ...


@contextlib.contextmanager
def announced(results: Path, case_ids: list[str], predicted_s: float = 1.0) -> Iterator[Progress]:
    """A run of this process that measures the first of some cases."""
    # A case is known to a run file by its id alone.
    cases = cast(list[Case], [SimpleNamespace(id=case_id) for case_id in case_ids])
    store = RecordStore(results)
    store.create()
    pending = PendingCases(
        cases=cases,
        options=RunOptions(results=results),
        store=store,
        progress=Silent(),
        command="attnbench",
        predict=lambda case: predicted_s,
    )
    with local_run(pending, "local") as progress:
        progress.started(cases[0])
        yield progress


def the_run(results: Path) -> tuple[RunFolder, RunManifest]:
    (found,) = runs_of(results)
    return found


def manifest(results: Path) -> RunManifest:
    return the_run(results)[1]


def states(cases: list[Any]) -> dict[str, str]:
    """Status by case, of what ``look`` returns."""
    return {case.case_id: case.status for case in cases}
