"""Makes a calibration from the records of a results folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from statistics import median

import pandas as pd
import psutil

import harness
from harness.cases.case import Case
from harness.cases.hardware import find_hardware
from harness.forecast import extract, steps
from harness.forecast.calibration import Calibration
from models.variants import PLAIN

GIB = 2**30

NUM_SMS = {"NVIDIA H200": 132}
"""Multiprocessors: H100 architecture whitepaper, table 2, SXM5; the H200 has the same chip."""

GPUS_PER_HOST = 8


def build(name: str, results: Path, *, sweep: str | None = None) -> Calibration:
    """The calibration that a results folder gives, or one sweep of it."""
    return from_frame(name, harness.load(results, sweep=sweep))


def from_frame(name: str, frame: pd.DataFrame) -> Calibration:
    """The calibration that the records of a frame give."""
    return steps.completed(kernels(name, frame), steps.of_frame(frame))


def kernels(name: str, frame: pd.DataFrame) -> Calibration:
    """What records tell of kernels, collective operations and calls of attention."""
    sources: dict[str, int] = {}
    observations = extract.from_frame(frame, sources)
    named = frame["device_name"].dropna()
    device_name = str(named.mode().iloc[0]) if len(named) else "CPU"
    hardware = find_hardware(device_name)
    revisions = dict(zip(frame["case_id"], frame["revision"], strict=True))
    return Calibration(
        name=name,
        device_name=device_name,
        device=str(frame["device"].iloc[0]),
        gpus_per_host=GPUS_PER_HOST if hardware is not None else 1,
        device_memory_bytes=(
            psutil.virtual_memory().total if hardware is None else int(hardware.memory_gib * GIB)
        ),
        num_sms=NUM_SMS.get(device_name, 1),
        records=tuple({"id": key, "revision": str(revisions[key])} for key in sources),
        observations={law: tuple(items) for law, items in observations.items()},
        hosts=(),
        factors=_enqueue(frame),
    )


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
