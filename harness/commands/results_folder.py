"""What the commands on a results folder share: their arguments, and how they tell of a mistake."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.printing import warn
from harness.store.sweep_plan import planned_labels

USAGE = 2
"""The exit code of a command that is wrong."""


def results_parser(
    command: str, description: str, *, sweeps: str | None = None
) -> argparse.ArgumentParser:
    """A parser of ``RESULTS``, and of ``SWEEP ...`` where ``sweeps`` says what naming some does."""
    parser = argparse.ArgumentParser(prog=command, description=description)
    parser.add_argument("results", type=Path, metavar="RESULTS", help="a results folder")
    if sweeps is not None:
        parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=sweeps)
    return parser


def require_folder(results: Path, holding: Sequence[str] = ("sweeps", "runs", "records")) -> None:
    """Raise ValueError unless a folder holds one of these folders, as one of results does."""
    if not results.is_dir():
        raise ValueError(f"RESULTS={results}: no such folder")
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
                f"SWEEP={label}: not in {results}; one of {', '.join(known) or 'none'}"
            )
    return known


def complain(error: object, command: str) -> int:
    """Tell of a mistake in one line; returns the exit code."""
    warn(error, command=command)
    return USAGE
