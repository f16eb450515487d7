"""What a task is: one kind of measurement, with its options as fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.cases.column import CaseColumn
from kernels import AttentionProblem
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
    """What one pass of a phase must do, by formula, on one rank."""

    flops: float
    bytes: float | None = None
    """The fewest bytes moved through device memory; None where no formula is kept."""
    tokens: int | None = None
    """Tokens that pass through, where tokens per second means something."""
    sent_bytes: float | None = None
    """Bytes that leave the rank for others; None where no formula is kept."""


@dataclass(kw_only=True, slots=True)
class Task:
    """One kind of measurement. A subclass is one choice of ``task=``; its fields are options.

    Everything but :meth:`run` is pure arithmetic on the case and needs no torch.
    """

    name: str

    uses: ClassVar[frozenset[str]] = frozenset()
    """Optional parts of a case that it reads: model, compile, checkpoint, profile,
    cache."""
    takes_latents: ClassVar[bool] = False
    """Whether it can run a model that keeps latents (model.kv_lora_rank)."""
    attends: ClassVar[bool] = True
    """Whether it makes attention calls; where not, ``attention=`` changes nothing."""
    measures: ClassVar[bool] = True
    """Whether it runs anything; where not, results are counted by formula."""
    profiled_phases: ClassVar[tuple[str, ...]] = ()
    """Phases by which profiles divide a step."""
    gives_shape: ClassVar[bool] = False
    """Whether its options give the shape of what is measured, rather than the model."""
    phases: ClassVar[tuple[str, ...]] = (
        *("forward", "backward", "optimizer", "forward_backward", "step"),
    )
    """Phases in the order of tables; those that are not named follow as they were recorded."""
    compared_phases: ClassVar[tuple[str, ...]] = ("step",)
    """Phases whose times comparisons hold against each other."""
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
        """None if the attention can do here what the task asks of it, else why not, in one line."""
        return case.attention.supports(self.attention_problem(case)) if self.attends else None

    def attention_choice(self, case: Case) -> str:
        """Name of the backend that the case's attention picks, where it picks; else its own."""
        if not self.attends:
            return case.attention.name
        return case.attention.choice(self.attention_problem(case))

    def work(self, case: Case) -> dict[str, Work]:
        """Work of each phase, by the names that :meth:`run` records."""
        raise NotImplementedError

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """Predicted peak bytes on one rank by category; their sum is the peak."""
        raise NotImplementedError

    def predicted_step_memory(self, case: Case) -> MemoryPrediction | None:
        """Predicted bytes of a step by what they hold; None where no formula is kept."""
        return None

    def compiles(self, case: Case) -> bool:
        """Whether the task puts something through torch.compile, beyond what a backend does."""
        return case.compile is not None and case.compile.scope != "none"

    def words(self) -> list[str]:
        """Options that a case's name should show, in a word each; none for the usual ones."""
        return []

    def num_passes(self) -> int:
        """Warm-up and measured passes together, for predicting the time."""
        raise NotImplementedError

    def run(self, case: Case, bench: Bench) -> None:
        """Set up, check, warm up and measure on this rank, telling ``bench`` each result."""
        raise NotImplementedError


def task_type(name: str) -> type[Task]:
    """What ``task=name`` is; the base class where this version has no such task."""
    return TASKS[name].target if name in TASKS else Task
