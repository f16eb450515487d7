"""A tensor-parallel MLP with DTensor: weights scattered, or local slices declared as shards.

    torchrun --nproc-per-node 2 -m parallel.examples.tensor_parallel_mlp

The MLP is y = gelu(x W1) W2 with W1 split by columns and W2 by rows (Megatron-LM, Shoeybi et
al. 2019, section 3): each rank computes a slice of the hidden layer, and one all-reduce adds up
the parts of y. Its weights come to the ranks in one of two ways:

    shard     one rank has the whole tensor and scatters the slices: data moves
              (DTensor: ``distribute_tensor``)
    declare   every rank has its slice already, and says so: metadata alone, nothing moves and
              nothing is checked (DTensor: ``DTensor.from_local``)

A matmul reads the placement, not how the data got there, so that both give the same y; if the
slices that were declared are not those of one tensor, nobody notices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

D_MODEL, D_HIDDEN, TOKENS = 8, 16, 4

COLUMNS, ROWS = 1, 0
"""Dimensions that W1 [D_MODEL, D_HIDDEN] and W2 [D_HIDDEN, D_MODEL] are split along."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Weights:
    """W1 and W2, whole or as DTensors."""

    w1: Tensor
    w2: Tensor


def whole_weights() -> Weights:
    """Normal weights, scaled to keep the size of activations."""
    generator = torch.Generator().manual_seed(0)
    return Weights(
        w1=torch.randn(D_MODEL, D_HIDDEN, generator=generator) / D_MODEL**0.5,
        w2=torch.randn(D_HIDDEN, D_MODEL, generator=generator) / D_HIDDEN**0.5,
    )


def shard(mesh: DeviceMesh) -> Weights:
    """Scatter from rank 0, the only one whose tensors matter."""
    whole = whole_weights()
    if mesh.get_local_rank() != 0:
        # The scatter overwrites the tensors of other ranks unread.
        whole = Weights(w1=torch.zeros_like(whole.w1), w2=torch.zeros_like(whole.w2))
    return Weights(
        w1=distribute_tensor(whole.w1, mesh, [Shard(COLUMNS)]),
        w2=distribute_tensor(whole.w2, mesh, [Shard(ROWS)]),
    )


def declare(mesh: DeviceMesh) -> Weights:
    """Declare that the slices which each rank has made by itself are those of one tensor."""
    whole, rank = whole_weights(), mesh.get_local_rank()
    own_w1 = whole.w1.chunk(mesh.size(), dim=COLUMNS)[rank]
    own_w2 = whole.w2.chunk(mesh.size(), dim=ROWS)[rank]
    return Weights(
        w1=DTensor.from_local(own_w1, mesh, [Shard(COLUMNS)], run_check=False),
        w2=DTensor.from_local(own_w2, mesh, [Shard(ROWS)], run_check=False),
    )


def mlp(x: Tensor, weights: Weights) -> Tensor:
    """gelu(x W1) W2; on DTensors the result is a partial sum on each rank."""
    return F.gelu(x @ weights.w1) @ weights.w2


def tokens() -> Tensor:
    return torch.randn(TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1))


@dataclass(kw_only=True, slots=True, frozen=True)
class MlpOutcome:
    """y on every rank, and the collectives that each stage took, by name."""

    y: Tensor
    to_distribute: dict[str, int]
    to_compute: dict[str, int]


def run(mesh: DeviceMesh, distribute: Callable[[DeviceMesh], Weights]) -> MlpOutcome:
    """Bring the weights to the ranks in the given way, and compute y."""
    with CommDebugMode() as distributing:
        weights = distribute(mesh)
    x = DTensor.from_local(tokens(), mesh, [Replicate()], run_check=False)
    with CommDebugMode() as computing:
        y = mlp(x, weights)
        assert isinstance(y, DTensor), "DTensors in, DTensor out"
        whole_y = y.full_tensor()
    return MlpOutcome(y=whole_y, to_distribute=_counts(distributing), to_compute=_counts(computing))


def _counts(comm: Any) -> dict[str, int]:
    return {str(name).split(".")[-1]: count for name, count in comm.get_comm_counts().items()}


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = mlp(tokens(), whole_weights())
    for distribute in (shard, declare):
        found = run(mesh, distribute)
        if mesh.get_local_rank() == 0:
            error = float((found.y - expected).abs().max())
            print(
                f"{distribute.__name__:<8} to distribute: {found.to_distribute or 'nothing'}; "
                f"to compute: {found.to_compute}; largest error {error:.1e}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
