"""Collective operations between ranks alone: what communication costs before anything hides it.

The CS336 text's distributed_communication problem, on gloo or NCCL as the device has it. The
clock runs from when all ranks are ready until the slowest is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from harness.cases.case import Case, require_at_least, require_choice
from harness.cases.column import CaseColumn, Point, in_order, note, option
from harness.cases.task import Task, Work, task
from parallel.collectives import (
    COLLECTIVES,
    CollectiveData,
    bus_factor,
    make_collective,
    num_elements,
)

if TYPE_CHECKING:
    from harness.bench.bench import Bench, PhaseTimer

MIB = 2**20

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@task("collectives")
@dataclass(kw_only=True, slots=True)
class Collectives(Task):
    """One collective operation on random numbers of the precision's compute dtype."""

    collective: str = "all_reduce"
    """all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or send_recv."""
    ranks: int = 2
    """Ranks that take part."""
    size_mib: float = 1.0
    """Size S of nccl-tests: of the largest buffer of one rank, in MiB (2**20 bytes)."""
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
        """Of size S, rounded down to what the ranks can share."""
        num_bytes = self.size_mib * MIB
        return num_elements(num_bytes, _DTYPE_BYTES[case.precision.compute], self.ranks)

    def work(self, case: Case) -> dict[str, Work]:
        """Links carry what the bus bandwidth counts; sums are not what limits it."""
        sent = self._size_bytes(case) * bus_factor(self.collective, self.ranks)
        return {"collective": Work(flops=0.0, sent_bytes=sent)}

    def _size_bytes(self, case: Case) -> int:
        return self.num_elements(case) * _DTYPE_BYTES[case.precision.compute]

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """Of what is measured: a source and a result, the smaller of which may be a part."""
        size = self._size_bytes(case)
        shared = self.collective in ("all_gather", "reduce_scatter")
        return {"buffers": size * (1 + 1 / self.ranks if shared else 2)}

    def run(self, case: Case, bench: Bench) -> None:
        import torch
        import torch.distributed as dist

        from harness.bench.bench import WrongResult

        bench.stage("set-up")
        group = dist.group.WORLD
        assert group is not None, "several ranks have a world"
        data = CollectiveData(
            group=group,
            num_elements=self.num_elements(case),
            dtype=getattr(torch, case.precision.compute),
            device=bench.device,
            seed=case.seed,
        )
        made = make_collective(self.collective, data)
        bench.vote()

        bench.stage("checking")
        made.run()
        wrong = sum(bench.gather(made.wrong_elements()))
        bench.outcome.notes["wrong_elements"] = wrong
        bench.outcome.notes["size_bytes"] = self._size_bytes(case)
        if wrong:
            raise WrongResult(f"{wrong:,} elements of the results of all ranks are wrong")
        bench.release_memory()
        made.reset()

        def step(timer: PhaseTimer) -> None:
            with timer.phase("collective"):
                made.run()
            # After the call and not before it, so that ranks still enter the next one together.
            made.reset()

        bench.measure(step, warmup=self.warmup_steps, passes=self.measure_steps)
