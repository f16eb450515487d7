"""The interface of tasks: a task is one kind of measurement, with its options as fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from harness.cases.column import CaseColumn
from kernels import Attention, AttentionBackend, AttentionProblem
from kernels.registry import Registry
from models.memory import MemoryPrediction

if TYPE_CHECKING:
    from harness.bench.bench import Bench
    from harness.cases.case import Case

TASKS: Registry[type[Task]] = Registry("task", decorator="task", packages=("harness.tasks",))

task = TASKS.register


WHOLE_PHASES = ("step", "forward_backward", "forward")
"""Phases that include others, the fullest first."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """FLOPs and bytes that one pass of a phase needs on one rank, by formula."""

    flops: float
    bytes: float | None = None
    """The fewest bytes read and written in device memory; None if there is no formula."""
    tokens: int | None = None
    """Tokens processed; None where tokens per second means nothing."""
    sent_bytes: float | None = None
    """Bytes that the rank sends to others; None if there is no formula."""


@dataclass(kw_only=True, slots=True)
class Task:
    """One kind of measurement. A subclass is one choice of ``task=``; its fields are options.

    Everything but :meth:`run` is arithmetic on the case.
    """

    name: str

    uses: ClassVar[frozenset[str]] = frozenset()
    """Optional parts of a case that it reads: model, compile, checkpoint, profile, cache."""
    takes_latents: ClassVar[bool] = False
    """Whether it can run a model with latent attention (model.kv_lora_rank)."""
    attends: ClassVar[bool] = True
    """Whether it calls attention; if not, ``attention=`` changes nothing."""
    takes_masks: ClassVar[bool] = True
    """Whether its attention may have a window, a prefix, a cap or sinks."""
    measures: ClassVar[bool] = True
    """Whether it runs anything; if not, its results are counted by formula."""
    profiled_phases: ClassVar[tuple[str, ...]] = ()
    """Phases into which a profile divides a step."""
    gives_shape: ClassVar[bool] = False
    """Whether its options give the shape of what is measured, rather than the model."""
    modes: ClassVar[tuple[str, ...]] = ()
    """Values of its ``mode``; each includes those before it."""
    phases: ClassVar[tuple[str, ...]] = (
        *("forward", "backward", "optimizer", "forward_backward", "step"),
    )
    """Phases in the order of tables; those that are not named follow as they were recorded."""
    compared_phases: ClassVar[tuple[str, ...]] = ("step",)
    """Phases whose times are compared."""
    expected_phase: ClassVar[str] = "forward"
    """The phase that stands in the row of a case that died before it recorded any."""
    ranks_option: ClassVar[str | None] = None
    """The option that says on how many ranks it runs, where that is not up to the strategy."""
    columns: ClassVar[tuple[CaseColumn, ...]] = ()
    """Columns that it adds to the frame."""

    def validate(self, case: Case) -> None:
        """Raise ValueError, naming the full key, if the case makes no sense for this task."""

    def world_size(self, case: Case) -> int:
        """Ranks that the case runs on."""
        return case.parallel.world_size

    def attention_problem(self, case: Case) -> AttentionProblem:
        """The attention call that the case makes, if the task attends."""
        raise NotImplementedError

    def why_unsupported(self, case: Case) -> str | None:
        """None if the attention supports the case here, else the reason in one line."""
        return (
            case.attention.why_unsupported(self.attention_problem(case)) if self.attends else None
        )

    def attention_choice(self, case: Case) -> str:
        """Name of the backend that runs: the one that ``attention=auto`` picks, or the chosen."""
        if not self.attends:
            return case.attention.name
        return case.attention.choice(self.attention_problem(case))

    def work(self, case: Case) -> dict[str, Work]:
        """Work of each phase that :meth:`run` records, by its name."""
        raise NotImplementedError

    def predicted_memory(self, case: Case) -> dict[str, float] | None:
        """Predicted peak bytes on one rank by category; their sum is the peak.

        None says that they are not predicted, since what runs is decided by a compiler.
        """
        raise NotImplementedError

    def predicted_before_backward(self, case: Case) -> dict[str, float] | None:
        """Predicted bytes in use between the passes; None without a formula or two passes."""
        return None

    def predicted_step_memory(self, case: Case) -> MemoryPrediction | None:
        """Predicted bytes of a step by what they hold; None if there is no formula."""
        return None

    def compiles(self, case: Case) -> bool:
        """Whether the task itself compiles something, apart from what its backend compiles."""
        return case.compile is not None and case.compile.scope != "none"

    def words(self) -> list[str]:
        """One word for each option that a case's name shows; none for usual values."""
        return []

    def num_passes(self) -> int:
        """Warm-up and measured passes together, for predicting the time."""
        raise NotImplementedError

    def run(self, case: Case, bench: Bench) -> None:
        """Set up, check, warm up and measure on this rank; ``bench`` takes the results."""
        raise NotImplementedError


def mask_options(attention: AttentionBackend) -> dict[str, Any]:
    """Fields of an AttentionProblem from ``attention.window=`` and its like, where it has them."""
    return attention.mask_options() if isinstance(attention, Attention) else {}


def task_type(name: str) -> type[Task]:
    """The class of ``task=name``; the base class if this version has no such task."""
    return TASKS[name].target if name in TASKS else Task
