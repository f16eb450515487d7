"""Numbers that cannot be: rates above the device's roof, parts that exceed their whole.

A row that fails has a fault of its own or is compared with a faulty one, so its rates are withheld
and its time is marked. Which of the two is wrong cannot be told from here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.machines import Machine
from harness.cases.hardware import find_hardware
from harness.store.record import Record

OVER_ROOF = 1.01
"""Rate over the measured roof that its own spread explains."""

OVER_OTHER_ROOF = 1.05
"""The same where the roof was measured on another device of the same name: what limits the power
of two is not the same. Of the records' H200s one attends at 798 TFLOP/s, head_dim 256, where
the matmul of another reaches 781."""

PARTS = {"bf16x6": ("bfloat16", 6)}
"""How kernels that multiply float32 numbers by their parts say so: the parts' format, and how many
products of parts one product takes."""

OVER_WHOLE = 1.05
"""Parts over the whole that medians of different passes explain."""

OVER_PASS = 1.01
"""Kernels under a profiler over the pass without it that the means of both explain."""

WHOLES: Mapping[str, tuple[str, ...]] = {
    "forward_backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
"""Phases, and those that follow one another inside them."""

MEANINGS: Mapping[str, str] = {
    "time": "a time is not above zero",
    "peak": "the rate is above the dense peak of the device's datasheet",
    "roof": (
        "the rate is over 1% above that of the large matmul measured on this device, "
        "or over 5% above that of one of the same name that is, or may be, another"
    ),
    "parts": "the parts of a pass take over 5% longer than the whole",
    "bandwidth": "the rate is above the device's memory bandwidth",
    "traced": "it takes longer under the profiler than the whole step without it",
    "kernels": (
        "kernels under the profiler take over 1% longer than the pass without it: it slowed them, "
        "or they ran at once"
    ),
}
"""Each reason why a number cannot be, in the order of footnotes."""

RATES = ("tokens_per_s", "tflops", "mfu")
"""Columns of the frame that are withheld in rows that cannot be."""

Roofs = Mapping[tuple[Any, ...], Sequence[tuple[float, Machine]]]
"""TFLOP/s of a large matmul on each machine that measured one, by device name, compute dtype and
whether TF32 was allowed."""

ROOF_KEYS = ("device_name", "compute", "tf32")


def roof_records(records: Iterable[Record]) -> list[Record]:
    """The records that measured what a large matmul and a large copy reach."""
    return [
        record
        for record in records
        if record.status == "ok" and {"copy", "matmul"} <= record.phases.keys()
    ]


def roofs_of(frame: pd.DataFrame) -> Roofs:
    """The rates of matmuls in a frame of :func:`roof_records`, each in its fastest pass."""
    measured = frame[(frame["phase"] == "matmul") & (frame["status"] == "ok")]
    rates = measured["work_flops"].astype(float) / measured["min_ms"] / 1e9
    found: dict[tuple[Any, ...], list[tuple[float, Machine]]] = defaultdict(list)
    keys = zip(*(measured[key] for key in ROOF_KEYS), strict=True)
    for key, rate, machine in zip(keys, rates, measured["machine"], strict=True):
        found[key].append((rate, machine))
    return found


def highest(machine: Machine, roofs: Sequence[tuple[float, Machine]]) -> float:
    """The highest rate that can be on a machine; NaN if no roof was measured."""
    own = [rate for rate, measured_on in roofs if not machine.may_be_other(measured_on)]
    if own:
        return OVER_ROOF * max(own)
    return max((OVER_OTHER_ROOF * rate for rate, _ in roofs), default=np.nan)


def impossible(frame: pd.DataFrame, roofs: Roofs) -> list[list[str]]:
    """Why each row of the frame cannot be; nothing where it can."""
    keys = zip(*(frame[key] for key in ROOF_KEYS), strict=True)
    roof = pd.Series(
        [
            highest(machine, roofs.get(key, ()))
            for key, machine in zip(keys, frame["machine"], strict=True)
        ],
        index=frame.index,
        dtype=float,
    )
    peak = frame["peak_tflops"].astype(float)
    for index in map(int, np.flatnonzero(frame["float32_precision"].isin(PARTS))):
        # On the units of its parts, not on those of float32.
        row = frame.iloc[index]
        dtype, products = PARTS[row["float32_precision"]]
        hardware = find_hardware(row["device_name"])
        known = np.nan if hardware is None else hardware.peak_tflops.get(dtype, np.nan)
        peak.iloc[index] = known / products
        measured = roofs.get((row["device_name"], dtype, False), ())
        roof.iloc[index] = highest(row["machine"], measured) / products
    reasons = {
        "time": frame["median_ms"] <= 0,
        "peak": frame["tflops"] > peak,
        "roof": (frame["tflops"] > roof) & (frame["phase"] != "matmul"),
        "parts": _parts_exceed(frame),
    }
    columns = [reasons[word].tolist() for word in reasons]
    return [
        [word for word, is_so in zip(reasons, flags, strict=True) if is_so]
        for flags in zip(*columns, strict=True)
    ]


def _parts_exceed(frame: pd.DataFrame) -> pd.Series:
    """Whether a phase belongs to a case whose parts take longer than the whole.

    By means, which add up over the passes; medians of times that scatter need not.
    """
    found = pd.Series(False, index=frame.index)
    times = frame["mean_ms"]
    for whole, parts in WHOLES.items():
        together = times.where(frame["phase"].isin(parts)).groupby(frame["case_id"]).sum()
        wholes = times[frame["phase"] == whole].groupby(frame["case_id"]).first()
        ratio = frame["case_id"].map(together / wholes)
        found |= (ratio > OVER_WHOLE) & frame["phase"].isin([whole, *parts])
    return found
