"""What training steps tell that kernels alone do not: hosts, gaps, compilers, hidden communication.

Each is a ratio of what steps took beyond the predicted time of their kernels; medians over steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import pandas as pd

from harness.cases.case import Case
from harness.forecast import communication, schedule
from harness.forecast.calibration import Calibration, Exposure, HostSpeed
from harness.forecast.machines import GAPS, UNFUSED, UNMEASURED_COMPILED, Machine

HOST_BOUND = 1.25
"""Measured over predicted time of the device above which a step has waited for its host."""

BUSY = 1.1
"""Measured time over that of kernels below which a device was nearly always busy."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MeasuredStep:
    """A recorded case of task=train_step."""

    case_id: str
    case: Case
    phases_ms: dict[str, float]
    """Medians; ``step`` is the whole."""
    host: str
    """What tells hosts apart: processors, and the boot or the revision that they measured."""
    profile: dict[str, Any] | None
    row: dict[str, Any]

    @property
    def ms(self) -> float:
        return self.phases_ms["step"]


def of_frame(frame: pd.DataFrame) -> list[MeasuredStep]:
    """Every measured training step."""
    rows = frame[(frame["task"] == "train_step") & (frame["status"] == "ok")]
    found = []
    for case_id, group in rows.groupby("case_id", sort=False):
        row = cast("dict[str, Any]", group[group["phase"] == "step"].iloc[0].to_dict())
        profile = row["kernel_profile"]
        found.append(
            MeasuredStep(
                case_id=str(case_id),
                case=Case.from_dict(row["case"]),
                phases_ms=dict(zip(group["phase"], group["median_ms"], strict=True)),
                host=_host(row),
                profile=profile if isinstance(profile, dict) else None,
                row=row,
            )
        )
    return found


def _host(row: dict[str, Any]) -> str:
    machine = row["machine"]
    if machine is None or not hasattr(machine, "num_cpus"):
        return "unknown"
    # Where no boot is recorded, a revision was measured in one go.
    when = f"boot {machine.boot}" if machine.boot else f"revision {row['revision']}"
    return f"{machine.cpu_model}, {machine.num_cpus} processors, {when}"


