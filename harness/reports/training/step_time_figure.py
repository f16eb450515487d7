"""Time of a training step by phase and attention backend, at every measured point."""

from __future__ import annotations

import pandas as pd

from harness.render.figure import CaptionedFigure, figure
from harness.reports.training.phase_bars import phase_bars

CAPTION = "Median time of the phases of a training step by attention backend, and of whole steps."


@figure("step_time", default=10)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    return phase_bars(frame, "attention", CAPTION)
