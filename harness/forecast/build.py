"""Makes a calibration from the records of a results folder.

python -m harness.forecast results/h200 conf/machine/h200.json
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import pandas as pd

import harness
from harness.cases.case import Case
from harness.cases.hardware import find_hardware
from harness.forecast import extract
from harness.forecast.calibration import Calibration, Exposure, HostSpeed
from harness.forecast.machines import GAPS, UNFUSED, UNMEASURED_COMPILED, Machine

GIB = 2**30

NUM_SMS = {"NVIDIA H200": 132}
"""Multiprocessors: H100 architecture whitepaper, table 2, SXM5; the H200 has the same chip."""

GPUS_PER_HOST = 8

HOST_BOUND = 1.25
"""Measured over predicted time of the device above which a step has waited for its host."""

BUSY = 1.1
"""Measured time over that of kernels below which a device was nearly always busy."""


def build(name: str, results: Path) -> Calibration:
    """The calibration that a results folder gives."""
    return from_frame(name, harness.load(results))


def from_frame(name: str, frame: pd.DataFrame) -> Calibration:
    """The calibration that records give, without those that are not in the frame."""
    sources: dict[str, int] = {}
    observations = extract.from_frame(frame, sources)
    device_name = str(frame["device_name"].dropna().mode().iloc[0])
    hardware = find_hardware(device_name)
    plain = Calibration(
        name=name,
        device_name=device_name,
        device=str(frame["device"].iloc[0]),
        gpus_per_host=GPUS_PER_HOST if hardware is not None else 1,
        device_memory_bytes=int(hardware.memory_gib * GIB) if hardware is not None else 0,
        num_sms=NUM_SMS.get(device_name, 1),
        records=(),
        observations={law: tuple(items) for law, items in observations.items()},
        hosts=(),
        factors={"gap_us": _gap_us(frame)},
    )
    steps = training_steps(frame)
    hosts = _hosts(Machine(plain), steps, sources)
    factors = {**plain.factors, **_enqueue(frame, hosts)}
    known = replace(plain, hosts=tuple(hosts), factors=factors)
    known = replace(known, factors={**factors, **_compiled(Machine(known), steps)})
    exposures = _exposures(Machine(known), steps, sources)
    return replace(known, exposures=tuple(exposures), records=_provenance(frame, sources))


def _enqueue(frame: pd.DataFrame, hosts: Sequence[HostSpeed]) -> dict[str, float]:
    """The host's time of an attention call by backend and pass, in launches of a usual host."""
    calls = frame[(frame["task"] == "attention") & (frame["cp"] == 1) & frame["host_ms"].notna()]
    if not hosts or calls.empty:
        return {}
    found = {}
    for (backend, phase), rows in calls.groupby(["attention", "phase"]):
        if phase in ("forward", "backward"):
            a_launch = median(getattr(host, f"{phase}_us") for host in hosts)
            launches = rows["host_ms"].median() * 1e3 / a_launch
            found[f"enqueue/{backend}/{phase}"] = float(f"{launches:.4g}")
    return found


