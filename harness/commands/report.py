"""``attnbench-report``: tables, figures and reports again, from the records alone."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from harness.cases.recorded import load
from harness.printing import say, warn
from harness.render.files import render_sweep
from harness.store.record import RecordStore
from harness.store.sweep_plan import planned_labels

COMMAND = "attnbench-report"


def main(arguments: list[str] | None = None) -> int:
    """Render the named sweeps of a results folder, or all of them; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="attnbench-report",
        description="Write the tables, figures and report of sweeps from their records. "
        "Nothing is measured, and the records are only read.",
    )
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    parser.add_argument(
        "sweeps",
        nargs="*",
        metavar="SWEEP",
        help="which sweeps of the folder; all if none is named",
    )
    options = parser.parse_args(arguments)
    results: Path = options.results
    if reason := _why_not(results, options.sweeps):
        warn(reason, command=COMMAND)
        return 2
    records, problems = load(RecordStore(results))
    for problem in problems:
        warn(problem, command=COMMAND)
    exit_code = 0
    for label in options.sweeps or planned_labels(results):
        try:
            rendered = render_sweep(results, label, records, problems)
        except ValueError as error:
            warn(error, command=COMMAND)
            exit_code = 2
            continue
        for problem in rendered.problems:
            warn(f"{label}: {problem}", command=COMMAND)
            exit_code = 2
        say(f"{label}: {len(rendered.tables)} tables, report {rendered.report}")
        if rendered.memory is not None:
            say(f"{label}: {rendered.memory}")
    return exit_code


def _why_not(results: Path, named: list[str]) -> str | None:
    """The mistake in the arguments, in one line."""
    if not results.is_dir():
        return f"RESULTS={results}: no such folder"
    found = planned_labels(results)
    if not found:
        return f"RESULTS={results}: not a results folder (no sweeps/*/plan.json in it)"
    for label in named:
        if label not in found:
            return f"SWEEP={label}: not in {results}; one of {', '.join(found)}"
    return None


if __name__ == "__main__":
    sys.exit(main())
