"""What training steps tell that kernels alone do not: hosts, gaps, compilers, hidden communication.

Each is a ratio of what steps took beyond the predicted time of their kernels; medians over steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.forecast.calibration import Calibration, HostSpeed
from harness.forecast.exposures import exposures
from harness.forecast.machines import (
    GAPS,
    UNFUSED,
    UNMEASURED_COMPILED,
    Machine,
    at_full_clocks,
    compiled_launches_name,
    is_captured,
)
from harness.forecast.measured import MeasuredStep, is_one_number, is_plain

HOST_BOUND = 1.25
"""Measured over predicted time of the device above which a step has waited for its host."""

PHASES = ("forward", "backward", "optimizer")
"""In the order in which a host enqueues them."""

LAUNCHED_LAST = 0.5
"""Share of a phase's time on the device that is launched at its end, above which it tells nothing
of a host that was ahead: what that took is lost in what the kernels are off by."""

BUSY = 1.1
"""Measured time over that of kernels below which a device was nearly always busy."""


LOADED = 0.5
"""Of all that load may cost, from where on a step tells it."""


def completed(plain: Calibration, steps: Sequence[MeasuredStep]) -> Calibration:
    """A calibration of kernels with what steps tell beyond them."""
    captured = [step for step in steps if is_captured(step.case)]
    steps = [step for step in steps if not is_captured(step.case)]
    sources = {record["id"]: index for index, record in enumerate(plain.records)}
    revisions = {step.case_id: str(step.row["revision"]) for step in steps}
    known = replace(plain, factors={**plain.factors, "gap_us": gap_us(steps)})
    known = replace(known, hosts=tuple(_hosts(Machine(known), steps, sources)))
    known = replace(known, factors={**known.factors, **_load(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_no_grad(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_compiled(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_checkpointed(Machine(known), steps)})
    known = replace(known, factors={**known.factors, **_captured(Machine(known), captured)})
    known = replace(known, exposures=tuple(exposures(Machine(known), steps)))
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
    """The speed of each host, from all of its steps and, for one, from what hosts usually do."""
    chosen = calibrating_hosts(machine, steps)
    speeds: dict[str, dict[str, float]] = defaultdict(dict)
    for phase in PHASES:
        # Of what hosts took for the phases before follows how far ahead of the device they were.
        timed: dict[str, list[LaunchTime]] = defaultdict(list)
        for step in steps:
            if step.host in chosen and is_plain(step):
                known = launch_times(machine, step, speeds[step.host])
                timed[step.host] += [one for one in known if one.phase == phase]
        waits = [[one.us for one in times if one.waited] for times in timed.values()]
        usual = [_middle(times) for times in waits if times]
        for host in chosen:
            speeds[host][phase] = host_speed(timed[host], usual)
    found = []
    for host, (step, waited) in sorted(chosen.items()):
        named = {f"{phase}_us": round(us, 3) for phase, us in speeds[host].items()}
        source = sources.setdefault(step.case_id, len(sources))
        found.append(HostSpeed(host=host, **named, bound=waited, source=source))
    middle = [one.forward_us + one.backward_us for one in found if one.bound]
    if not middle:
        return found
    return [one for one in found if one.bound or one.forward_us + one.backward_us < median(middle)]


@dataclass(kw_only=True, slots=True, frozen=True)
class LaunchTime:
    """Microseconds that a host took for each launch of a phase."""

    phase: str
    us: float
    waited: bool
    """Whether the device waited for it; if not, the host took at most as long."""


def launch_times(
    machine: Machine, step: MeasuredStep, speeds: Mapping[str, float]
) -> list[LaunchTime]:
    """The host's time of each phase of a step that tells it.

    Args:
        speeds: microseconds that the host takes for a launch of each phase, as far as they are
            known: where the device did not wait for it, the host began the next phase as much
            earlier as it was ahead.
    """
    found = []
    host_end = device_end = 0.0
    late = True
    for phase in machine.enqueued(step.case):
        took_ms = step.phases_ms[phase.name]
        waited = took_ms > HOST_BOUND * phase.device_ms
        if waited and not late:
            # The device had caught up, when is not known.
            host_end = device_end
        device_end += took_ms
        # The device has the last kernels of a phase to run when the host is done with it.
        host_ms = device_end - host_end - phase.last_ms
        us = max(host_ms, 0.1 * took_ms) * 1e3 / phase.enqueued
        if waited or late or phase.last_ms < LAUNCHED_LAST * phase.device_ms:
            found.append(LaunchTime(phase=phase.name, us=us, waited=waited))
        known_us = us if waited else speeds.get(phase.name, us)
        host_end = min(device_end, host_end + known_us * phase.enqueued / 1e3)
        late = waited
    return found


def host_speed(times: Sequence[LaunchTime], usual: Sequence[float]) -> float:
    """The middle of a host's times, with what hosts usually take as one more of them.

    Nothing is known of a host, and of any, where both are empty: it takes no time.
    """
    waits = [one.us for one in times if one.waited]
    limits = [one.us for one in times if not one.waited]
    found = [_middle([*waits, _middle(usual)])] if waits else []
    return min(found + limits, default=_middle(usual) if usual else 0.0)


def _middle(values: Sequence[float]) -> float:
    """The median, of logarithms."""
    return math.exp(median(map(math.log, values)))


def calibrating_hosts(
    machine: Machine, steps: Sequence[MeasuredStep]
) -> dict[str, tuple[MeasuredStep, bool]]:
    """The step that tells the speed of each host, and whether it waited for it."""
    best: dict[str, tuple[float, MeasuredStep, bool]] = {}
    for step in steps:
        if not is_plain(step):
            continue
        phases = machine.enqueued(step.case)
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
    """What compilers left of the time between products and attention, and of the host's launches,
    by scope and phase."""
    left: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        compiling = step.case.compile
        if compiling is None or compiling.scope == "none" or step.case.world_size > 1:
            continue
        host, enqueued = machine.host_us(step.host), compiled_launches_name(compiling)
        slower = 1 + machine.calibration.factors.get("load", 0.0) * machine.load(step.case, step.ms)
        for phase in machine.enqueued(step.case):
            took_ms = step.phases_ms[phase.name]
            device_ms = step.device_ms.get(phase.name, took_ms) / slower
            scaled = sum(phase.parts[name] for name in phase.parts if name not in UNFUSED)
            scaled -= phase.parts[GAPS]
            if phase.name == "optimizer" or not scaled:
                continue
            # Not known yet, so that the usual shares were taken.
            share = max(0.0, UNMEASURED_COMPILED * (device_ms - phase.device_ms + scaled) / scaled)
            left[f"compiled/{compiling.scope}/{phase.name}"].append(share)
            if took_ms > HOST_BOUND * device_ms and host[phase.name]:
                usual = machine.compiled_launches(compiling, phase.name)
                launches = took_ms * 1e3 / host[phase.name]
                left[f"{enqueued}/{phase.name}"].append(usual * launches / phase.enqueued)
    return {name: round(median(values), 4) for name, values in left.items()}


def _checkpointed(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Launches' worth of a host's time that checkpointing adds to a block, by scope and phase."""
    added: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        case = step.case
        if case.checkpoint is None or case.compiles or case.world_size > 1:
            continue
        assert case.model is not None, "training steps have a model"
        host, layers = machine.host_us(step.host), case.model.num_layers
        phases = machine.enqueued(case)[:2]
        for phase, one in zip(phases, launch_times(machine, step, host), strict=False):
            if one.waited and host[phase.name]:
                launches = one.us * phase.enqueued / host[phase.name] - phase.enqueued
                name = f"checkpointed/{case.checkpoint.scope}/{phase.name}"
                added[name].append(max(0.0, launches / layers))
    return {name: round(median(values), 3) for name, values in added.items()}


