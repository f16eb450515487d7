"""Time of a training step by phase and attention backend, at every measured point.

Where all steps have one attention, bars are ways to run the step: launched, compiled, captured.
"""

from __future__ import annotations

import pandas as pd

from harness.render.figure import CaptionedFigure, figure
from harness.render.rows import of_task
from harness.reports.training.phase_bars import phase_bars
from harness.reports.training.ways import WAYS, way_of

CAPTION = "Median time of the phases of a training step by {}, and of whole steps."


@figure("step_time", default=10)
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    steps = of_task(frame, "train_step")
    if steps["attention"].nunique() > 1 or not steps["cuda_graph"].any():
        return phase_bars(frame, "attention", CAPTION.format("attention backend"))
    steps = steps.assign(way=[way_of(row) for _, row in steps.iterrows()])
    return phase_bars(steps, "way", CAPTION.format("way to run it"), WAYS, "attention")
