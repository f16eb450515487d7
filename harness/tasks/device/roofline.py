"""``task=roofline``: the memory bandwidth and the matmul rate that the device reaches.

Two phases: ``copy``, one large tensor onto another, which reads and writes each byte once; and
``matmul``, one large square product in the precision's compute dtype. Both run PyTorch's own
kernels, so that the roof is one that programs reach on this device, and not a datasheet's.
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

MIB = 2**20

_TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 1e-2, "float16": 2e-3}
"""Relative: the rounding of the result, and with TF32 of the factors."""


@task("roofline")
@dataclass(kw_only=True, slots=True)
class Roofline(Task):
    """Copy bandwidth and matmul rate of the device. Phases: copy, matmul."""

    copy_mib: int = 1024
    """Size of the copied tensor, far beyond any cache."""
    matmul_size: int = 8192
    """Rows and columns of both factors."""
    warmup_steps: int = 5
    """Untimed passes before measuring."""
    measure_steps: int = 20
    """Timed passes."""

    gives_shape: ClassVar[bool] = True
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        require_one_process(case)
        for key in ("copy_mib", "matmul_size", "measure_steps"):
            require_at_least(f"task.{key}", getattr(self, key), 1)
        require_at_least("task.warmup_steps", self.warmup_steps, 0)

    def words(self) -> list[str]:
        return [f"copy_{self.copy_mib}_MiB", f"matmul_{self.matmul_size}"]

    def num_passes(self) -> int:
        return self.warmup_steps + self.measure_steps

    def work(self, case: Case) -> dict[str, Work]:
        size = self.matmul_size
        element = DTYPE_BYTES[case.precision.compute]
        return {
            "copy": Work(flops=0.0, bytes=2.0 * self.copy_mib * MIB),
            "matmul": Work(flops=2.0 * size**3, bytes=3.0 * element * size**2),
        }

    def predicted_memory(self, case: Case) -> dict[str, float]:
        factors = 3.0 * DTYPE_BYTES[case.precision.compute] * self.matmul_size**2
        return {"copies": 2.0 * self.copy_mib * MIB, "factors": factors}

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        bench.release_memory()
        dtype = getattr(torch, case.precision.compute)
        # Random bits: zeros would cost less power, and so allow higher clocks.
        source = torch.randint(256, (self.copy_mib * MIB,), dtype=torch.uint8, device=bench.device)
        target = torch.zeros_like(source)
        shape = (self.matmul_size, self.matmul_size)
        left = torch.randn(shape, dtype=dtype, device=bench.device)
        right = torch.randn(shape, dtype=dtype, device=bench.device)
        product = torch.empty(shape, dtype=dtype, device=bench.device)

        def step(timer: PhaseTimer) -> None:
            with timer.phase("copy"):
                target.copy_(source)
            with timer.phase("matmul"):
                torch.matmul(left, right, out=product)

        bench.measure(step, warmup=self.warmup_steps, passes=self.measure_steps)
        bench.stage("checking")
        if not torch.equal(source, target):
            raise WrongResult("the copy differs from its source")
        expected = left[:1].double() @ right.double()
        error = float((product[:1].double() - expected).norm() / expected.norm())
        tolerance = _TOLERANCE[case.precision.peak]
        bench.outcome.check = {"errors": {"product": error}, "tolerance": tolerance}
        if not error <= tolerance:
            raise WrongResult(f"relative error of the product against float64 is {error:.2g}")
