"""``task=layer_norm``: layer normalisation, every step of it in a chosen number format.

Problem benchmarking_mixed_precision (b) of CS336 assignment 2 (section 1.1.5): what in layer
normalisation is sensitive to a low precision, and what bfloat16 changes. The inputs are stored in
``dtype``, sums and the variance in ``statistics``; float64 on the same stored inputs is the
reference, so that errors are those of the steps alone. Sums add one element after another in their
dtype. PyTorch's kernels add in float32 whatever they are given; this shows what that is good for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn
from harness.cases.precision import DTYPE_BYTES, DTYPES
from harness.cases.requirements import require_at_least, require_choice, require_one_process
from harness.cases.task import Task, Work, task
from harness.store.record import Record


def _found(record: Record) -> dict[str, Any] | None:
    """The options and the result together."""
    found = record.notes.get("layer_norm")
    return None if found is None else {**record.case["task"], **found}


@task("layer_norm")
@dataclass(kw_only=True, slots=True)
class LayerNormTask(Task):
    """Rows of random numbers, each less its mean and over its standard deviation."""

    dtype: str = "float16"
    """dtype of inputs and outputs."""
    statistics: str = "float32"
    """dtype of the mean, of the differences from it and of the variance."""
    input_std: float = 1.0
    """Standard deviation of the inputs."""
    input_mean: float = 0.0
    """Mean of the inputs, which subtracting it has to cancel."""
    width: int = 1024
    """Elements of a row."""
    rows: int = 256
    """Rows."""
    eps: float = 1e-5
    """Added to the variance."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (CaseColumn(name="layer_norm", read=_found),)
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_choice("task.dtype", self.dtype, DTYPES)
        require_choice("task.statistics", self.statistics, DTYPES)
        require_at_least("task.width", self.width, 2)
        require_at_least("task.rows", self.rows, 1)
        for key in ("input_std", "eps"):
            value = getattr(self, key)
            if not 0 < value < float("inf"):
                raise ValueError(f"task.{key}={value:g}: must be positive and finite")
        if not math.isfinite(self.input_mean):
            raise ValueError(f"task.input_mean={self.input_mean}: must be a finite number")
        require_one_process(case)

    def words(self) -> list[str]:
        mean = [f"mean_{self.input_mean:g}"] if self.input_mean else []
        inputs = [*mean, f"std_{self.input_std:g}", f"width_{self.width}"]
        return [self.dtype, f"statistics_{self.statistics}", *inputs]

    def num_passes(self) -> int:
        return 1

    def work(self, case: Case) -> dict[str, Work]:
        # Two sums, a difference, a square, a division.
        return {"normalise": Work(flops=5.0 * self.rows * self.width)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """Inputs and outputs, and float64's."""
        return {"rows": self.rows * self.width * (2.0 * DTYPE_BYTES[self.dtype] + 16)}

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("normalising")
        generator = torch.Generator().manual_seed(case.seed)
        numbers = torch.randn(self.rows, self.width, generator=generator, dtype=torch.float64)
        stored = (self.input_mean + self.input_std * numbers).to(getattr(torch, self.dtype))
        stored = stored.to(bench.device)
        output, variance = normalised(stored, getattr(torch, self.statistics), self.eps)
        exact, exact_variance = normalised(stored.double(), torch.float64, self.eps)
        finite = variance.isfinite() & output.isfinite().all(dim=1)
        bench.outcome.notes["layer_norm"] = {
            "lost_rows": int((~finite).sum()),
            "vanished_rows": int((variance == 0).sum()),
            "variance_error": _error(variance[finite], exact_variance[finite]),
            "output_error": _error(output[finite], exact[finite]),
            "largest_square": float((stored.double() - stored.double().mean(1, True)).abs().max())
            ** 2,
        }


def normalised(
    x: torch.Tensor, statistics: torch.dtype, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(x - mean) / sqrt(variance + eps)`` in x's dtype, and the variance.

    Mean, differences and variance are in ``statistics``.
    """
    inner = x.to(statistics)
    mean = _sum(inner) / inner.shape[1]
    away = inner - mean[:, None]
    variance = _sum(away * away) / inner.shape[1]
    return (away / (variance + eps).sqrt()[:, None]).to(x.dtype), variance


def _sum(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows, one element after another, each partial sum rounded to the dtype."""
    total = torch.zeros_like(x[:, 0])
    for column in x.T:
        total = total + column
    return total


def _error(found: torch.Tensor, exact: torch.Tensor) -> float | None:
    """The norm of the difference over that of the exact one; None of nothing."""
    if not len(found):
        return None
    return float((found.double() - exact).norm() / exact.norm())
