"""Predicted beside measured peaks: columns of tables, and what a report says of all its cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.analysis.predictions import OFF, compared_peak, has_baseline
from harness.cases import format as fmt
from harness.cases.source import is_of_other_code
from harness.render.table import Column
from harness.store.record import Record

NOT_PREDICTED = "not predicted"

ROWS_SHOWN = 12
"""Cases that a report lists, those that are furthest off first."""


def predicted_columns(
    rows: pd.DataFrame,
    *,
    unit: float = GIB,
    header: str = "predicted",
    group: str = "",
    detail: bool = False,
) -> list[Column]:
    """The predicted peak and, where CUDA's allocator counted one, its ratio to the measured.

    Adds their cells to ``rows``: a case that was measured and has no prediction says so.
    """
    predicted = rows["predicted_memory_gib"] * (GIB / unit)
    good = rows["status"] == "ok"
    rows["predicted"] = predicted.where(good)
    unknown = good & predicted.isna() & rows["peak_memory_gib"].notna()
    rows["predicted_cell"] = rows["predicted"].astype(object).mask(unknown, NOT_PREDICTED)
    return [
        Column(
            key="predicted_cell",
            header=header,
            format=_number_or_words,
            group=group,
            raw=("predicted",),
            detail=detail,
        ),
        Column(
            key="predicted_over_measured",
            header="predicted / measured",
            format=fmt.factor,
            group=group,
            detail=detail,
        ),
    ]


def _number_or_words(value: float | str) -> str:
    return value if isinstance(value, str) else fmt.number(value)


@dataclass(kw_only=True, slots=True, frozen=True)
class PredictionSummary:
    """How predictions of a sweep's peaks hold."""

    sentence: str
    off: list[tuple[str, str, str, str]]
    """Case, predicted and measured GiB, and their ratio, of those that are furthest off.

    Predictions are of the code of now, and a case that was measured with other code has a mark."""
    more: int
    """Further cases that are off."""
    counts_workspaces: bool
    """Whether peaks have been compared that count what a process holds before a case."""


def summarise(records: Sequence[Record]) -> PredictionSummary | None:
    """None where no peak was measured on CUDA."""
    found = [(record, compared_peak(record)) for record in records]
    peaks = [(record, peak) for record, peak in found if peak is not None]
    if not peaks:
        return None
    known = [
        (record, peak.predicted, peak.measured, peak.ratio)
        for record, peak in peaks
        if peak.predicted is not None and peak.ratio is not None
    ]
    off = [item for item in known if abs(item[3] - 1) > OFF]
    off.sort(key=lambda item: -abs(item[3] - 1))
    marks = [
        fmt.DIAMOND if is_of_other_code(record.source, record.case, record.notes) else ""
        for record, *_ in off
    ]
    return PredictionSummary(
        sentence=_say(len(peaks), len(known), len(off), sum(map(bool, marks))),
        off=[
            (
                record.case_id,
                fmt.number(predicted / GIB),
                fmt.number(measured / GIB),
                fmt.factor(ratio) + mark,
            )
            for (record, predicted, measured, ratio), mark in zip(off, marks, strict=True)
        ][:ROWS_SHOWN],
        more=max(0, len(off) - ROWS_SHOWN),
        counts_workspaces=any(
            not has_baseline(record)
            for record, peak in found
            if peak is not None and peak.predicted is not None
        ),
    )


def _say(num_peaks: int, num_known: int, num_off: int, num_marked: int) -> str:
    """``peak memory: 31 of 33 predictions within 10%; 4 cases not predicted``."""
    parts = []
    if num_known:
        noun = "prediction" if num_known == 1 else "predictions"
        within = f"{num_known - num_off} of {num_known} {noun} within {OFF:.0%}"
        parts.append(f"peak memory: {within}")
    if num_marked:
        others = f"all {num_off} others" if num_off > 1 else "the other"
        if num_marked < num_off:
            others = f"{num_marked} of the {num_off} others"
        parts.append(f"{others} measured with other code than now ({fmt.DIAMOND})")
    if num_peaks > num_known:
        missing = num_peaks - num_known
        words = f"{missing} {'case' if missing == 1 else 'cases'} {NOT_PREDICTED}"
        parts.append(words if parts else f"peak memory: {words}")
    return "; ".join(parts)
