"""Hybrid sharding: FSDP in two groups of two ranks, as one process of all four batches."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from data_parallel_training import (
    MODELS,
    WIDTH,
    Large,
    Plain,
    Run,
    assert_equal,
    bounds_of,
    expected,
    train,
)
from ranks import on_ranks
from sharded_steps import loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.checkpoints import load_checkpoint, save_checkpoint
from parallel.data import FSDP


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(module: nn.Module, group: dist.ProcessGroup | None, below: int = WIDTH + 1) -> FSDP:
    return FSDP(
        module,
        replicate_below=below,
        group=mesh()["shard"].get_group(),
        replicate_group=mesh()["replicate"].get_group(),
    )


def train_hybrid(
    group: dist.ProcessGroup, model: type[nn.Module], run: Run, below: int
) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    torch.manual_seed(100 + rank)
    return train(hybrid(model(), group, below), run, rank, group.size())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("run", "below"), [(Run(optimizer=torch.optim.AdamW), 9), (Run(passes=3), 0)]
)
def test_as_one_process(model: type[nn.Module], run: Run, below: int) -> None:
    for found in on_ranks(4, train_hybrid, model, run, below):
        assert_equal(found, expected(model, run), **bounds_of(model, run))


def shares(group: dist.ProcessGroup) -> list[tuple[int, float]]:
    torch.manual_seed(dist.get_rank(group))
    model = hybrid(Large(), group, 0)
    assert model.world_size == 4
    loss_of(model, torch.ones(2, WIDTH) * dist.get_rank(group)).backward()
    model.finish_gradient_synchronization()
    norm = model.clip_grad_norm_(0.01)
    return [(sum(p.numel() for p in model.parameters()), float(norm))]


def test_a_group_holds_one_copy() -> None:
    """603 elements; ranks 0 and 2 hold the same shards, and clip by the same norm."""
    (a, norm), (b, _), (c, _), (d, _) = (found[0] for found in on_ranks(4, shares))
    assert a + b == 603
    assert (c, d) == (a, b)
    assert {round(found[0][1], 6) for found in on_ranks(4, shares)} == {round(norm, 6)}


def save(group: dist.ProcessGroup, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(5)
    model = hybrid(Plain(), group)
    save_checkpoint(folder, model, group=group)
    return dict(model.state_dict())


def load(group: dist.ProcessGroup, folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(6)
    model = FSDP(Plain(), replicate_below=0, group=group)
    load_checkpoint(folder, model, group=group)
    return dict(model.state_dict())


def test_a_checkpoint_is_written_once(tmp_path: Path) -> None:
    (wanted, *_) = on_ranks(4, save, tmp_path)
    for found in on_ranks(2, load, tmp_path):
        assert_equal(found, wanted, rtol=0, atol=0)


def test_groups_come_together() -> None:
    given = partial(FSDP, Plain(), replicate_group=object())
    with pytest.raises(ValueError, match=r"^replicate_group: needs group=, the ranks that share"):
        given()
