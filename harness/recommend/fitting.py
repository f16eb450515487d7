"""Which combinations fit: memory by formula, what is missing, and what would make one fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.cases.case import Case, label
from harness.cases.checkpoint import Checkpoint
from harness.predictions import training
from harness.predictions.capacity import Machine
from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration


class MemoryModel:
    """Predicted peak bytes of training steps, each formula computed once.

    What torch.compile fuses is not predicted: as if the model ran eagerly, which is more. Nor is
    what CUDA graphs keep: as if the step were launched, which allocates the same tensors.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], float] = {}
        self._keeps: dict[tuple[int, int, int, int], bool] = {}
        self._parts: list[Any] = []
        """Parts that keys name by identity, kept alive so that none is reused."""

    def peak_bytes(self, case: Case, accumulation: int, checkpoint: Checkpoint | None) -> float:
        """On one rank, while the last of ``accumulation`` micro-batches runs."""
        key = (
            id(case.parallel),
            self.keeps_scores(case),
            case.batch_size,
            case.seq_len,
            None if checkpoint is None else checkpoint.label,
            accumulation > 1,
        )
        if key not in self._known:
            self._parts.append(case.parallel)
            self._known[key] = _peak_bytes(replace(case, checkpoint=checkpoint), accumulation)
        return self._known[key]

    def keeps_scores(self, case: Case) -> bool:
        """All that a footprint reads of the attention."""
        key = (id(case.attention), case.parallel.cp, case.parallel.tp, case.seq_len)
        if key not in self._keeps:
            self._parts.append(case.attention)
            problem = replace(case.attention_problem, needs_grad=True)
            self._keeps[key] = case.attention.keeps_scores(problem)
        return self._keeps[key]


def _peak_bytes(case: Case, accumulation: int) -> float:
    footprint = training.footprint(case)
    if accumulation == 1:
        return footprint.peak
    # Gradients of earlier micro-batches stay where activations are at their peak.
    kept = replace(footprint, activations=footprint.activations + footprint.loose_gradients)
    return kept.peak


def fit(
    found: Enumeration, machine: Machine, memory: MemoryModel
) -> tuple[list[Combination], list[Combination]]:
    """Each base with each way to checkpoint, in its own variant, with its memory.

    Returns those that fit, and those that do not, the one that misses least first.
    """
    fitting: list[Combination] = []
    others: list[Combination] = []
    for base in found.bases:
        usable = machine.usable_of_rank(base.base.world_size)
        for checkpoint in found.checkpoints:
            needed = memory.peak_bytes(base.base, base.accumulation, checkpoint)
            item = Combination(
                base=base.base,
                checkpoint=checkpoint,
                accumulation=base.accumulation,
                can_capture=base.can_capture,
                memory_bytes=needed,
                usable_bytes=usable,
            )
            (fitting if item.fits else others).append(item)
    return fitting, sorted(others, key=lambda item: item.short_gib)


@dataclass(kw_only=True, slots=True, frozen=True)
class Misfit:
    """The combinations of one strategy, or of one attention where strategies do not differ."""

    name: str
    nearest: Combination
    """Of those that keep all activations, the one that misses least."""
    number: int
    """Combinations of the strategy that do not fit."""
    remedy: Combination | None
    """The same strategy, changed so that it fits; None if nothing enumerated does."""
    change: str
    """What is changed, in words; what would be needed if nothing fits."""


