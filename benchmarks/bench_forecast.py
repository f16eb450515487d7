"""Predicted against measured time of every committed training step that the prediction never saw.

Kernels are calibrated by the roofline, attention, collectives and kernel profiles; the speed of a
host by one step of it, which is not scored. A step is predicted without what is like it:

    one rank            every record of its model, kernel profiles included
    checkpointed        every checkpointed step with its attention
    several ranks       every step of its model in its precision, batch and length

python -m benchmarks.bench_forecast [results/h200]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import harness
from harness.cases.case import label
from harness.forecast import build, steps
from harness.forecast.machines import Machine
from harness.forecast.measured import MeasuredStep, of_frame
from harness.forecast.prediction import StepPrediction
from harness.paths import ROOT
from harness.recommend.answer import TIED
from models.accounting import forward_flops

NOISY = {"spread", "bimodal", "busy", "drift"}
"""Marks of steps whose own time is not one number."""

NAIVE_MFU = 0.35


@dataclass(kw_only=True, slots=True, frozen=True)
class Scored:
    """One step, predicted without those like it."""

    group: str
    step: MeasuredStep
    found: StepPrediction

    @property
    def ratio(self) -> float:
        return self.found.median_ms / self.step.ms

    @property
    def within(self) -> bool:
        return abs(self.ratio - 1) <= 0.1

    @property
    def covered(self) -> bool:
        return self.found.low_ms <= self.step.ms <= self.found.high_ms

    @property
    def quiet(self) -> bool:
        return not NOISY & set(self.step.row["disturbed"] or ())


def group_of(step: MeasuredStep) -> str:
    """The steps that it is predicted without, by name."""
    case = step.case
    assert case.model is not None, "training steps have a model"
    if case.world_size > 1:
        return f"{case.world_size} ranks, {case.precision.name}, {case.batch_size} x {case.seq_len}"
    if case.checkpoint is not None:
        return f"checkpointed, {case.attention.name}"
    return f"one rank, {case.model.name}"


def is_like(step: MeasuredStep, group: str, first: MeasuredStep) -> bool:
    """Whether a group's steps are predicted without this one."""
    case, held = step.case, first.case
    assert case.model is not None, "training steps have a model"
    assert held.model is not None, "training steps have a model"
    if held.world_size > 1:
        same = case.precision.name, case.batch_size, case.seq_len, case.model.name
        return same == (held.precision.name, held.batch_size, held.seq_len, held.model.name)
    if held.checkpoint is not None:
        return group_of(step) == group
    return case.model.name == held.model.name


def scored(results: Path) -> list[Scored]:
    """Every step but those that tell the speed of a host."""
    frame = harness.load(results)
    plain, measured = build.kernels("h200", frame), of_frame(frame)
    whole = Machine(steps.completed(plain, measured))
    hosts = {step.case_id for step, _ in steps.calibrating_hosts(whole, measured).values()}
    groups: dict[str, list[MeasuredStep]] = defaultdict(list)
    for step in measured:
        groups[group_of(step)].append(step)
    found = []
    for group, members in sorted(groups.items()):
        out = {step.case_id for step in measured if is_like(step, group, members[0])}
        kept = [step for step in measured if step.case_id not in out or step.case_id in hosts]
        machine = Machine(steps.completed(build.without(plain, out), kept))
        found += [
            Scored(group=group, step=step, found=machine.step(step.case, host=step.host))
            for step in members
            if step.case_id not in hosts
        ]
    return found


def print_shares(name: str, items: list[Scored]) -> None:
    if not items:
        return
    errors = [abs(item.ratio - 1) for item in items]
    print(
        f"{name:34}{len(items):6}{sum(item.within for item in items) / len(items):12.0%}"
        f"{median(errors):10.1%}{max(errors):9.0%}"
        f"{sum(item.covered for item in items) / len(items):12.0%}"
    )


def print_winners(items: list[Scored]) -> None:
    """Of which cases that differ in one choice the faster one is predicted to be faster.

    An answer names predictions within 2% as ties (harness/recommend/answer.py): counted besides is
    where the fastest is the predicted one or such a tie.
    """
    for name, varies in (
        ("attention", lambda case: label(case.attention)),
        ("strategy", lambda case: label(case.parallel)),
    ):
        sets: dict[str, list[Scored]] = defaultdict(list)
        for item in items:
            values = item.step.case.to_dict()
            values.pop("attention" if name == "attention" else "parallel")
            values.pop("seed")
            sets[f"{sorted(values.items(), key=str)} {item.step.case.world_size}"].append(item)
        right = total = named = 0
        regret = []
        for members in sets.values():
            if len({varies(item.step.case) for item in members}) < 2:
                continue
            chosen = min(members, key=lambda item: item.found.median_ms)
            best = min(members, key=lambda item: item.step.ms)
            total += 1
            right += varies(chosen.step.case) == varies(best.step.case)
            named += best.found.median_ms <= (1 + TIED) * chosen.found.median_ms
            regret.append(chosen.step.ms / best.step.ms - 1)
        if total:
            print(
                f"right {name}: {right} of {total}, {named} with ties; regret at most "
                f"{max(regret):.1%}, {sum(value <= 0.03 for value in regret)} within 3%"
            )


def naive_share(items: list[Scored]) -> float:
    """The share within 10% of FLOPs over 35% of the peak rate, the estimate that there was."""
    within = []
    for item in items:
        case = item.step.case
        assert case.model is not None, "training steps have a model"
        peak = item.step.row["peak_tflops"]
        times = 1 if getattr(case.task, "mode", "") == "forward" else 3
        ranks = case.parallel.cp * case.parallel.tp
        flops = times * forward_flops(case.model, case.batch_size, case.seq_len) / ranks
        within.append(abs(flops / (NAIVE_MFU * peak * 1e9) / item.step.ms - 1) <= 0.1)
    return sum(within) / len(within)


def main(results: Path) -> None:
    items = scored(results)
    header = f"{'':34}{'steps':>6}{'within 10%':>12}{'median':>10}{'worst':>9}{'in 90% int.':>12}"
    print(header)
    for group in sorted({item.group for item in items}):
        print_shares(group, [item for item in items if item.group == group])
    print_shares("all", items)
    quiet = [item for item in items if item.quiet]
    print_shares("all whose own time is one number", quiet)
    print(f"FLOPs over {NAIVE_MFU:.0%} of peak: {naive_share(items):.0%} within 10%")
    print_winners(items)
    print("\nOff by more than 10%, worst first: predicted / measured ms, 90% interval, marks")
    for item in sorted(items, key=lambda item: -abs(item.ratio - 1)):
        if not item.within:
            found, marks = item.found, ", ".join(item.step.row["disturbed"] or ())
            print(
                f"{item.ratio:6.2f} {found.median_ms:8.1f} / {item.step.ms:8.1f}"
                f"  [{found.low_ms:.1f}, {found.high_ms:.1f}]  {item.step.case.title}  {marks}"
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")
