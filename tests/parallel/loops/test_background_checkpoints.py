"""Checkpoints that are written while training goes on hold the state of the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_training import Wrap, assert_equal, batches, bucketed, fsdp, zero_2
from ranks import on_ranks
from sharded_steps import finish, loss_of
from test_checkpoints import Forms
from torch import Tensor, nn

from parallel.checkpoints import (
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_in_background,
    sharded_state_dict,
)
from parallel.data import ShardedOptimizer, optimizer_of_shards


class Training:
    """A model of odd shapes with AdamW, and the batches of a rank."""

    def __init__(self, wrap: Wrap | None, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(100)
        self.group = group
        self.model: nn.Module = Forms() if wrap is None else wrap(Forms(), group)
        params = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer
        if wrap is bucketed:
            kind = torch.optim.AdamW
            self.optimizer = ShardedOptimizer(params, kind, process_group=group, lr=0.05)
        elif wrap is None:
            self.optimizer = torch.optim.AdamW(params, lr=0.05)
        else:
            self.optimizer = optimizer_of_shards(params, torch.optim.AdamW, lr=0.05)
        rank, size = (0, 1) if group is None else (dist.get_rank(group), group.size())
        self.batches = list(batches(rank, size))

    def step(self, number: int) -> None:
        loss_of(self.model, self.batches[number]).backward()
        finish(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Tensor]:
        """Weights, and the optimizer's state by number."""
        state = {n.removeprefix("module."): v.clone() for n, v in self.model.state_dict().items()}
        for number, of_parameter in self.optimizer.state_dict()["state"].items():
            state |= {f"{number} {key}": value.clone() for key, value in of_parameter.items()}
        return state


def save_and_train_on(
    group: dist.ProcessGroup | None, wrap: Wrap | None, folder: Path
) -> list[dict[str, Tensor]]:
    """Two checkpoints, of steps 1 and 2, between which nobody waits."""
    training = Training(wrap, group)
    wanted = []
    for number in range(2):
        training.step(number)
        wanted.append(training.whole())
        saving = save_checkpoint_in_background(
            folder / str(number), training.model, training.optimizer, group=group
        )
    training.step(2)
    training.step(3)
    saving.result()
    return wanted


def load(
    group: dist.ProcessGroup | None, wrap: Wrap | None, folder: Path
) -> list[dict[str, Tensor]]:
    found = []
    for number in range(2):
        training = Training(wrap, group)
        training.step(3)
        load_checkpoint(folder / str(number), training.model, training.optimizer, group=group)
        found.append(training.whole())
    return found


@pytest.mark.parametrize("wrap", [bucketed, zero_2, fsdp])
def test_the_state_of_the_call_is_saved(wrap: Wrap, tmp_path: Path) -> None:
    wanted, *_ = on_ranks(4, save_and_train_on, wrap, tmp_path)
    for of_ranks in (on_ranks(2, load, wrap, tmp_path), [load(None, None, tmp_path)]):
        for found in of_ranks:
            for got, want in zip(found, wanted, strict=True):
                assert_equal(got, want, rtol=0, atol=0)


def test_one_process(tmp_path: Path) -> None:
    wanted = save_and_train_on(None, None, tmp_path)
    for got, want in zip(load(None, None, tmp_path), wanted, strict=True):
        assert_equal(got, want, rtol=0, atol=0)


def save_twice(group: dist.ProcessGroup, folder: Path) -> list[int]:
    """The bytes that a rank writes, with and without waiting."""
    training = Training(fsdp, group)
    training.step(0)
    save_checkpoint(folder / "waited", training.model, training.optimizer, group=group)
    save_checkpoint_in_background(
        folder / "background", training.model, training.optimizer, group=group
    ).result()
    dist.barrier(group)
    name = f"__{dist.get_rank(group)}_0.distcp"
    return [(folder / kind / name).stat().st_size for kind in ("waited", "background")]


def test_a_rank_writes_its_own_part(tmp_path: Path) -> None:
    for waited, background in on_ranks(4, save_twice, tmp_path):
        assert background == waited


def pytorchs(group: dist.ProcessGroup, folder: Path) -> str:
    training = Training(fsdp, group)
    state: dict[str, Any] = sharded_state_dict(training.model)
    try:
        dcp.async_save(state, checkpoint_id=folder, process_group=group)
    except ValueError as error:
        return str(error)
    return "saved"


def test_pytorchs_own_copies_are_refused(tmp_path: Path) -> None:
    words = "torch.distributed.checkpoint.async_save copies no parts of tensors: use "
    for said in on_ranks(2, pytorchs, tmp_path):
        assert said == words + "parallel.checkpoints.save_checkpoint_in_background"


def of_a_part_of_the_world(group: dist.ProcessGroup, folder: Path) -> str:
    training = Training(fsdp, group)
    with pytest.raises(ValueError, match=r"^group: has 2 of") as error:
        save_checkpoint_in_background(folder, training.model, group=group)
    return str(error.value)


def test_a_part_of_the_world_brings_a_group(tmp_path: Path) -> None:
    for said in on_ranks(2, of_a_part_of_the_world, tmp_path):
        assert said == (
            "group: has 2 of the world's 4 ranks: give a second group of the same ranks as "
            'writing_group=, by dist.new_group(ranks, "gloo")'
        )
