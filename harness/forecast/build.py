"""Makes a calibration from the records of a results folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import psutil

import harness
from harness.cases.case import Case
from harness.cases.hardware import find_hardware
from harness.forecast import extract, measured, steps
from harness.forecast.calibration import Calibration
from models.variants import PLAIN

GIB = 2**30

GPUS_PER_HOST = 8
"""Of machines that are sold for training, whatever their GPU."""


def build(name: str, results: Path, *, sweep: str | None = None) -> Calibration:
    """The calibration that a results folder gives, or one sweep of it.

    Raises ValueError in one line where its records do not suffice to predict a step.
    """
    found = from_frame(name, harness.load(results, sweep=sweep))
    for law, record in (("matmul/", "matrix product"), ("elementwise/", "profiled step")):
        if not any(known.startswith(law) for known in found.observations):
            raise ValueError(
                f"{results}: no step can be predicted without a record of a {record}; "
                f"attnbench sweeps=calibration results={results} measures some"
            )
    return found


def from_frame(name: str, frame: pd.DataFrame) -> Calibration:
    """The calibration that the records of a frame give."""
    return steps.completed(kernels(name, frame), measured.of_frame(frame))


def kernels(name: str, frame: pd.DataFrame) -> Calibration:
    """What records tell of kernels, collective operations and calls of attention."""
    sources: dict[str, int] = {}
    observations = extract.from_frame(frame, sources)
    device = str(frame["device"].iloc[0])
    device_name = str(_most(frame["device_name"], "CPU"))
    revisions = dict(zip(frame["case_id"], frame["revision"], strict=True))
    return Calibration(
        name=name,
        device_name=device_name,
        device=device,
        gpus_per_host=GPUS_PER_HOST if device == "cuda" else 1,
        device_memory_bytes=_memory_bytes(frame, device_name),
        num_sms=int(_most(frame["multiprocessors"], 1)),
        records=tuple({"id": key, "revision": str(revisions[key])} for key in sources),
        observations={law: tuple(items) for law, items in observations.items()},
        hosts=(),
        factors=_enqueue(frame),
    )


def _most(values: pd.Series, otherwise: Any) -> Any:
    """The most frequent of the values that are known."""
    known = values.dropna()
    return known.mode().iloc[0] if len(known) else otherwise


def _memory_bytes(frame: pd.DataFrame, device_name: str) -> int:
    """The memory of the device: as it is sold, or as its driver says; of a CPU that of its host."""
    hardware = find_hardware(device_name)
    if hardware is not None:
        return int(hardware.memory_gib * GIB)
    told = _most(frame["device_memory_gib"], None)
    return psutil.virtual_memory().total if told is None else int(told * GIB)


def without(calibration: Calibration, case_ids: Collection[str]) -> Calibration:
    """The same without what some records tell, to test predictions of them."""
    records = calibration.records
    left = {
        law: tuple(item for item in items if records[item.source]["id"] not in case_ids)
        for law, items in calibration.observations.items()
    }
    return replace(calibration, observations={law: items for law, items in left.items() if items})


USUAL_LAUNCH_US = 17.0
"""Of the hosts whose attention calls were timed, as their steps tell it."""


def _enqueue(frame: pd.DataFrame) -> dict[str, float]:
    """The host's time of an attention call by backend and pass, in launches of a usual host."""
    calls = frame[(frame["task"] == "attention") & (frame["cp"] == 1) & frame["host_ms"].notna()]
    masked = calls["case"].map(lambda case: Case.from_dict(case).attention_variant != PLAIN)
    found = {}
    for (backend, phase, has_mask), rows in calls.groupby(["attention", "phase", masked]):
        if phase in ("forward", "backward"):
            launches = median(rows["host_ms"]) * 1e3 / USUAL_LAUNCH_US
            name = f"enqueue/{backend}/{phase}" + ("/masked" if has_mask else "")
            found[name] = float(f"{launches:.4g}")
    return found
