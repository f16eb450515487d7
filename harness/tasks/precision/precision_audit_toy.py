"""``task=precision_audit_toy``: the precision audit of the CS336 text's ToyModel.

Problem benchmarking_mixed_precision (a) and (b) of CS336 assignment 2 (section 1.1.5). The text
means a GPU; on a CPU torch.autocast has other rules and leaves LayerNorm in the low precision.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn
from harness.cases.precision import DTYPE_BYTES
from harness.cases.requirements import require_at_least, require_one_process
from harness.cases.task import Task, Work, task
from harness.tasks.precision import audit
from harness.tasks.precision.precision_audit import AUDIT
from models import toy

_FLOAT64_BYTES = 8


@task("precision_audit_toy")
@dataclass(kw_only=True, slots=True)
class PrecisionAuditToy(Task):
    """One step of AdamW on batch_size random vectors, compared tensor by tensor with float64."""

    in_features: int = 64
    """Width of the input."""
    hidden_features: int = 10
    """Width between fc1 and fc2; 10 in the text."""
    out_features: int = 5
    """Number of classes."""
    input_scale: float = 1.0
    """Standard deviation of the inputs; 1e5 is beyond the range of float16."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (AUDIT,)
    attends: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        for key in ("in_features", "hidden_features", "out_features"):
            require_at_least(f"task.{key}", getattr(self, key), 1)
        if not 0 < self.input_scale < float("inf"):
            raise ValueError(f"task.input_scale={self.input_scale}: must be positive and finite")
        require_one_process(case)

    def words(self) -> list[str]:
        return [f"inputs_{self.input_scale:g}"] if self.input_scale != 1 else []

    def num_passes(self) -> int:
        return 2

    def work(self, case: Case) -> dict[str, Work]:
        weights = self.hidden_features * (self.in_features + self.out_features)
        # 2 FLOPs a weight forward, twice that backward, without the gradient of the input.
        unneeded = 2 * self.hidden_features * self.in_features
        return {"step": Work(flops=float(case.batch_size * (6 * weights - unneeded)))}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """Parameters, gradients and AdamW's moments, and the same model in float64."""
        parameters = self.hidden_features * (self.in_features + self.out_features + 2)
        return {
            "parameters": 4.0 * parameters * DTYPE_BYTES[case.precision.parameters],
            "float64": 2.0 * parameters * _FLOAT64_BYTES,
        }

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("set-up")
        torch.manual_seed(case.seed)
        model = toy.ToyModel(self.in_features, self.hidden_features, self.out_features)
        inputs = self.input_scale * torch.randn(case.batch_size, self.in_features)
        targets = torch.randint(self.out_features, (case.batch_size,), device=bench.device)
        model, inputs = model.to(bench.device), inputs.to(bench.device)
        exact = copy.deepcopy(model).double()
        parameters = getattr(torch, case.precision.parameters)

        def audited(network: toy.ToyModel, dtype: torch.dtype) -> audit.AuditedModel:
            def loss() -> torch.Tensor:
                return toy.cross_entropy(network(inputs.to(dtype)), targets)

            return audit.AuditedModel(model=network, head="fc2", loss=loss)

        bench.outcome.notes["audit"] = audit.audit(
            case, bench, audited(model.to(parameters), parameters), audited(exact, torch.float64)
        )
