"""Time of a training step by phase and precision, at every measured point."""

from __future__ import annotations

import pandas as pd

from harness.render.figure import CaptionedFigure, figure
from harness.reports.training.phase_bars import phase_bars

CAPTION = "Median time of the phases of a training step by precision, and of whole steps."


@figure("precision")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    return phase_bars(frame, "precision", CAPTION, ("precision", "compute", "tf32"))
