"""The DTensor example: a scatter moves data, a declaration does not, and both compute the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallel.examples import tensor_parallel_mlp as example


def outcome_of(group: dist.ProcessGroup, way: str) -> example.MlpOutcome:
    return example.run(DeviceMesh.from_group(group, "cpu"), getattr(example, way))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("way", "scatters"), [("shard", 2), ("declare", 0)])
def test_both_ways_compute_the_whole_mlp(num_ranks: int, way: str, scatters: int) -> None:
    expected = example.mlp(example.tokens(), example.whole_weights())
    for found in on_ranks(num_ranks, outcome_of, way):
        torch.testing.assert_close(found.y, expected)
        assert sum(found.to_distribute.values()) == scatters
        assert all("scatter" in name for name in found.to_distribute)
        # One all-reduce of partial sums, as tensor parallelism promises.
        assert list(found.to_compute.values()) == [1]
        assert "all_reduce" in next(iter(found.to_compute))


def wrongly_declared(group: dist.ProcessGroup) -> Tensor:
    """Every rank declares the first slice to be its own."""
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = example.whole_weights()
    weights = example.Weights(
        w1=DTensor.from_local(whole.w1.chunk(2, dim=1)[0], mesh, [Shard(1)], run_check=False),
        w2=DTensor.from_local(whole.w2.chunk(2, dim=0)[0], mesh, [Shard(0)], run_check=False),
    )
    x = DTensor.from_local(example.tokens(), mesh, [Replicate()], run_check=False)
    return example.mlp(x, weights).full_tensor()


def test_nobody_checks_a_declaration() -> None:
    expected = example.mlp(example.tokens(), example.whole_weights())
    for found in on_ranks(2, wrongly_declared):
        assert not torch.allclose(found, expected)
