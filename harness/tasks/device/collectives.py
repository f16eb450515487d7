"""``task=collectives``: the time of one collective operation, with nothing to hide it.

Problem distributed_communication of CS336 assignment 2, over gloo on CPUs and NCCL on GPUs. A
sample begins when all ranks are ready and ends when the slowest is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, in_order, note, option
from harness.cases.precision import DTYPE_BYTES
from harness.cases.requirements import require_at_least, require_choice
from harness.cases.task import Task, Work, task
from parallel.collectives import (
    COLLECTIVES,
    CollectiveData,
    bus_factor,
    make_collective,
    num_elements,
)

MIB = 2**20


@task("collectives")
@dataclass(kw_only=True, slots=True)
class Collectives(Task):
    """One collective operation on random numbers of the precision's compute dtype."""

    collective: str = "all_reduce"
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or send_recv."""
    ranks: int = 2
    """Ranks that take part."""
    size_mib: float = 1.0
    """Size S of nccl-tests: the largest buffer of one rank, in MiB (2**20 bytes)."""
    warmup_steps: int = 5
    """Untimed calls before measuring."""
    measure_steps: int = 20
    """Timed calls."""

    gives_shape: ClassVar[bool] = True
    ranks_option: ClassVar[str | None] = "ranks"
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(
            name="collective",
            read=option("collective"),
            point=Point(header="operation", looks=in_order(*COLLECTIVES), after="world_size"),
        ),
        CaseColumn(
            name="size_mib",
            read=option("size_mib"),
            point=Point(
                header="size (MiB)",
                describe="{:g} MiB".format,
                # A size that somebody typed, with no more digits than that.
                format="{:,.10g}".format,
                after="collective",
            ),
        ),
        CaseColumn(name="size_bytes", read=note("size_bytes")),
        CaseColumn(name="wrong_elements", read=note("wrong_elements")),
    )
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_choice("task.collective", self.collective, COLLECTIVES)
        require_at_least("task.ranks", self.ranks, 2)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)
        require_at_least("task.measure_steps", self.measure_steps, 1)
        if not 0 < self.size_mib < float("inf"):
            raise ValueError(f"task.size_mib={self.size_mib:g}: must be positive and finite")
        if self.num_elements(case) == 0:
            raise ValueError(
                f"task.size_mib={self.size_mib:g}: holds no element for each of task.ranks="
                f"{self.ranks}"
            )
        if case.parallel.world_size > 1:
            raise ValueError(
                f"parallel.{next(iter(case.parallel.axes))}: task=collectives trains "
                "nothing; say task.ranks="
            )

    def world_size(self, case: Case) -> int:
        return self.ranks

    def words(self) -> list[str]:
        return [self.collective, f"{self.size_mib:g}_MiB", f"{self.ranks}_ranks"]

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def num_elements(self, case: Case) -> int:
        """Elements of size S, rounded down to a multiple that the ranks can share."""
        num_bytes = self.size_mib * MIB
        return num_elements(num_bytes, DTYPE_BYTES[case.precision.compute], self.ranks)

    def work(self, case: Case) -> dict[str, Work]:
        """Bytes that a link carries, which define the bus bandwidth."""
        sent = self._size_bytes(case) * bus_factor(self.collective, self.ranks)
        return {"collective": Work(flops=0.0, sent_bytes=sent)}

    def _size_bytes(self, case: Case) -> int:
        return self.num_elements(case) * DTYPE_BYTES[case.precision.compute]

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """Bytes of a source and a result; one may be one rank's part of the other."""
        size = self._size_bytes(case)
        shared = self.collective in ("all_gather", "reduce_scatter")
        return {"buffers": size * (1 + 1 / self.ranks if shared else 2)}

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        bench.release_memory()
        group = dist.group.WORLD
        assert group is not None, "several ranks have a world"
        data = CollectiveData(
            group=group,
            num_elements=self.num_elements(case),
            dtype=getattr(torch, case.precision.compute),
            device=bench.device,
            seed=case.seed,
        )
        operation = make_collective(self.collective, data)
        bench.vote()

        bench.stage("checking")
        operation.run()
        wrong = sum(bench.gather(operation.wrong_elements()))
        bench.outcome.notes["wrong_elements"] = wrong
        bench.outcome.notes["size_bytes"] = self._size_bytes(case)
        if wrong:
            raise WrongResult(f"{wrong:,} elements of the results of all ranks are wrong")
        bench.release_memory(holds_inputs=True)
        operation.reset()

        def step(timer: PhaseTimer) -> None:
            with timer.phase("collective"):
                operation.run()
            # After the call, so that ranks still enter the next one together.
            operation.reset()

        bench.measure(step, warmup=self.warmup_steps, passes=self.measure_steps)