def _compiled(machine: Machine, steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """What compilers left of the time between products and attention, by scope and phase."""
    left: dict[str, list[float]] = defaultdict(list)
    for row in steps:
        case = Case.from_dict(row["case"])
        if case.compile is None or case.compile.scope == "none" or case.world_size > 1:
            continue
        for phase in machine.enqueued(case):
            scaled = sum(phase.parts[name] for name in phase.parts if name not in UNFUSED)
            scaled -= phase.parts[GAPS]
            if phase.name != "optimizer" and scaled:
                # Not known yet, so that the usual share was taken.
                rest = row["phases"][phase.name] - (phase.device_ms - scaled)
                share = max(0.0, UNMEASURED_COMPILED * rest / scaled)
                left[f"compiled/{case.compile.scope}/{phase.name}"].append(share)
    return {name: round(median(values), 4) for name, values in left.items()}


def _gap_us(frame: pd.DataFrame) -> float:
    """Microseconds between kernels of profiled steps in which the device was nearly always busy."""
    gaps = []
    for row in frame[frame["phase"] == "step"].to_dict("records"):
        profile = row["kernel_profile"]
        if row["task"] == "train_step" and isinstance(profile, dict):
            step = profile["phases"]["step"]
            if step["busy_ms"] < row["median_ms"] < BUSY * step["busy_ms"]:
                gaps.append((row["median_ms"] - step["busy_ms"]) / step["launches"] * 1e3)
    return round(median(gaps), 3) if gaps else 0.0


def training_steps(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Measured cases of task=train_step, with the median of each phase."""
    rows = frame[(frame["task"] == "train_step") & (frame["status"] == "ok")]
    found = []
    for case_id, group in rows.groupby("case_id", sort=False):
        phases = dict(zip(group["phase"], group["median_ms"], strict=True))
        first = cast("dict[str, Any]", group[group["phase"] == "step"].iloc[0].to_dict())
        found.append({**first, "case_id": case_id, "phases": phases, "host_key": host_key(first)})
    return found


def host_key(row: dict[str, Any]) -> str:
    """What tells the hosts of records apart: their processors, and the boot if it is known."""
    machine = row["machine"]
    if machine is None or not hasattr(machine, "num_cpus"):
        return "unknown"
    # Where no boot is recorded, a revision was measured in one go.
    when = f"boot {machine.boot}" if machine.boot else f"revision {row['revision']}"
    return f"{machine.cpu_model}, {machine.num_cpus} processors, {when}"


def _hosts(
    machine: Machine, steps: Sequence[dict[str, Any]], sources: dict[str, int]
) -> list[HostSpeed]:
    """The speed of each host: from the steps that waited for it, or at most that of its fastest."""
    by_host: dict[str, list[tuple[bool, float, dict[str, float], str]]] = defaultdict(list)
    for row in steps:
        case = Case.from_dict(row["case"])
        plain = case.world_size == 1 and not case.compiles and case.checkpoint is None
        if not plain or not {"forward", "backward", "optimizer"} <= row["phases"].keys():
            continue
        phases = machine.enqueued(case)
        device = sum(phase.device_ms for phase in phases[:2])
        waited = row["phases"]["forward"] + row["phases"]["backward"] > HOST_BOUND * device
        speeds = {one.name: row["phases"][one.name] * 1e3 / one.launches for one in phases}
        both = speeds["forward"] + speeds["backward"]
        by_host[row["host_key"]].append((waited, both, speeds, row["case_id"]))
    found = []
    for host, known in sorted(by_host.items()):
        bound = sorted((item for item in known if item[0]), key=lambda item: item[1])
        # Where no step waited, the host is at least as fast as in the one of most launches a ms.
        _, _, speeds, case_id = bound[len(bound) // 2] if bound else min(known, key=lambda x: x[1])
        found.append(
            HostSpeed(
                host=host,
                forward_us=round(speeds["forward"], 3),
                backward_us=round(speeds["backward"], 3),
                optimizer_us=round(speeds["optimizer"], 3),
                bound=bool(bound),
                source=sources.setdefault(case_id, len(sources)),
            )
        )
    usual = [one.forward_us + one.backward_us for one in found if one.bound]
    if not usual:
        return found
    return [one for one in found if one.bound or one.forward_us + one.backward_us < median(usual)]


def _exposures(
    machine: Machine, steps: Sequence[dict[str, Any]], sources: dict[str, int]
) -> list[Exposure]:
    return []


def _provenance(frame: pd.DataFrame, sources: dict[str, int]) -> tuple[dict[str, str], ...]:
    revisions = dict(zip(frame["case_id"], frame["revision"], strict=True))
    return tuple({"id": name, "revision": str(revisions[name])} for name in sources)
