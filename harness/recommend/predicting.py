"""Which combinations get a predicted time, and their order by what was asked for.

A time is predicted for every combination that may be best. Left out are those that another one of
the same attention and mesh beats whatever the device: checkpointing where nothing needs it, a small
micro-batch where two larger ones fit, compilation of what is far behind without it, and capture in
CUDA graphs of what does not wait for its host. A captured step that is no faster than predictions
tell apart comes after the same one launched, which is simpler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.cases.case import Case
from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration

LARGEST_BATCHES = 2
"""Micro-batches of one base that are predicted: the largest that fit."""

VARIED = 200
"""The fastest combinations in their first variant, which are predicted in the others too."""

VARIED_WITHIN = 2.0
"""No further behind the fastest than this factor: compilation gains less."""

TIED = 0.02
"""Predictions that differ by less are not told apart; measuring is."""


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
    def waiting_ms(self) -> float: ...
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
    refused: dict[str, int] = field(default_factory=dict)
    """Bases whose time the calibration cannot predict, by the reason."""


def predict(
    found: Enumeration, fitting: list[Combination], times: TimeModel, goal: str
) -> Predicted:
    """Predict the times that may matter, and rank by the goal."""
    result = Predicted()
    refused: dict[int, str | None] = {}
    plain: list[Combination] = []
    for item in _worth_a_time(fitting, goal):
        key = id(item.base)
        if key not in refused:
            refused[key] = times.why_not(item.base)
            if reason := refused[key]:
                result.refused[reason] = result.refused.get(reason, 0) + 1
        if refused[key] is None:
            item.step = times.step(item.case)
            plain.append(item)
    varied = [one for item in _near(plain) for one in _in_variants(found, item, times)]
    result.ranked = sorted([*plain, *varied], key=order_of(goal))
    return result


def _near(plain: list[Combination]) -> list[Combination]:
    """The fastest, and of those that can be captured the fastest but for waiting."""
    near: dict[int, Combination] = {}
    for items, key in (
        (plain, _ms_a_token),
        ([item for item in plain if item.can_capture], _busy_ms_a_token),
    ):
        ranked = sorted(items, key=key)[:VARIED]
        near |= {id(one): one for one in ranked if key(one) <= VARIED_WITHIN * key(ranked[0])}
    return list(near.values())


def _in_variants(found: Enumeration, item: Combination, times: TimeModel) -> Iterator[Combination]:
    """A combination's further variants with their times, launched ones first."""
    launched: list[Combination] = [] if item.is_captured else [item]
    for variant in found.variants_of(item)[1:]:
        one = item.varied(variant)
        if times.why_not(one.case) is not None:
            continue
        if not one.is_captured:
            one.step = times.step(one.case)
            launched.append(one)
            yield one
            continue
        alike = [other for other in launched if _scope(other) == _scope(one)]
        same = [other for other in alike if other.case.compile == variant.compile]
        if same and not same[0].step.waiting_ms:
            continue
        one.step = times.step(one.case)
        fastest = min(alike, key=_ms_a_token, default=None)
        if fastest is not None and _ms_a_token(fastest) < (1 + TIED) * _ms_a_token(one):
            one.tied_with = fastest
        yield one


def _scope(item: Combination) -> str:
    compiling = item.case.compile
    return "none" if compiling is None else compiling.scope


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


def _busy_ms_a_token(item: Combination) -> float:
    """As if no host were waited for."""
    step = item.step
    return _ms_a_token(item) * (1 - step.waiting_ms / step.median_ms)


def order_of(goal: str) -> Callable[[Combination], tuple[float, ...]]:
    """The sorting key of a goal: of what is equal by it, the faster, then the simpler first.

    Where memory decides, launched steps come before captured ones, which are taken to need as much.
    """

    def by_time(item: Combination) -> tuple[float, ...]:
        taken = _ms_a_token(item)
        if item.tied_with is not None and item.measured_ms is None:
            taken = max(taken, _ms_a_token(item.tied_with))
        equal = round(math.log(taken) / EQUAL) if taken < float("inf") else float("inf")
        return equal, *item.complexity

    def by_memory(item: Combination) -> tuple[float, ...]:
        gib = item.memory_gib
        # Of a model that takes megabytes, three digits.
        equal = round(gib, 2) if gib > 1 else float(f"{gib:.3g}")
        return equal, item.is_captured, *by_time(item)

    def by_length(item: Combination) -> tuple[float, ...]:
        return -item.base.seq_len, item.is_captured, *by_time(item)

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
