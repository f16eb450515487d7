"""``task=product_rate``: the time of one matrix product of any shape, ``[M, K] x [K, N]``.

``task=roofline`` measures one large square; the products of a model are smaller and oblong, and a
forecast of its steps needs their rates (:mod:`harness.forecast`). Factors are multiplied in the
precision's compute dtype, by PyTorch's own kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.cases.precision import DTYPE_BYTES
from harness.cases.requirements import require_at_least, require_one_process
from harness.cases.task import Task, Work, task

_TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative, as in task=roofline."""


@task("product_rate")
@dataclass(kw_only=True, slots=True)
class ProductRate(Task):
    """One matrix product. Phase: matmul."""

    m: int = 4096
    """Rows of the first factor: tokens."""
    n: int = 4096
    """Columns of the second factor: outputs of a layer."""
    k: int = 1024
    """Summed: inputs of a layer."""
    warmup_steps: int = 5
    """Untimed passes before measuring."""
    measure_steps: int = 20
    """Timed passes."""

    gives_shape: ClassVar[bool] = True
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_one_process(case)
        for key in ("m", "n", "k", "measure_steps"):
            require_at_least(f"task.{key}", getattr(self, key), 1)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)

    def words(self) -> list[str]:
        return [f"{self.m}x{self.n}x{self.k}"]

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def work(self, case: Case) -> dict[str, Work]:
        return {
            "matmul": Work(flops=2.0 * self.m * self.n * self.k, bytes=float(self._bytes(case)))
        }

    def _bytes(self, case: Case) -> int:
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return DTYPE_BYTES[case.precision.compute] * elements

    def predicted_memory(self, case: Case) -> dict[str, float]:
        return {"factors": float(self._bytes(case))}

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        bench.release_memory()
        dtype = getattr(torch, case.precision.compute)
        left = torch.randn((self.m, self.k), dtype=dtype, device=bench.device)
        # As weights lie in memory: outputs by inputs.
        right = torch.randn((self.n, self.k), dtype=dtype, device=bench.device).T
        product = torch.empty((self.m, self.n), dtype=dtype, device=bench.device)

        def step(timer: PhaseTimer) -> None:
            with timer.phase("matmul"):
                torch.matmul(left, right, out=product)

        bench.measure(step, warmup=self.warmup_steps, passes=self.measure_steps)
        bench.stage("checking")
        expected = left[:1].double() @ right.double()
        error = float((product[:1].double() - expected).norm() / expected.norm())
        tolerance = _TOLERANCE[case.precision.peak]
        bench.outcome.check = {"errors": {"product": error}, "tolerance": tolerance}
        if not error <= tolerance:
            raise WrongResult(f"relative error of the product against float64 is {error:.2g}")
