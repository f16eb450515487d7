"""What the commands on a results folder share: their arguments, and how they tell of a mistake."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from harness.did_you_mean import did_you_mean
from harness.printing import warn
from harness.store.sweep_plan import planned_labels

USAGE = 2
"""The exit code of a command that is wrong."""


class OneLineParser(argparse.ArgumentParser):
    """A parser of a command's arguments whose errors are one line, as all others are."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and how the command is written; ends it with exit code 2."""
        usage = " ".join(self.format_usage().split())
        self.exit(USAGE, f"{self.prog}: {message}; {usage}\n")


def results_parser(
    command: str, description: str, *, sweeps: str | None = None
) -> argparse.ArgumentParser:
    """A parser of ``RESULTS``, and of ``SWEEP ...`` where ``sweeps`` says what naming some does."""
    parser = OneLineParser(prog=command, description=description)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    if sweeps is not None:
        parser.add_argument("sweeps", nargs="*", default=[], metavar="SWEEP", help=sweeps)
    return parser


def require_folder(results: Path, holding: Sequence[str] = ("sweeps", "runs", "records")) -> None:
    """Raise ValueError unless a folder holds one of these folders, as one of results does."""
    if not results.is_dir():
        found = "is a file; must be a folder" if results.exists() else "no such folder"
        raise ValueError(f"RESULTS={results}: {found}")
    if not any((results / name).is_dir() for name in holding):
        raise ValueError(
            f"RESULTS={results}: not a results folder (without {' or '.join(holding)})"
        )


def require_sweeps(results: Path, named: Sequence[str]) -> list[str]:
    """All sweeps of a folder; raises ValueError unless those that are named are among them."""
    known = planned_labels(results)
    for label in named:
        if label not in known:
            raise ValueError(
                f"SWEEP={label}: not in {results}{did_you_mean(label, known)}; "
                f"one of {', '.join(known) or 'none'}"
            )
    return known


def complain(error: object, command: str) -> int:
    """Tell of a mistake in one line; returns the exit code."""
    warn(error, command=command)
    return USAGE
