"""Packs cases into shares, one for each task of a job array, by shape and predicted time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.cases.case import Case
from harness.predictions.capacity import ranks_on_each_host
from harness.run.launcher import LaunchError
from harness.run.rounds.interleaving import comparison_groups


@dataclass(kw_only=True, slots=True, frozen=True, order=True)
class Shape:
    """The resources of a job: one job array is submitted for each shape."""

    device: str
    nodes: int
    ranks_per_node: int
    """On CUDA, one GPU each."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        what = "GPU" if self.device == "cuda" else "CPU rank"
        return f"{counted(self.nodes, 'node')} x {counted(self.ranks_per_node, what)}"


@dataclass(kw_only=True, slots=True)
class Share:
    """The cases that one task measures, one after another."""

    shape: Shape
    cases: list[Case] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shape_of(case: Case, ranks_per_node: int) -> Shape:
    """The fewest nodes that hold the case's ranks evenly.

    Raises ValueError if more than one node is needed and no even split exists short of a node
    for every rank.
    """
    ranks = case.world_size
    on_each = ranks_on_each_host(ranks, ranks_per_node)
    if on_each is None:
        raise ValueError(
            f"{ranks} ranks: do not divide over nodes of launcher.gpus_per_node={ranks_per_node}; "
            "use a number of ranks that is a multiple of it"
        )
    return Shape(device=case.device, nodes=ranks // on_each, ranks_per_node=on_each)


def pack(
    cases: Sequence[Case],
    *,
    ranks_per_node: int,
    predict: Callable[[Case], float],
    cases_per_task: int | None,
    task_s: float,
    max_tasks: int,
    together: bool,
) -> dict[Shape, list[Share]]:
    """Shares of every shape, in the order of the cases.

    Args:
        predict: a rough prediction of a case's seconds.
        cases_per_task: cases of a share; None fills it up to ``task_s`` predicted seconds.
        max_tasks: the longest array that may be submitted.
        together: keep cases that are measured in alternating rounds in one share.

    Raises LaunchError if ``cases_per_task`` makes more tasks than an array takes; shares packed
    by time are made longer instead.
    """
    groups = comparison_groups(cases) if together else [[case] for case in cases]
    by_shape: dict[Shape, list[tuple[list[Case], list[float]]]] = {}
    for group in groups:
        seconds = [predict(case) for case in group]
        by_shape.setdefault(shape_of(group[0], ranks_per_node), []).append((group, seconds))
    packed = {}
    for shape, items in sorted(by_shape.items()):
        if cases_per_task is not None:
            shares = _fill(shape, items, limit=cases_per_task, size=lambda seconds: len(seconds))
            if len(shares) > max_tasks:
                number = sum(len(group) for group, _ in items)
                raise LaunchError(
                    f"launcher.cases_per_task={cases_per_task}: {number} cases make "
                    f"{len(shares)} tasks, and a job array takes {max_tasks} here; use "
                    f"launcher.cases_per_task={math.ceil(number / max_tasks)} or more"
                )
        else:
            limit_s = task_s
            while len(shares := _fill(shape, items, limit=limit_s, size=sum)) > max_tasks:
                limit_s *= 1.5
        packed[shape] = shares
    return packed


def _fill(
    shape: Shape,
    items: list[tuple[list[Case], list[float]]],
    *,
    limit: float,
    size: Callable[[list[float]], float],
) -> list[Share]:
    """Fill shares greedily, in order; a group above the limit gets its own share."""
    shares: list[Share] = []
    filled = math.inf
    for group, seconds in items:
        if filled + size(seconds) > limit:
            shares.append(Share(shape=shape))
            filled = 0.0
        shares[-1].cases += group
        shares[-1].predicted_s += seconds
        filled += size(seconds)
    return shares
