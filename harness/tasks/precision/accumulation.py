"""``task=accumulation``: the sum of the same small number many times, in chosen number formats.

Problem mixed_precision_accumulation of CS336 assignment 2 (section 1.1.5), whose four programs
are four choices of these options. A low precision rounds the term and every partial sum; the
record has the sum and the stored term, which tell the two errors apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn
from harness.cases.precision import DTYPES
from harness.cases.requirements import require_at_least, require_choice, require_one_process
from harness.cases.task import Task, Work, task
from harness.store.record import Record

_SCALAR_BYTES = 8


def _sums(record: Record) -> dict[str, Any] | None:
    """The options and the result together."""
    found = record.notes.get("accumulation")
    return None if found is None else {**record.case["task"], **found}


@task("accumulation")
@dataclass(kw_only=True, slots=True)
class Accumulation(Task):
    """num_terms times ``sum += term``, one after another."""

    accumulator: str = "float32"
    """dtype of the running sum."""
    term_dtype: str = "float32"
    """dtype that the term is stored in."""
    cast_term: bool = False
    """Cast the stored term to the accumulator's dtype before adding it."""
    term: float = 0.01
    """The number to add; 0.01 is exact in no binary format."""
    num_terms: int = 1000
    """Number of additions."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (CaseColumn(name="accumulation", read=_sums),)
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_choice("task.accumulator", self.accumulator, DTYPES)
        require_choice("task.term_dtype", self.term_dtype, DTYPES)
        require_at_least("task.num_terms", self.num_terms, 1)
        if not math.isfinite(self.term):
            raise ValueError(f"task.term={self.term}: must be a finite number")
        require_one_process(case)

    def words(self) -> list[str]:
        cast = ["cast"] if self.cast_term else []
        return [f"{self.num_terms}_{self.term_dtype}_terms", *cast, f"in_{self.accumulator}"]

    def num_passes(self) -> int:
        return 1

    def work(self, case: Case) -> dict[str, Work]:
        return {"sum": Work(flops=float(self.num_terms))}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """The sum and the term."""
        return {"scalars": 2.0 * _SCALAR_BYTES}

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("adding")
        sum_dtype = getattr(torch, self.accumulator)
        term = torch.tensor(self.term, dtype=getattr(torch, self.term_dtype), device=bench.device)
        total = torch.tensor(0, dtype=sum_dtype, device=bench.device)
        for _ in range(self.num_terms):
            total += term.to(sum_dtype) if self.cast_term else term
        bench.outcome.notes["accumulation"] = {"sum": float(total), "stored_term": float(term)}
