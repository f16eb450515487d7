"""Finds the best few by short measurements, where no calibration predicts times.

One axis after another, each from the best of those before it: attention, mesh and strategy,
micro-batch, compilation and capture in CUDA graphs. In the first variant that is faster than the
plain one attention and micro-batch are tried once more before further variants are, since
compilation gains more with some than with others; and in the best one, if it is another.
Activations are checkpointed where memory asks for it. A few steps of each are measured, and the
contest that follows decides. A processor takes about as long for each token of any micro-batch, so
that attention is tried on its smallest; a GPU needs the largest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration
from harness.recommend.measuring import FIRST_ROUNDS, Bench

BEST = 3
"""Finalists that the contest decides among."""

ENOUGH = 0.3
"""A candidate that is so much slower than the best in a few steps is none to go on from."""


def screen(found: Enumeration, fitting: list[Combination], bench: Bench) -> list[Combination]:
    """The best few of what fits, the fastest first, within the time that ``bench`` has."""
    begun_s = time.monotonic()
    ends_s = begun_s + SHARE * bench.budget_s
    measured: list[Combination] = []

    def try_out(candidates: Iterable[Combination]) -> None:
        known = {one.case.id for one in measured}
        new = [item for item in candidates if item.case.id not in known]
        quickly = [item for item in new if not item.case.compiles]
        # Compilation takes longer than all the rest together, so that time may end before it.
        slowly = [[item] for item in new if item.case.compiles]
        for group in filter(None, [quickly, *slowly]):
            # Without a first one there is no answer.
            if not measured or time.monotonic() < ends_s:
                bench.screen(group)
                measured.extend(group)

    def best(number: int = 1) -> list[Combination]:
        return sorted((one for one in measured if one.measured_ms), key=_ms_a_batch)[:number]

    def by_time(items: list[Combination]) -> list[Combination]:
        """Attention that was faster first, as time may end."""
        known = {_attention(one): one.measured_ms or math.inf for one in reversed(measured)}
        return sorted(items, key=lambda item: known.get(_attention(item), math.inf))

    def again_in_variant() -> None:
        for axis in (_attention, _batch):
            for leader in best():
                if leader.variant is not None:
                    try_out(_in_variant(leader, _differing(leader, by_time(fitting), axis), found))

    plain = _plain(fitting)
    if not plain:
        return []
    try_out(_differing(plain[0], plain, _attention))
    for axis in (_mesh, _batch):
        for leader in best():
            try_out(_differing(leader, fitting, axis))
    variants = [variant for leader in best() for variant in found.variants_of(leader)[1:]]
    varied = False
    for variant in variants:
        for leader in best():
            if variant in found.variants_of(leader):
                try_out([leader.varied(variant)])
        for leader in best():
            if leader.variant is not None and not varied:
                varied = True
                again_in_variant()
    again_in_variant()
    finalists = best(BEST)
    limit = (1 + ENOUGH) * _ms_a_batch(finalists[0]) if finalists else 0.0
    close = [item for item in finalists if _ms_a_batch(item) <= limit]
    return close[: _affordable(close, begun_s + bench.budget_s - time.monotonic())]


def _affordable(finalists: list[Combination], left_s: float) -> int:
    """How many of the first a contest can measure in the time that is left; one at least."""
    number, needed_s = 0, 0.0
    for item in finalists:
        assert item.measured_ms is not None, "finalists are measured"
        task: Any = item.case.task
        # Each round warms up anew, and all measure the steps of one case together.
        steps = FIRST_ROUNDS * task.warmup_steps + task.measure_steps
        needed_s += steps * item.measured_ms / 1e3
        number += needed_s <= left_s
    return max(1, number)


SHARE = 0.5
"""Of the time for measuring, what screening may take; the contest has the rest."""


def _ms_a_batch(item: Combination) -> float:
    return item.batch_ms(item.measured_ms) if item.measured_ms else float("inf")


def _plain(fitting: list[Combination]) -> list[Combination]:
    """With the least checkpointing first, and the micro-batch that tells most for its time."""

    def place(item: Combination) -> tuple[bool, int]:
        size = item.base.batch_size
        on_cpu = item.base.device == "cpu"
        return item.checkpoint_label != "none", size if on_cpu else -size

    return sorted(fitting, key=place)


def _mesh(item: Combination) -> object:
    return item.base.parallel.name, *item.base.parallel.axes.items()


def _batch(item: Combination) -> object:
    return item.base.batch_size


def _attention(item: Combination) -> object:
    return id(item.base.attention)


AXES = (_attention, _mesh, _batch)


def _in_variant(
    leader: Combination, items: Iterable[Combination], found: Enumeration
) -> Iterator[Combination]:
    """Those that can be as the leader is, compiled or captured, in the same way."""
    for item in items:
        for variant in found.variants_of(item):
            if variant == leader.variant:
                yield item.varied(variant)


def _differing(
    leader: Combination, items: list[Combination], axis: Callable[[Combination], object]
) -> list[Combination]:
    """One combination for each value of an axis, otherwise as near to ``leader`` as there is."""

    def distance(item: Combination) -> int:
        differ = sum(axis(item) != axis(leader) for axis in AXES)
        return differ + (item.checkpoint_label != leader.checkpoint_label)

    nearest: dict[object, Combination] = {}
    for item in items:
        value = axis(item)
        if value not in nearest or distance(item) < distance(nearest[value]):
            nearest[value] = item
    return list(nearest.values())