def misfits(
    fitting: list[Combination], others: list[Combination], machine: Machine, memory: MemoryModel
) -> list[Misfit]:
    """For each strategy with combinations that do not fit, the nearest and what would change it.

    Without strategies that fit as they are with another attention.
    """
    found = []
    several = len({item.base.parallel.name for item in [*fitting, *others]}) > 1

    def family(item: Combination) -> str:
        return item.base.parallel.name if several else label(item.base.attention)

    families: dict[str, list[Combination]] = {}
    for item in others:
        families.setdefault(family(item), []).append(item)
    for name, own in families.items():
        plain = [item for item in own if item.checkpoint_label == "none"] or own
        nearest = plain[0]
        remedy = _closest([item for item in fitting if family(item) == name], nearest)
        if remedy is not None:
            change = difference(nearest.case, remedy.case)
            if several and change == f"attention={label(remedy.base.attention)}":
                # What is missing is the attention's: as it is, the strategy fits.
                continue
        else:
            change = _with_more_gpus(own, machine, memory)
        found.append(
            Misfit(name=name, nearest=nearest, number=len(own), remedy=remedy, change=change)
        )
    return found


def _closest(candidates: list[Combination], to: Combination) -> Combination | None:
    """The one that differs in least: first in nothing but checkpointing, then in the mesh."""

    def distance(item: Combination) -> tuple[int, float, float]:
        step_ms = item.step_ms
        slow = float("inf") if step_ms is None else item.batch_ms(step_ms)
        return _distance(to.case, item.case), slow, item.memory_bytes

    return min(candidates, key=distance, default=None)


def _distance(one: Case, other: Case) -> int:
    """How many choices differ."""
    pairs = [
        (one.attention, other.attention),
        (one.checkpoint, other.checkpoint),
        (one.compile, other.compile),
        (one.batch_size, other.batch_size),
        *((getattr(one.parallel, axis), getattr(other.parallel, axis)) for axis in AXES),
    ]
    return sum(left != right for left, right in pairs)


AXES = ("dp", "cp", "tp")


def difference(one: Case, other: Case) -> str:
    """What is different in ``other``, as keys of the command line."""
    return " ".join(_changes(one, other))


def _changes(one: Case, other: Case) -> list[str]:
    changes = []
    if one.attention != other.attention:
        changes.append(f"attention={label(other.attention)}")
    if one.parallel.name != other.parallel.name:
        changes.append(f"parallel={other.parallel.name}")
    for axis in AXES:
        if getattr(one.parallel, axis) != getattr(other.parallel, axis):
            changes.append(f"parallel.{axis}={getattr(other.parallel, axis)}")
    if one.checkpoint != other.checkpoint and other.checkpoint is not None:
        changes.append(f"checkpoint={other.checkpoint.scope}")
    if one.compile != other.compile and other.compile is not None:
        changes.append(f"compile={other.compile.scope}")
    if one.batch_size != other.batch_size:
        changes.append(f"batch_size={other.batch_size}")
    return changes


MOST_TIMES_GPUS = 64
"""How many times the GPUs are tried before more of them are no remedy."""


def _with_more_gpus(own: list[Combination], machine: Machine, memory: MemoryModel) -> str:
    """How many GPUs would make one of a strategy's combinations fit, on a longer axis."""
    times = 2
    best = own[: len(own) // 2 + 1][:200]
    while times <= MOST_TIMES_GPUS:
        for item in best:
            for axis in AXES:
                larger = _stretched(item.case, axis, times)
                if larger is None:
                    continue
                usable = machine.usable_of_rank(larger.world_size)
                needed = memory.peak_bytes(larger, item.accumulation, item.case.checkpoint)
                if needed <= usable:
                    keys = difference(item.case, larger)
                    kept = (
                        f" checkpoint={item.case.checkpoint.scope}" if item.case.checkpoint else ""
                    )
                    return f"{larger.world_size} GPUs ({keys}{kept})"
        times *= 2
    return f"nothing up to {MOST_TIMES_GPUS} times the GPUs; a smaller seq_len or model"


def _stretched(case: Case, axis: str, times: int) -> Case | None:
    """A case with ``times`` the ranks on one axis, where that is legal."""
    if axis == "cp" and case.parallel.cp == 1:
        return None
    try:
        parallel = replace(case.parallel, **{axis: getattr(case.parallel, axis) * times})
        return replace(case, parallel=parallel)
    except ValueError:
        return None
