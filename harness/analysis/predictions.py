"""Predicted memory of recorded cases, by the formulas of today.

A record keeps the prediction of its day. Formulas have changed since some were written (those of
attention were of the bytes between its passes), so that tables show what the case is predicted to
hold now, and fall back on the record where the case cannot be rebuilt here, as without its plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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


def predicted_over_measured(record: Record) -> float | None:
    """Predicted over measured peak on CUDA of a good record; None unless both are known.

    Without a recorded baseline the workspaces that a process has are added to the prediction.
    """
    ranks = [rank for rank in record.memory if rank.get("peak_allocated_bytes")]
    predicted = peak_bytes(record)
    if record.status != "ok" or not ranks or math.isnan(predicted):
        return None
    if any("baseline_allocated_bytes" not in rank for rank in ranks):
        predicted += WORKSPACE_BYTES * _threads_that_multiply(record)
    return predicted / max(own_peak_bytes(rank) or 0.0 for rank in ranks)


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
