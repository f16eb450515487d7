"""What is missing from results folders, and the commands that make it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.cases import format as fmt
from harness.cases.sweep import Sweep, load_sweep
from harness.cases.task import TASKS
from harness.paths import project_sweeps
from harness.store.attempts import Records
from harness.store.record import Record
from harness.store.sweep_plan import SweepPlan, command_into
from harness.writeup.document import Gap

MISSING_SHOWN = 5
"""Ids of cases without a record that a gap names; the command measures all of them."""


def gaps_of(plan: SweepPlan, found: Records, results: Path) -> Iterator[Gap]:
    """What a sweep lacks: cases never measured, and those whose last attempt gave no result."""
    label = plan.label
    command = command_into(plan.command or f"attnbench sweeps={label}", results)
    missing = [case_id for case_id in plan.case_ids if case_id not in found]
    if missing:
        named = ", ".join(missing[:MISSING_SHOWN])
        rest = len(missing) - MISSING_SHOWN
        more = f" and {rest} more" if rest > 0 else ""
        yield Gap(
            what=f"{label}: {fmt.counted(len(missing), 'case')} not measured ({named}{more})",
            command=command,
        )
    broken = Counter(
        found[case_id].status
        for case_id in plan.case_ids
        if case_id in found and found[case_id].status in ("failed", "timeout", "wrong")
    )
    if broken:
        words = ", ".join(f"{number} {fmt.STATUS_WORDS[name]}" for name, number in broken.items())
        yield Gap(
            what=f"{label}: {fmt.counted(broken.total(), 'case')} without a result ({words})",
            command=command_into(command, results, retry="true"),
        )
    overtaken = Counter(
        found.later[case_id].status
        for case_id in plan.case_ids
        if case_id in found.later and found.later[case_id].status in ("failed", "timeout")
    )
    if overtaken:
        words = ", ".join(
            f"{number} {fmt.STATUS_WORDS[name]}" for name, number in overtaken.items()
        )
        yield Gap(
            what=f"{label}: {fmt.counted(overtaken.total(), 'case')} with a newer attempt that "
            f"gave no result ({words})",
            command=command_into(command, results, retry="true"),
        )


def folder_of_cuda(folders: Sequence[Path], records: dict[tuple[Path, str], Record]) -> Path | None:
    """The first folder with something that ran on a CUDA device."""
    ran = {results for (results, _), record in records.items() if record.case["device"] == "cuda"}
    return next((folder for folder in folders if folder in ran), None)


def sweeps_without(
    labels: Sequence[str], folders: Sequence[Path], cuda: Path | None
) -> Iterator[Gap]:
    """The project's named sweeps that no results folder has.

    What is measured belongs beside what a GPU has measured, if there is any; what is only counted
    needs no device, and goes into the first folder.
    """
    for name in project_sweeps():
        if any(label == name or label.startswith(f"{name}-") for label in labels):
            continue
        command = f"attnbench sweeps={name}"
        if not _measures(load_sweep(name)):
            yield Gap(what=f"{name}: not run", command=command_into(command, folders[0]))
        elif cuda is not None:
            yield Gap(
                what=f"{name}: not run",
                command=command_into(command, cuda, device="cuda"),
            )
        else:
            yield Gap(
                what=f"{name}: not run (on a CPU at a size for one; in full on a GPU, into a "
                "folder of its own)",
                command=command_into(command, folders[0]),
            )


def _measures(sweep: Sweep) -> bool:
    """Whether any task of the sweep measures, rather than counts."""
    named = [grid.get("task", []) for grids in sweep.scales.values() for grid in grids]
    names = {
        str(name) for value in named for name in (value if isinstance(value, list) else [value])
    }
    return not names or any(TASKS[name].target.measures for name in names)
