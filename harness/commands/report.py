"""``attnbench-report``: tables, figures and reports again, from the records alone."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cases.recorded import load
from harness.commands.results_folder import (
    complain,
    require_folder,
    require_sweeps,
    results_parser,
)
from harness.printing import say, warn
from harness.render.files import render_sweep
from harness.store.record import RecordStore

COMMAND = "attnbench-report"


def main(arguments: list[str] | None = None) -> int:
    """Render the named sweeps of a results folder, or all of them; returns the exit code."""
    parser = results_parser(
        COMMAND,
        "Write the tables, figures and report of sweeps from their records. Nothing is measured, "
        "and the records are only read.",
        sweeps="which sweeps of the folder; all if none is named",
    )
    options = parser.parse_args(arguments)
    results: Path = options.results
    try:
        require_folder(results, ["sweeps"])
        labels = require_sweeps(results, options.sweeps)
    except ValueError as error:
        return complain(error, COMMAND)
    if not labels:
        return complain(f"RESULTS={results}: holds no sweep (no sweeps/*/plan.json)", COMMAND)
    records, problems = load(RecordStore(results))
    for problem in problems:
        warn(problem, command=COMMAND)
    exit_code = 0
    for label in options.sweeps or labels:
        try:
            rendered = render_sweep(results, label, records, problems)
        except ValueError as error:
            warn(error, command=COMMAND)
            exit_code = 2
            continue
        except OSError as error:
            place = error.filename or results / "sweeps" / label
            warn(f"{place}: cannot be written ({error.strerror})", command=COMMAND)
            exit_code = 2
            continue
        for problem in rendered.problems:
            warn(f"{label}: {problem}", command=COMMAND)
            exit_code = 2
        say(f"{label}: {len(rendered.tables)} tables, report {rendered.report}")
        if rendered.memory is not None:
            say(f"{label}: {rendered.memory}")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