def completed(plain: Calibration, steps: Sequence[MeasuredStep]) -> Calibration:
    """A calibration of kernels with what steps tell beyond them."""
    sources = {record["id"]: index for index, record in enumerate(plain.records)}
    revisions = {step.case_id: str(step.row["revision"]) for step in steps}
    known = replace(plain, factors={**plain.factors, "gap_us": gap_us(steps)})
    known = replace(known, hosts=tuple(_hosts(Machine(known), steps, sources)))
    known = replace(known, factors={**known.factors, **_no_grad(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_compiled(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_selective(Machine(known), steps)})
    known = replace(known, exposures=tuple(_exposures(Machine(known), steps)))
    added = [
        {"id": name, "revision": revisions[name]} for name in list(sources)[len(plain.records) :]
    ]
    return replace(known, records=(*plain.records, *added))


def gap_us(steps: Sequence[MeasuredStep]) -> float:
    """Microseconds between kernels of profiled steps in which the device was nearly always busy."""
    gaps = []
    for step in steps:
        if step.profile is not None:
            whole = step.profile["phases"]["step"]
            # A CPU has no queue to fill: what is between its kernels is always there.
            most = BUSY if step.case.device == "cuda" else math.inf
            if whole["busy_ms"] < step.ms < most * whole["busy_ms"]:
                gaps.append((step.ms - whole["busy_ms"]) / whole["launches"] * 1e3)
    return round(median(gaps), 3) if gaps else 0.0


def _hosts(
    machine: Machine, steps: Sequence[MeasuredStep], sources: dict[str, int]
) -> list[HostSpeed]:
    """The speed of each host, from the one of its steps with most launches for the device's time.

    A step that did not wait for its host says only that the host is at least as fast.
    """
    chosen = calibrating_hosts(machine, steps)
    found = []
    for host, (step, waited) in sorted(chosen.items()):
        speeds = {
            one.name: step.phases_ms[one.name] * 1e3 / one.enqueued
            for one in machine.enqueued(step.case)
        }
        found.append(
            HostSpeed(
                host=host,
                **{f"{name}_us": round(speed, 3) for name, speed in speeds.items()},
                bound=waited,
                source=sources.setdefault(step.case_id, len(sources)),
            )
        )
    usual = [one.forward_us + one.backward_us for one in found if one.bound]
    if not usual:
        return found
    return [one for one in found if one.bound or one.forward_us + one.backward_us < median(usual)]


def calibrating_hosts(
    machine: Machine, steps: Sequence[MeasuredStep]
) -> dict[str, tuple[MeasuredStep, bool]]:
    """The step that tells the speed of each host, and whether it waited for it."""
    best: dict[str, tuple[float, MeasuredStep, bool]] = {}
    for step in steps:
        case = step.case
        plain = case.world_size == 1 and not case.compiles and case.checkpoint is None
        if case.device == "cpu":
            continue
        if not plain or "optimizer" not in step.phases_ms:
            continue
        phases = machine.enqueued(case)
        device = sum(phase.device_ms for phase in phases[:2])
        crowded = sum(phase.enqueued for phase in phases[:2]) / device
        if step.host not in best or crowded > best[step.host][0]:
            took = step.phases_ms["forward"] + step.phases_ms["backward"]
            best[step.host] = crowded, step, took > HOST_BOUND * device
    return {host: (step, waited) for host, (_, step, waited) in best.items()}


def _no_grad(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """What a forward pass without gradients takes of the host's time of one with them."""
    ratios = []
    for step in steps:
        case = step.case
        if getattr(case.task, "mode", "") != "forward" or case.compiles:
            continue
        (phase,) = machine.enqueued(case)
        host_ms = machine.host_us(step.host)["forward"] * phase.enqueued / 1e3
        named = any(one.host == step.host and one.bound for one in machine.calibration.hosts)
        if named and host_ms > HOST_BOUND * phase.device_ms:
            ratios.append(step.phases_ms["forward"] / host_ms)
    return {"no_grad": round(min(1.0, median(ratios)), 4)} if ratios else {}


def _compiled(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """What compilers left of the time between products and attention, by scope and phase."""
    left: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        compiling = step.case.compile
        if compiling is None or compiling.scope == "none" or step.case.world_size > 1:
            continue
        for phase in machine.enqueued(step.case):
            scaled = sum(phase.parts[name] for name in phase.parts if name not in UNFUSED)
            scaled -= phase.parts[GAPS]
            if phase.name != "optimizer" and scaled:
                # Not known yet, so that the usual share was taken.
                rest = step.phases_ms[phase.name] - (phase.device_ms - scaled)
                share = max(0.0, UNMEASURED_COMPILED * rest / scaled)
                left[f"compiled/{compiling.scope}/{phase.name}"].append(share)
    return {name: round(median(values), 4) for name, values in left.items()}


def _selective(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """How many times a usual launch a host takes where it decides on every operator anew."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        checkpoint = step.case.checkpoint
        if checkpoint is None or step.case.compiles or step.case.world_size > 1:
            continue
        host = machine.host_us(step.host)
        for phase in machine.enqueued(step.case):
            took = step.phases_ms[phase.name]
            if phase.name != "optimizer" and took > HOST_BOUND * phase.device_ms:
                name = f"checkpointed/{checkpoint.scope}/{phase.name}"
                ratios[name].append(took * 1e3 / (host[phase.name] * phase.enqueued))
    return {name: round(median(values), 3) for name, values in ratios.items()}


def _exposures(machine: Machine, steps: Sequence[MeasuredStep]) -> list[Exposure]:
    """What each strategy's communication added to its steps, of the device or of the host."""
    visible: dict[tuple[str, str], list[float]] = defaultdict(list)
    launches: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        case, parallel = step.case, step.case.parallel
        if parallel.data_ranks == 1 or parallel.cp > 1 or parallel.tp > 1:
            continue
        host = machine.host_us(step.host)
        alone = schedule.predict(machine.enqueued(case), (), host, 0.0, 1.0, set())
        added = step.ms - alone.median_ms
        key = parallel.name, case.precision.peak
        if any(part.name == schedule.WAITING for part in alone.parts):
            tensors = communication.num_tensors(case)
            launches[key].append(max(0.0, added) * 1e3 / host["backward"] / tensors)
        else:
            total = sum(ms for _, ms, _ in communication.gradient_traffic(machine, case))
            visible[key].append(max(0.0, added) / total)
    return [
        Exposure(
            strategy=name,
            matmul=matmul,
            visible=round(median(visible[name, matmul]), 4) if visible[name, matmul] else None,
            launches=round(median(launches[name, matmul]), 4) if launches[name, matmul] else None,
        )
        for name, matmul in sorted({*visible, *launches})
    ]
