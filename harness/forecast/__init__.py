"""Predicted time of training steps: laws of kernels, calibrated by records, summed to a step.

``machine("h200").step(case)`` predicts a case of task=train_step, on a machine that need not be
here. docs/forecast.md explains the model and says how good it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.forecast.machines import Machine

from harness.forecast.prediction import Part, StepPrediction

__all__ = ["Part", "StepPrediction", "machine"]


def machine(name: str, results: Path | None = None) -> Machine:
    """The machine of a calibration in ``conf/machine``; ``here`` is the one kept for this one.

    Raises ValueError in one line where there is no such calibration.
    """
    from harness.forecast import machines

    return machines.machine(name, results)
