"""``task=communication_accounting``: memory of a very large model, and its least batch, counted.

From the least batch on, the model is bound by compute and not by communication. The defaults are
the numbers of CS336 assignment 2, problem communication_accounting; the formulas are in
:mod:`harness.predictions.feed_forward`. No device is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.cases.column import CaseColumn, note
from harness.cases.requirements import require_at_least, require_one_process
from harness.cases.task import Task, Work, task
from harness.predictions.feed_forward import FeedForwardStack, Mesh

GB = 1e9


@task("communication_accounting")
@dataclass(kw_only=True, slots=True)
class CommunicationAccounting(Task):
    """Feed-forward blocks of two linear layers, sharded over a mesh of FSDP x TP devices."""

    d_model: int = 16384
    """Width of the residual stream (D)."""
    d_ff: int = 53248
    """Width between the two layers (F)."""
    num_blocks: int = 126
    """Pairs of layers."""
    tokens: int = 4096
    """Tokens whose activations one device would hold unsharded, in (a) and (b)."""
    gpu_gb: float = 80.0
    """Memory of the GPUs counted in (a), in 1e9 bytes: an H100's."""
    device_gb: float = 95.0
    """Memory of a device in (b), in 1e9 bytes: a TPU v5p's."""
    fsdp: int = 16
    """X, devices of the FSDP axis in (c)."""
    tp: int = 4
    """Y, devices of the tensor-parallel axis."""
    fsdp_axes: int = 2
    """M_X, axes of the network that the FSDP axis uses."""
    tp_axes: int = 1
    """M_Y, axes of the network that the tensor-parallel axis uses."""
    tflops: float = 460.0
    """C, rate of one device, in 1e12 FLOP/s."""
    link_gb_s: float = 180.0
    """W, bandwidth of one axis of the network, both ways together, in 1e9 bytes/s."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (
        CaseColumn(name="communication_accounting", read=note("communication_accounting")),
    )
    attends: ClassVar[bool] = False
    measures: ClassVar[bool] = False

    def validate(self, case: Case) -> None:
        whole = ("d_model", "d_ff", "num_blocks", "tokens", "fsdp", "tp", "fsdp_axes", "tp_axes")
        for key in whole:
            require_at_least(f"task.{key}", getattr(self, key), 1)
        for key in ("gpu_gb", "device_gb", "tflops", "link_gb_s"):
            value = getattr(self, key)
            if not 0 < value < float("inf"):
                raise ValueError(f"task.{key}={value:g}: must be positive and finite")
        require_one_process(case)

    def words(self) -> list[str]:
        return [f"{self.num_blocks}x{self.d_model}x{self.d_ff}", f"{self.fsdp}x{self.tp}"]

    def num_passes(self) -> int:
        return 0

    def work(self, case: Case) -> dict[str, Work]:
        return {"forward": Work(flops=4.0 * self.d_model * self.d_ff * self.num_blocks)}

    def predicted_memory(self, case: Case) -> dict[str, float]:
        """The counts, which are all that is held."""
        return {"counts": 8.0 * len(self.results())}

    @property
    def stack(self) -> FeedForwardStack:
        return FeedForwardStack(d_model=self.d_model, d_ff=self.d_ff, num_blocks=self.num_blocks)

    @property
    def mesh(self) -> Mesh:
        return Mesh(
            fsdp=self.fsdp,
            tp=self.tp,
            fsdp_axes=self.fsdp_axes,
            tp_axes=self.tp_axes,
            flops_per_s=self.tflops * 1e12,
            bytes_per_s=self.link_gb_s * 1e9,
        )

    def results(self) -> dict[str, Any]:
        """The answers by name; None where no number of devices is enough."""
        stack, mesh = self.stack, self.mesh
        activations = stack.activation_bytes_per_token * self.tokens
        batch = mesh.least_batch()
        return {
            "num_parameters": stack.num_parameters,
            "static_gb": stack.static_bytes / GB,
            "activation_mb_per_token": stack.activation_bytes_per_token / 1e6,
            "activation_gb": activations / GB,
            "gpus_static": stack.static_bytes / (self.gpu_gb * GB),
            "gpus_with_activations": (stack.static_bytes + activations) / (self.gpu_gb * GB),
            "least_fsdp_empty": stack.least_shards(self.device_gb * GB, 0),
            "least_fsdp": stack.least_shards(self.device_gb * GB, self.tokens),
            "gather_ms": mesh.gather_s(stack) * 1e3,
            "least_batch": batch,
            "least_batch_per_device": batch / mesh.num_devices,
            "least_d_ff": mesh.least_d_ff(),
        }

    def run(self, case: Case, bench: Bench) -> None:
        bench.stage("counting")
        bench.outcome.notes["communication_accounting"] = self.results()
