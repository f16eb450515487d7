"""A results folder as one DataFrame; users call it as ``harness.load``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from harness.analysis.frame import build_frame
from harness.cases.recorded import load
from harness.store.record import RecordStore
from harness.store.sweep_plan import planned_labels, read_plan


def load_frame(results: Path, sweep: str | None = None) -> pd.DataFrame:
    """The frame of the record of each case that counts. See :func:`harness.load`."""
    return load_frames(results)(sweep)


def load_frames(results: Path) -> Callable[[str | None], pd.DataFrame]:
    """What makes the frame of one sweep, or with None of all cases, of records that are read once.

    ValueError where there is no such folder, and later for a sweep that it does not hold.
    """
    if not results.is_dir():
        raise ValueError(f"{results}: no such folder")
    records, problems = load(RecordStore(results))
    for problem in problems:
        warnings.warn(problem, stacklevel=4)

    def frame_of(sweep: str | None) -> pd.DataFrame:
        chosen = list(records)
        if sweep is not None:
            known = planned_labels(results)
            if sweep not in known:
                raise ValueError(f"sweep={sweep}: not in {results}; one of {', '.join(known)}")
            chosen = [name for name in read_plan(results, sweep).case_ids if name in records]
        if not chosen:
            raise ValueError(f"{results}: holds no readable records")
        counting = [records[case_id] for case_id in chosen]
        return build_frame(counting, records.values(), later=records.later)

    return frame_of
