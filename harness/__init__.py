"""The benchmark harness: command line -> cases -> workers -> records -> tables and figures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__version__ = "0.1.0"


def load(results: str | Path, *, sweep: str | None = None) -> pd.DataFrame:
    """The record of every case in a results folder that counts, one row per case and phase.

    Units are in the columns' names; ``samples_ms`` holds every pass of the slowest rank. Rows of
    cases without a result have a ``status`` and no times.

    Args:
        sweep: the label of a sweep in the folder, for its cases alone, in its order.

    Raises:
        ValueError: in one line, where there is no such folder or sweep, or no readable record.
    """
    # Late: every module of ours imports this one, and few need pandas.
    from harness.analysis.loading import load_frame

    return load_frame(Path(results), sweep)
