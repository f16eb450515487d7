"""A combination: one way to train, as a case of task=train_step, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from harness.cases.case import Case, label
from harness.cases.checkpoint import Checkpoint
from harness.cases.compilation import Compile
from harness.cases.task import Task
from harness.predictions.capacity import GIB
from harness.store.record import Record
from kernels import BACKENDS


@dataclass(kw_only=True, slots=True, frozen=True)
class Variant:
    """How the kernels of a step are made and launched."""

    compile: Compile
    task: Task

    @property
    def is_captured(self) -> bool:
        return _is_captured(self.task)


def _is_captured(task: Task) -> bool:
    """Whether a step is replayed from CUDA graphs, rather than launched kernel by kernel."""
    return bool(getattr(task, "cuda_graph", False))


@dataclass(kw_only=True, eq=False)
class Combination:
    """A base and a variant of it, and how many micro-batches make a batch."""

    base: Case
    """Its case but for checkpointing and the variant."""
    accumulation: int
    """Micro-batches of a batch on each data-parallel rank."""
    can_capture: bool = False
    """Whether CUDA graphs can hold its step."""
    checkpoint: Checkpoint | None = None
    variant: Variant | None = None
    """None stands for the base's."""
    memory_bytes: float = 0.0
    """Predicted at the peak on one rank, gradients that are being accumulated included."""
    usable_bytes: float = 0.0
    step: Any = field(default=None, repr=False)
    """The predicted time of the case: a :class:`harness.forecast.StepPrediction`, or None."""
    tied_with: Combination | None = field(default=None, repr=False)
    """The same step launched, where predictions do not tell this captured one from it."""
    measured_ms: float | None = None
    """Median time of a step, measured."""
    record: Record | None = field(default=None, repr=False)
    """Of the measured case."""

    @cached_property
    def case(self) -> Case:
        """The case that measures one micro-batch."""
        if self.variant is None:
            if self.base.checkpoint is None and self.checkpoint_label == "none":
                return self.base
            return replace(self.base, checkpoint=self.checkpoint)
        return replace(
            self.base,
            checkpoint=self.checkpoint,
            compile=self.variant.compile,
            task=self.variant.task,
        )

    def varied(self, variant: Variant) -> Combination:
        """The same in another variant; memory is not predicted anew."""
        return replace(
            self, variant=variant, step=None, tied_with=None, measured_ms=None, record=None
        )

    @property
    def is_captured(self) -> bool:
        return _is_captured(self.base.task if self.variant is None else self.variant.task)

    @property
    def checkpoint_label(self) -> str:
        return "none" if self.checkpoint is None else self.checkpoint.label

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.usable_bytes

    @property
    def short_gib(self) -> float:
        """GiB that are missing; negative if it fits."""
        return (self.memory_bytes - self.usable_bytes) / GIB

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / GIB

    @property
    def batch_tokens(self) -> int:
        """Tokens of a whole batch, over all ranks."""
        case = self.case
        return case.batch_size * case.parallel.dp * self.accumulation * case.seq_len

    @property
    def step_ms(self) -> float | None:
        """Time of one micro-batch: measured if it was, else predicted."""
        if self.measured_ms is not None:
            return self.measured_ms
        return None if self.step is None else float(self.step.median_ms)

    def batch_ms(self, step_ms: float) -> float:
        """Time of a batch whose micro-batches take ``step_ms``: each with its optimizer step."""
        return step_ms * self.accumulation

    def tokens_per_s(self, step_ms: float) -> float:
        """Tokens of all ranks."""
        return self.batch_tokens / self.batch_ms(step_ms) * 1e3

    @property
    def complexity(self) -> tuple[int, int]:
        """How far it is from the plainest way to train, and its attention's place in tables."""
        case = self.case
        steps = len(case.parallel.axes) + (case.checkpoint is not None) + self.is_captured
        if case.compile is not None and case.compile.scope != "none":
            steps += 1 + (case.compile.mode != "default")
        return steps, _places().get(case.attention.name, LAST)

    @property
    def name(self) -> str:
        """What was chosen, in a few words: without what all combinations share."""
        return ", ".join(self.words)

    @property
    def words(self) -> list[str]:
        """The parts of its name."""
        case = self.case
        axes = " x ".join(f"{axis} {ranks}" for axis, ranks in case.parallel.axes.items())
        words = [label(case.attention)]
        if case.parallel.world_size > 1:
            words += [case.parallel.name, axes]
        if case.checkpoint is not None:
            words.append(f"checkpoint={case.checkpoint.label}")
        if case.compile is not None and case.compile.scope != "none":
            words.append(f"compile={case.compile.label}")
        if self.is_captured:
            words.append("captured")
        size = f"micro-batch {case.batch_size}"
        return [*words, f"{size} x {self.accumulation}" if self.accumulation > 1 else size]


LAST = 99
"""Place of a backend that declares none."""


@cache
def _places() -> dict[str, int]:
    looks = BACKENDS.given("look")
    return {name: LAST if look.place is None else look.place for name, look in looks.items()}