def _captured(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Microseconds between kernels of steps that are replayed from CUDA graphs."""
    gaps = []
    for step in steps:
        if step.case.world_size > 1:
            continue
        phases = machine.enqueued(step.case)
        phases = machine.under_load(phases, machine.load(step.case, step.ms), set())
        between_ms = sum(phase.parts[GAPS] for phase in phases)
        kernels_ms = sum(phase.device_ms for phase in phases) - between_ms
        launches = sum(phase.launches for phase in phases)
        gaps.append(max(0.0, step.ms - kernels_ms) / launches * 1e3)
    return {"captured_gap_us": round(median(gaps), 3)} if gaps else {}


def _load(machine: Machine, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """What sustained load adds to the time of passes: see :mod:`harness.forecast.clocks`."""
    costs = []
    for step in steps:
        case, host = step.case, machine.host_us(step.host)
        if not is_plain(step) or not is_one_number(step):
            continue
        phases = machine.enqueued(case)
        load = machine.load(case, at_full_clocks(phases, (), host))
        passes = phases[:2]
        device_ms = sum(phase.device_ms for phase in passes)
        took_ms = sum(step.phases_ms[phase.name] for phase in passes)
        host_ms = sum(host[phase.name] * phase.enqueued / 1e3 for phase in passes)
        if load > LOADED and host_ms < device_ms:
            costs.append((took_ms / device_ms - 1) / load)
    return {"load": round(max(0.0, median(costs)), 4)} if costs else {}
