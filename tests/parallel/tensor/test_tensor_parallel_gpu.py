"""Tensor parallelism over NCCL, on a mesh of all GPUs: streams, fused optimizers, real kernels.

What has to hold is tested on gloo ranks in test_tensor_parallel_training.py; here it runs in
bfloat16 and float16 too, and as the training task runs it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from ranks import device_of, on_gpus
from tensor_parallel_training import BOUNDS, case_of, train_on_mesh, train_one_process
from torch import Tensor

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.request.compose import compose_request

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(
        NUM_GPUS not in (2, 4, 8), reason=f"needs 2, 4 or 8 CUDA devices, torch sees {NUM_GPUS}"
    ),
]

HALF = max(1, NUM_GPUS // 2)

HEADS = ("model.num_heads=8", "model.num_kv_heads=8", "model.d_model=64")

MESHES = {
    "tp": (f"parallel.tp={NUM_GPUS}",),
    **{
        f"{name} x tp": (f"parallel={name}", "parallel.dp=2", f"parallel.tp={HALF}")
        for name in ("ddp_naive", "ddp_overlapped", "ddp_bucketed", "ddp_torch")
    },
    "sharded optimizer x tp": (
        *("parallel=sharded_optimizer", "parallel.dp=2"),
        f"parallel.tp={HALF}",
    ),
    "cp x tp": (
        *("attention=zigzag", "attention.kernel=naive"),
        *("parallel.cp=2", f"parallel.tp={HALF}"),
    ),
}


def train_alone(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    return train_one_process(case, case.parallel.dp, "sgd", device_of(group))


SHOWN = ("tp", "ddp_bucketed x tp", "cp x tp")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SHOWN else pytest.mark.exhaustive) for name in MESHES],
)
def test_weights_are_those_of_one_gpu(name: str) -> None:
    """In float32; the axis that is left over, on two GPUs, has one rank."""
    case = case_of(*HEADS, *MESHES[name])
    wanted = on_gpus(NUM_GPUS, train_alone, case)[0]
    ranks = on_gpus(NUM_GPUS, train_on_mesh, case, "sgd")
    for found in ranks:
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, **BOUNDS["sgd"])
            assert torch.equal(found[key], ranks[0][key])


CASES = {
    "bf16": ("attention=flash_triton", "precision=bf16"),
    "bf16_pure": ("attention=flash_triton", "precision=bf16_pure"),
    "fp16, scaled": ("attention=flash_triton", "precision=fp16"),
    "blocks compiled": ("attention=flash_triton", "precision=bf16", "compile=block"),
}


def task_case(*arguments: str) -> Case:
    keys = {"batch_size": "2", "seq_len": "2048", "device": "cuda", "model": "small"}
    keys |= {"model.num_layers": "2", "model.d_model": "1024", "model.num_heads": "16"}
    keys |= {"model.num_kv_heads": "8", "task.warmup_steps": "1", "task.measure_steps": "3"}
    keys |= dict(argument.split("=", 1) for argument in arguments)
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    return case


@cache
def votes() -> Any:
    """A group for CPU tensors, made once in each process."""
    return dist.new_group(backend="gloo")


def run_task(group: dist.ProcessGroup, case: Case) -> tuple[float, int]:
    """Loss after some steps, and this rank's peak memory in bytes."""
    # A daemon, as this process is, cannot have children.
    torch._inductor.config.compile_threads = 1
    size = case.world_size
    bench = Bench(
        device=device_of(group),
        rank=dist.get_rank() if size > 1 else 0,
        world_size=size,
        vote_group=votes() if size > 1 else None,
    )
    torch.manual_seed(case.seed)
    case.task.run(case, bench)
    torch._dynamo.reset()
    return bench.outcome.notes["loss"], bench.outcome.memory["peak_allocated_bytes"]


@pytest.mark.parametrize("name", CASES)
def test_task_ends_at_the_loss_of_one_gpu(name: str) -> None:
    alone = on_gpus(NUM_GPUS, run_task, task_case(*CASES[name]))
    split = on_gpus(NUM_GPUS, run_task, task_case(*CASES[name], f"parallel.tp={NUM_GPUS}"))
    for (found, _), (wanted, _) in zip(split, alone, strict=True):
        assert found == pytest.approx(wanted, rel=2e-3)


def test_memory_is_about_what_is_predicted() -> None:
    """All but the workspace of matmuls, which is small beside 16,384 tokens."""
    case = task_case(*CASES["bf16"], "seq_len=8192", f"parallel.tp={NUM_GPUS}")
    predicted = sum(case.task.predicted_memory(case).values())
    for _, found in on_gpus(NUM_GPUS, run_task, case):
        assert found == pytest.approx(predicted, rel=0.2)
