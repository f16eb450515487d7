"""The largest batch, the longest sequence and the fewest GPUs of each strategy, by prediction.

Each is bisected on the predicted memory, over all meshes of the GPUs. Kernels that keep no scores
differ little in memory, so the first one of the machine that keeps none stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.cases.case import Case
from harness.predictions.support import Support
from harness.recommend import space
from harness.recommend.bisection import largest
from harness.recommend.enumeration import shared_parts
from harness.recommend.fitting import MemoryModel
from harness.recommend.longest import LONGEST, UNIT
from harness.recommend.question import Question
from parallel.context.attention import SequenceParallelAttention

MOST_GPUS = 1024


@dataclass(kw_only=True, slots=True, frozen=True)
class Limits:
    """What one strategy with one kind of checkpointing can do on a machine."""

    strategy: str
    checkpoint: str
    fewest_gpus: int | None
    """That train one sequence of the asked length; None if none up to :data:`MOST_GPUS` do."""
    batch: int
    """Sequences of the asked length in one step of all GPUs; 0 if none fits."""
    batch_case: Case | None
    longest: int
    """Tokens of a sequence, one on each data-parallel rank; 0 if none fits."""
    longest_case: Case | None


def limits_of(question: Question) -> list[Limits]:
    """A row for each strategy, with and without checkpointing of every block.

    Of captured steps, where the question pins them, those that CUDA graphs can hold.
    """
    names, _ = space.strategies(question)
    bases = _Bases(question)
    found = []
    for checkpoint in space.checkpoints(question):
        for name in names:
            if question.gpus == 1 and name != bases.plain:
                continue
            cases = list(bases.on(question.gpus, name, checkpoint))
            if cases or not question.is_captured:
                found.append(_limits(cases, bases, name, checkpoint))
    return found


def _limits(cases: list[Case], bases: _Bases, name: str, checkpoint: Any) -> Limits:
    batch_case = max((bases.largest_batch(case) for case in cases), key=_sequences, default=None)
    longest_case = max(
        (bases.longest(case) for case in cases),
        key=lambda case: case.seq_len if case else 0,
        default=None,
    )
    return Limits(
        strategy=name,
        checkpoint=checkpoint.label,
        fewest_gpus=bases.fewest_gpus(name, checkpoint),
        batch=_sequences(batch_case),
        batch_case=batch_case,
        longest=longest_case.seq_len if longest_case else 0,
        longest_case=longest_case,
    )


def unit_of(case: Case) -> int:
    """Tokens that lengths of a case's mesh are multiples of."""
    return math.lcm(UNIT, 2 * case.parallel.cp * case.parallel.tp)


def _sequences(case: Case | None) -> int:
    return case.batch_size * case.parallel.dp if case else 0


class _Bases:
    """Cases of one sequence on each mesh of a number of GPUs, and bisection from them."""

    def __init__(self, question: Question) -> None:
        self._question = question
        self._memory = MemoryModel()
        self._support = Support(question.machine)
        self._parts = shared_parts(question)
        self._attentions = space.usual_attentions(question)
        self.plain = str(question.choose("parallel", {}).name)

    def on(self, gpus: int, name: str, checkpoint: Any) -> Iterator[Case]:
        """One case for each legal mesh of a strategy on so many GPUs."""
        question = replace(self._question, gpus=gpus)
        for mesh in space.meshes(question):
            try:
                strategy = question.choose("parallel", {"parallel": name, **mesh.keys})
            except ValueError:
                continue
            case = self._first_supported(strategy, checkpoint)
            if case is not None:
                yield case

    def _first_supported(self, strategy: Any, checkpoint: Any) -> Case | None:
        """With the first attention that keeps no scores; else with the first."""
        kept: Case | None = None
        for attention in self._attentions:
            if isinstance(attention, SequenceParallelAttention) != (strategy.cp > 1):
                continue
            try:
                case = Case(
                    **self._parts,
                    attention=attention,
                    parallel=strategy,
                    batch_size=1,
                    checkpoint=checkpoint,
                )
            except ValueError:
                continue
            if self._support.why_not(case):
                continue
            if not attention.keeps_scores(case.attention_problem):
                return case
            kept = kept or case
        return kept

    def fits(self, case: Case) -> bool:
        usable = self._question.machine.usable_of_rank(case.world_size)
        return self._memory.peak_bytes(case, 1, case.checkpoint) <= usable

    def largest_batch(self, case: Case) -> Case | None:
        return self._largest(lambda number: replace(case, batch_size=number), 1)

    def longest(self, case: Case) -> Case | None:
        return self._largest(lambda number: replace(case, seq_len=number), unit_of(case))

    def _largest(self, make: Callable[[int], Case], unit: int) -> Case | None:
        """The case of the largest multiple of ``unit`` that fits; None if one unit does not."""
        number = largest(lambda number: self.fits(make(number * unit)), LONGEST // unit)
        return make(number * unit) if number else None

    def fewest_gpus(self, name: str, checkpoint: Any) -> int | None:
        gpus = 1
        while gpus <= MOST_GPUS:
            if any(self.fits(case) for case in self.on(gpus, name, checkpoint)):
                return gpus
            gpus *= 2
        return None
