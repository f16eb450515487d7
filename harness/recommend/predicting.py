"""Which combinations get a predicted time, and their order by what was asked for.

A time is predicted for every combination that may be best. Left out are those that another one of
the same attention and mesh beats whatever the device: checkpointing where nothing needs it, a small
micro-batch where two larger ones fit, and compilation of what is far behind without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.cases.case import Case
from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration

LARGEST_BATCHES = 2
"""Micro-batches of one base that are predicted: the largest that fit."""

COMPILED = 200
"""The fastest combinations without compilation, which are predicted with it too."""

COMPILED_WITHIN = 2.0
"""No further behind the fastest than this factor: compilation gains less."""


class Prediction(Protocol):
    """The time of a training step, as a :class:`harness.forecast.StepPrediction` has it."""

    @property
    def median_ms(self) -> float: ...
    @property
    def low_ms(self) -> float: ...
    @property
    def high_ms(self) -> float: ...
    @property
    def parts(self) -> tuple[Any, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...


class TimeModel(Protocol):
    """Predicts training steps on one machine, from its calibration."""

    def step(self, case: Case) -> Prediction: ...

    def why_not(self, case: Case) -> str | None: ...


@dataclass(kw_only=True, slots=True)
class Predicted:
    """Combinations with a predicted time, the best first."""

    ranked: list[Combination] = field(default_factory=list)
    num_without: int = 0
    """Combinations that fit and were left out, since others beat them."""
    refused: dict[str, int] = field(default_factory=dict)
    """Bases whose time the calibration cannot predict, by the reason."""


def predict(
    found: Enumeration, fitting: list[Combination], times: TimeModel, goal: str
) -> Predicted:
    """Predict the times that may matter, and rank by the goal."""
    result = Predicted()
    refused: dict[int, str | None] = {}
    eager: list[Combination] = []
    for item in _worth_a_time(fitting, goal):
        key = id(item.base)
        if key not in refused:
            refused[key] = times.why_not(item.base)
            if reason := refused[key]:
                result.refused[reason] = result.refused.get(reason, 0) + 1
        if refused[key] is None:
            item.step = times.step(item.case)
            eager.append(item)
    eager.sort(key=_ms_a_token)
    if eager:
        limit = COMPILED_WITHIN * _ms_a_token(eager[0])
        for item in [one for one in eager[:COMPILED] if _ms_a_token(one) <= limit]:
            for compilation in found.compilations[1:]:
                variant = item.compiled(compilation)
                if times.why_not(variant.case) is None:
                    variant.step = times.step(variant.case)
                    eager.append(variant)
    result.ranked = sorted(eager, key=order_of(goal))
    result.num_without = len(fitting) * len(found.compilations) - len(result.ranked)
    return result


def _worth_a_time(fitting: Iterable[Combination], goal: str) -> list[Combination]:
    """Those that no other of the same attention and mesh beats."""
    items = list(fitting)
    if goal == "tokens_per_s":
        plain = {id(item.base) for item in items if item.checkpoint_label == "none"}
        items = [
            item for item in items if item.checkpoint_label == "none" or id(item.base) not in plain
        ]
    groups: dict[tuple[int, int, str], list[Combination]] = {}
    for item in items:
        key = (id(item.base.attention), id(item.base.parallel), item.checkpoint_label)
        groups.setdefault(key, []).append(item)
    smallest_first = goal == "memory"
    kept = []
    for group in groups.values():
        group.sort(key=lambda item: item.base.batch_size, reverse=not smallest_first)
        kept += group[:LARGEST_BATCHES]
    return kept


def _ms_a_token(item: Combination) -> float:
    step_ms = item.step_ms
    return float("inf") if step_ms is None else item.batch_ms(step_ms) / item.batch_tokens


def order_of(goal: str) -> Callable[[Combination], tuple[float, ...]]:
    """The sorting key of a goal: of what is equal by it, the faster, then the simpler first."""

    def by_time(item: Combination) -> tuple[float, ...]:
        taken = _ms_a_token(item)
        equal = round(math.log(taken) / EQUAL) if taken < float("inf") else float("inf")
        return equal, *item.complexity

    def by_memory(item: Combination) -> tuple[float, ...]:
        return round(item.memory_gib, 2), *by_time(item)

    def by_length(item: Combination) -> tuple[float, ...]:
        return -item.base.seq_len, *by_time(item)

    return {"memory": by_memory, "longest_sequence": by_length}.get(goal, by_time)


EQUAL = 0.001
"""Relative difference of predicted times below which the simpler of two comes first."""


def front(items: Iterable[Combination]) -> list[Combination]:
    """Those that no other beats in both memory and time, by memory."""
    best = float("inf")
    kept = []
    for item in sorted(items, key=lambda one: (one.memory_bytes, _ms_a_token(one))):
        if _ms_a_token(item) < best:
            best = _ms_a_token(item)
            kept.append(item)
    return kept
