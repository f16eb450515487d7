"""What communication adds to training steps under each strategy, on the device and on the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from harness.cases.case import Case
from harness.forecast import communication, schedule
from harness.forecast.calibration import Exposure
from harness.forecast.machines import Machine
from harness.forecast.measured import MeasuredStep, is_one_number, is_plain, problem_of
from harness.forecast.prediction import WAITING, StepPrediction

FOLLOWS = 0.3
"""Share of communication's own time that a step waits for after its backward pass, above which a
strategy is one that begins then."""


def exposures(machine: Machine, steps: Sequence[MeasuredStep]) -> list[Exposure]:
    """What each strategy's communication added to its steps, of the device or of the host.

    Few steps tell of a strategy: what is visible under most is one more of them.
    """
    told = [_shared(machine, step) for step in steps if _shares_gradients(step.case)]
    # Where no collective operation was measured, nothing is told of exposure.
    by_strategy = _by_strategy([one for one in told if one.exchanged_ms])
    work = {key: _host_work(alike) for key, alike in by_strategy.items()}
    plain = {
        problem_of(step.case): step for step in steps if is_plain(step) and is_one_number(step)
    }
    found = []
    for (name, matmul), alike in sorted(by_strategy.items()):
        # A host's work is the same in every format.
        formats = [work[name, matmul], *(work[key] for key in sorted(work) if key[0] == name)]
        host_work = next((one for one in formats if one.backward is not None), HostWork())
        shares = [_visible(machine, one, host_work, plain) for one in alike]
        known = [share for share in shares if share is not None]
        if not known and work[name, matmul].backward is None:
            continue
        follows = median(one.after_ms / one.exchanged_ms for one in alike)
        found.append(
            Exposure(
                strategy=name,
                matmul=matmul,
                visible=_median([*known, communication.usual_visible(machine, matmul)])
                if known
                else None,
                launches=work[name, matmul].backward,
                forward_launches=work[name, matmul].forward,
                follows=round(follows, 4) if follows > FOLLOWS else None,
            )
        )
    return found


@dataclass(kw_only=True, slots=True, frozen=True)
class Shared:
    """A measured step of replicas, beside what it is predicted to take without communication."""

    step: MeasuredStep
    host_us: Mapping[str, float]
    phases: list[schedule.Phase]
    alone: StepPrediction
    exchanged_ms: float
    """Communication by itself."""

    @property
    def after_ms(self) -> float:
        """Communication after the backward pass."""
        return self.step.phases_ms.get("communication", 0.0)

    @property
    def waits(self) -> bool:
        """Whether the device waits for its host even without communication."""
        return any(part.name == WAITING for part in self.alone.parts)


@dataclass(kw_only=True, slots=True, frozen=True)
class HostWork:
    """Launches' worth of a host's time for each tensor; None where no step tells."""

    forward: float | None = None
    backward: float | None = None


def _shares_gradients(case: Case) -> bool:
    parallel = case.parallel
    return parallel.data_ranks > 1 and parallel.cp == 1 and parallel.tp == 1


def _shared(machine: Machine, step: MeasuredStep) -> Shared:
    host_us = machine.host_us(step.host)
    load = machine.load(step.case, step.ms)
    phases = machine.under_load(machine.enqueued(step.case), load, set())
    return Shared(
        step=step,
        host_us=host_us,
        phases=phases,
        alone=schedule.predict(phases, (), host_us, 0.0, 1.0, set()),
        exchanged_ms=sum(ms for _, ms, _ in communication.gradient_traffic(machine, step.case)),
    )


def _by_strategy(told: Sequence[Shared]) -> dict[tuple[str, str], list[Shared]]:
    """By the names of the strategy and of the products' format."""
    found: dict[tuple[str, str], list[Shared]] = defaultdict(list)
    for one in told:
        found[one.step.case.parallel.name, one.step.case.precision.peak].append(one)
    return found


def _host_work(alike: Sequence[Shared]) -> HostWork:
    """What steps that waited for their host tell of a strategy's work there."""
    forward, backward = [], []
    for one in alike:
        if not one.waits:
            continue
        tensors = communication.num_tensors(one.step.case)
        added = max(0.0, one.step.ms - one.alone.median_ms - one.after_ms)
        earlier = one.step.phases_ms["forward"] - one.alone.phases_ms["forward"]
        earlier = min(max(0.0, earlier), added)
        forward.append(earlier * 1e3 / one.host_us["forward"] / tensors)
        backward.append((added - earlier) * 1e3 / one.host_us["backward"] / tensors)
    return HostWork(forward=_median(forward), backward=_median(backward))


def _visible(
    machine: Machine,
    one: Shared,
    work: HostWork,
    plain: Mapping[tuple[object, ...], MeasuredStep],
) -> float | None:
    """Communication that a step shows, as a share of its own time.

    None if its host hides it, or if the step's time is not one number.
    """
    if one.waits or not is_one_number(one.step):
        return None
    case = one.step.case
    tensors = communication.num_tensors(case)
    exchanges = [
        schedule.Exchange(
            name="",
            phase=phase,
            visible_ms=0.0,
            hidden_ms=0.0,
            error_ms=0.0,
            launches=tensors * (launches or 0.0),
        )
        for phase, launches in (("forward", work.forward), ("backward", work.backward))
    ]
    enqueued = schedule.predict(one.phases, exchanges, one.host_us, 0.0, 1.0, set())
    if any(part.name == WAITING for part in enqueued.parts):
        return None
    added = one.step.ms - enqueued.median_ms
    if (alike := plain.get(problem_of(case))) is not None:
        # What the same problem took longer than predicted is not communication.
        added -= alike.ms - machine.step(alike.case, host=alike.host).median_ms
    return max(0.0, added) / one.exchanged_ms


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None
