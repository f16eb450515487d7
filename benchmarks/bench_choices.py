"""What a recommendation would have chosen among the steps that records hold, and what that costs.

A problem is a model at one batch, length and precision on so many GPUs, of which at least three
ways to train it were measured. Each is predicted as in :mod:`benchmarks.bench_forecast`, without
the steps like it. *Predicted* is the way that ``attnbench recommend measure=false`` would answer;
*chosen* the fastest, as measured, of the few that are predicted to be fastest, which it measures in
turns otherwise. Strategies that a later one improves on are never chosen, but may be the best.
Regret is how much longer than the best of all ways one takes. Worst first:

python -m benchmarks.bench_choices [results/h200]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_forecast import Scored, scored
from harness.cases.case import label
from harness.commands.recommend import CANDIDATES
from harness.paths import ROOT
from parallel import STRATEGIES

FEWEST = 3
"""Ways to train, of a problem that says something."""

IMPROVED = {entry.target.improves_on for entry in STRATEGIES}
"""Names of strategies that a later one improves on."""

WITHIN = 0.03
"""The regret that a choice may have."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Problem:
    """The ways to train one model on one number of GPUs that were measured, by predicted time."""

    name: str
    ways: list[Scored]

    @property
    def best(self) -> Scored:
        return min(self.ways, key=lambda way: way.step.ms)

    @property
    def candidates(self) -> list[Scored]:
        """The few that a recommendation would measure."""
        return [way for way in self.ways if way.step.case.parallel.name not in IMPROVED][
            :CANDIDATES
        ]

    @property
    def predicted(self) -> Scored:
        return self.candidates[0]

    @property
    def chosen(self) -> Scored:
        return min(self.candidates, key=lambda way: way.step.ms)

    @property
    def is_open(self) -> bool:
        """Whether it has more ways than a recommendation would measure."""
        return len(self.ways) > CANDIDATES

    def regret(self, way: Scored) -> float:
        return way.step.ms / self.best.step.ms - 1


def way_of(item: Scored) -> str:
    """What a recommendation chooses, in words."""
    case = item.step.case
    words = [label(case.attention)]
    if case.world_size > 1:
        words.append(label(case.parallel))
    if case.checkpoint is not None:
        words.append(f"checkpoint={case.checkpoint.label}")
    if case.compile is not None and case.compiles:
        words.append(f"compile={case.compile.label}")
    if getattr(case.task, "cuda_graph", False):
        words.append("captured")
    return " ".join(words)


def problems(items: list[Scored]) -> list[Problem]:
    """Those with enough ways; of a way that was measured several times, the last."""
    found: dict[str, dict[str, Scored]] = defaultdict(dict)
    for item in items:
        case = item.step.case
        assert case.model is not None, "training steps have a model"
        if getattr(case.task, "mode", "") != "train_step":
            continue
        gpus = f" on {case.world_size}" if case.world_size > 1 else ""
        shape = f"{case.model.name} {case.precision.name} {case.batch_size} x {case.seq_len}{gpus}"
        found[shape][way_of(item)] = item
    return [
        Problem(name=name, ways=sorted(ways.values(), key=lambda way: way.found.median_ms))
        for name, ways in found.items()
        if len(ways) >= FEWEST
    ]


def share_within(what: str, regrets: list[float]) -> str:
    within = sum(regret <= WITHIN for regret in regrets)
    return f"{what}: {within} of {len(regrets)} within {WITHIN:.0%}, at most {max(regrets):.1%}"


def main(results: Path) -> None:
    found = problems(scored(results))
    if not found:
        sys.exit(f"{results}: no records of {FEWEST} ways to train one model on as many GPUs")
    print(
        f"{'problem':33}{'ways':>5}{'predicted':>11}{'measured':>10}{'regret':>8}{'chosen':>9}"
        f"{'best':>9}{'regret':>8}  chosen; best"
    )
    for item in sorted(found, key=lambda one: -one.regret(one.chosen) - one.regret(one.predicted)):
        names = dict.fromkeys((way_of(item.chosen), way_of(item.best)))
        print(
            f"{item.name:33}{len(item.ways):5}{item.predicted.found.median_ms:11.1f}"
            f"{item.predicted.step.ms:10.1f}{item.regret(item.predicted):8.1%}"
            f"{item.chosen.step.ms:9.1f}{item.best.step.ms:9.1f}{item.regret(item.chosen):8.1%}"
            f"  {'; '.join(names)}"
        )
    print(share_within("regret of what is predicted", [x.regret(x.predicted) for x in found]))
    open_ones = [item for item in found if item.is_open]
    if open_ones:
        regrets = [item.regret(item.chosen) for item in open_ones]
        print(share_within(f"of what is chosen, of more than {CANDIDATES} ways", regrets))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "h200")
