"""One small transformer, trained in one process or split on a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from ranks import device_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks.batch import Batch, split_batch, whole_batch
from kernels import BACKENDS
from models.transformer import Transformer, cross_entropy
from parallel.tensor import (
    split_transformer,
    vocab_parallel_cross_entropy,
    whole_parameters,
)

CPU = torch.device("cpu")

STEPS = 3

SIZES = {
    "vocab_size": 24,
    "d_model": 32,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}

MODEL = ("model=tiny", *(f"model.{key}={value}" for key, value in SIZES.items()))

ON_FOUR = "model.num_kv_heads=4"
"""Four ranks need a key head each."""


def case_of(*arguments: str) -> Case:
    keys = {"batch_size": "2", "seq_len": "16", "device": "cpu", "attention": "naive"}
    keys |= dict(argument.split("=", 1) for argument in (*MODEL, *arguments))
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    return case


def tp_mesh(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def make_model(case: Case, attention: Any, device: torch.device | str = CPU) -> Transformer:
    torch.manual_seed(5)
    assert case.model is not None
    return Transformer(case.model, attention, variant=case.attention_variant, device=device)


def naive() -> Any:
    return BACKENDS["naive"].target(name="naive")


OPTIMIZERS: dict[str, Any] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
}

BOUNDS = {
    "sgd": {"rtol": 1e-4, "atol": 1e-6},
    # It divides by the size of a gradient, and so makes the rounding of small ones visible.
    "adamw": {"rtol": 1e-3, "atol": 1e-4},
}


def train_one_process(
    case: Case, num_batches: int, optimizer: str, device: torch.device = CPU
) -> dict[str, Tensor]:
    """Weights after some steps on several ranks' batches at once."""
    cls, options = OPTIMIZERS[optimizer]
    model = make_model(case, naive(), device)
    optimizer_of_all = cls(model.parameters(), **options)
    for _ in range(STEPS):
        optimizer_of_all.zero_grad()
        for index in range(num_batches):
            batch = whole_batch(case, device, index)
            logits = model(batch.tokens, batch.positions)
            (cross_entropy(logits, batch.targets) / num_batches).backward()
        optimizer_of_all.step()
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@contextlib.contextmanager
def bound(case: Case, device: torch.device) -> Iterator[tuple[Any, Batch]]:
    """Attention and this rank's part of the batch."""
    rank = case.parallel.data_rank(dist.get_rank())
    if case.parallel.cp == 1:
        yield case.attention, whole_batch(case, device, rank)
        return
    with case.attention.bind(case.parallel.cp_group(), device) as attention:
        yield attention, split_batch(case, device, rank, attention.layout)


def train_on_mesh(group: dist.ProcessGroup, case: Case, optimizer: str) -> dict[str, Tensor]:
    """The same through the strategy, on a mesh of all processes; whole weights, on each rank."""
    assert group.size() == dist.get_world_size() == case.world_size
    cls, options = OPTIMIZERS[optimizer]
    mesh, device = case.parallel.tp_mesh(), device_of(group)
    with bound(case, device) as (attention, batch):
        module = make_model(case, attention, "meta")
        split_transformer(module, mesh, device)
        model = case.parallel.wrap(module)
        own = case.parallel.optimizer(model.parameters(), cls, **options)
        for _ in range(STEPS):
            logits = model(batch.tokens, batch.positions)
            loss = vocab_parallel_cross_entropy(logits, batch.targets, batch.num_targets, mesh=mesh)
            loss.backward()
            case.parallel.after_backward(model)
            own.step()
            model.zero_grad(set_to_none=True)
    return {name: x.cpu() for name, x in whole_parameters(own_parameters(model), mesh).items()}


def own_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """A tensor-parallel rank's shard of each parameter, gathered over the data ranks."""
    found = []
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.append((name.removeprefix("module."), whole))
    return found
