"""Predicted memory of recorded cases, by the formulas of today.

A record keeps the prediction of its day. Formulas have changed since some were written (those of
attention were of the bytes between its passes), so that tables show what the case is predicted to
hold now, and fall back on the record where the case cannot be rebuilt here, as without its plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from harness.analysis.memory import own_peak_bytes
from harness.cases.case import Case
from harness.store.record import Record

Parts = dict[str, float]


def peak_bytes(record: Record) -> float:
    """Predicted peak of the fullest rank; NaN where it is not predicted."""
    return _predicted(record, lambda case: case.task.predicted_memory(case), _recorded_peak)


def before_backward_bytes(record: Record) -> float:
    """Predicted bytes in use between the passes; NaN without a prediction."""
    return _predicted(
        record,
        lambda case: case.task.predicted_before_backward(case),
        lambda record: record.notes.get(
            "predicted_memory" if _is_between_passes(record) else "predicted_before_backward"
        ),
    )


def _recorded_peak(record: Record) -> Parts | None:
    if _is_between_passes(record):
        return None
    memory = record.memory
    return record.notes.get("predicted_memory") or (memory[0].get("predicted") if memory else None)


def _is_between_passes(record: Record) -> bool:
    """Whether the recorded prediction is an old one, of the bytes between the two passes."""
    measured = any("before_backward_bytes" in rank for rank in record.memory)
    return measured and "predicted_before_backward" not in record.notes


def _predicted(
    record: Record,
    predict: Callable[[Case], Parts | None],
    recorded: Callable[[Record], Parts | None],
) -> float:
    try:
        found = predict(Case.from_dict(record.case))
    except Exception:
        # Another version's option, a plugin that is not here, or a formula that asks the GPU.
        found = recorded(record)
    return math.nan if found is None else sum(found.values())


WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS's workspace on Hopper, in records from before a baseline was kept: one for each thread
that multiplies. Where a case has gradients, the thread of its backward pass has another."""


OFF = 0.1
"""A prediction is off beyond this share of what was measured."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ComparedPeak:
    """A good record's peak on CUDA, in bytes."""

    predicted: float | None
    """None where it is not predicted. Where the record has no baseline, with the workspaces that
    its process has."""
    measured: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if self.predicted is None else self.predicted / self.measured

    @property
    def is_off(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) > OFF


def has_baseline(record: Record) -> bool:
    """Whether its peaks leave out what its process held before."""
    return all("baseline_allocated_bytes" in rank for rank in record.memory)


def compared_peak(record: Record) -> ComparedPeak | None:
    """The peak of a good record as predicted and measured; None if none was measured on CUDA."""
    ranks = [rank for rank in record.memory if rank.get("peak_allocated_bytes")]
    if record.status != "ok" or not ranks:
        return None
    measured = max(own_peak_bytes(rank) or 0.0 for rank in ranks)
    predicted = peak_bytes(record)
    if math.isnan(predicted):
        return ComparedPeak(predicted=None, measured=measured)
    if not has_baseline(record):
        predicted += WORKSPACE_BYTES * _threads_that_multiply(record)
    return ComparedPeak(predicted=predicted, measured=measured)


def predicted_over_measured(record: Record) -> float | None:
    """Predicted over measured peak on CUDA of a good record; None unless both are known."""
    peak = compared_peak(record)
    return None if peak is None else peak.ratio


def _threads_that_multiply(record: Record) -> int:
    """Of a case's process, by the work of its phases: none without a matmul."""
    if not any(work["flops"] for work in record.work.values()):
        return 0
    case = record.case
    if case["parallel"].get("cp", 1) > 1 and not case.get("model"):
        # The check's matmuls ran outside autograd, and no scheme's backward pass has one.
        return 1
    mode = case["task"].get("mode")
    if case.get("model") and mode == "forward":
        return 1
    # Where attention alone has modes, other cases of its sweep had gradients.
    return 2 if mode else 1
