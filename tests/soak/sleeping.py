"""``task=sleeping``: cases that take milliseconds, on one rank or several."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, option
from harness.cases.task import Task, Work, task


@task("sleeping")
@dataclass(kw_only=True, slots=True)
class Sleeping(Task):
    """Sleep. Phase: nap."""

    index: int = 0
    """Tells cases apart."""
    nap_ms: float = 20.0
    ranks: int = 1

    attends: ClassVar[bool] = False
    gives_shape: ClassVar[bool] = True
    ranks_option: ClassVar[str | None] = "ranks"
    phases: ClassVar[tuple[str, ...]] = ("nap",)
    compared_phases: ClassVar[tuple[str, ...]] = ("nap",)
    expected_phase: ClassVar[str] = "nap"
    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="index", read=option("index"), point=Point(header="index")),
    )

    def num_passes(self) -> int:
        return 3

    def world_size(self, case: Case) -> int:
        return self.ranks

    def words(self) -> list[str]:
        return [f"nap_{self.index}", f"{self.ranks}_ranks"]

    def work(self, case: Case) -> dict[str, Work]:
        return {"nap": Work(flops=0.0)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        return {"nothing": 1.0}

    def run(self, case: Case, bench: Bench) -> None:
        bench.vote()

        def step(timer: PhaseTimer) -> None:
            with timer.phase("nap"):
                time.sleep(self.nap_ms / 1000)

        bench.measure(step, warmup=1, passes=2)
