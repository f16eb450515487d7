"""Checkpoints of four ranks go on with two and with one, in every container, like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from data_parallel_training import (
    TINY_MB,
    WIDTH,
    Large,
    Strided,
    Tied,
    Wrap,
    assert_equal,
    batches,
    bucketed,
    fsdp,
    zero_1,
    zero_2,
)
from ranks import on_ranks
from sharded_steps import finish, loss_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from training_loops.trainer import fully_shard

from parallel.checkpoints import load_checkpoint, save_checkpoint
from parallel.checkpoints.parts import boxes
from parallel.data import BucketedDDP, ShardedOptimizer, Zero1, optimizer_of_shards

CUT = 2
"""Steps before the checkpoint; others follow it."""


class Forms(Strided, Large):
    """A convolution laid out channels last, a weight of 43 x 8 elements, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


def make(
    kind: type[nn.Module], wrap: Wrap | None, group: dist.ProcessGroup | None, *, owners: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(100)
    model = kind() if wrap is None else wrap(kind(), group)
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith("weight")]},
        {"params": [p for name, p in named if not name.endswith("weight")], "lr": 0.02},
    ]
    if owners:
        return model, ShardedOptimizer(groups, torch.optim.AdamW, process_group=group, **options)
    if wrap is None:
        return model, torch.optim.AdamW(groups, **options)
    return model, optimizer_of_shards(groups, torch.optim.AdamW, **options)


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    num_ranks: int,
    which: slice,
) -> dict[str, Tensor]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in list(batches(rank, num_ranks))[which]:
        loss_of(model, batch).backward()
        finish(model)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {name.removeprefix("module."): v.clone() for name, v in model.state_dict().items()}


def save(
    group: dist.ProcessGroup, folder: Path, kind: type[nn.Module], wrap: Wrap, owners: bool
) -> None:
    model, optimizer = make(kind, wrap, group, owners=owners)
    steps(model, optimizer, dist.get_rank(group), group.size(), slice(CUT))
    save_checkpoint(folder, model, optimizer, group=group)


def load(
    group: dist.ProcessGroup, folder: Path, kind: type[nn.Module], wrap: Wrap, owners: bool
) -> dict[str, Tensor]:
    model, optimizer = make(kind, wrap, group, owners=owners)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(folder, model, optimizer, group=group)
    return steps(model, optimizer, dist.get_rank(group), group.size(), slice(CUT, None))


def one_process(kind: type[nn.Module]) -> dict[str, Tensor]:
    """With the schedule begun anew at the checkpoint, as the ranks do."""
    model, optimizer = make(kind, None, None, owners=False)
    steps(model, optimizer, 0, 1, slice(CUT))
    return steps(model, optimizer, 0, 1, slice(CUT, None))


@pytest.mark.parametrize(
    ("kind", "wrap", "owners"),
    [
        (Forms, fsdp, False),
        (Forms, zero_1, False),
        (Tied, zero_2, False),
        (Forms, bucketed, True),
        (Tied, fsdp, False),
    ],
)
def test_four_ranks_save_and_others_load(
    tmp_path: Path, kind: type[nn.Module], wrap: Wrap, owners: bool
) -> None:
    on_ranks(4, save, tmp_path, kind, wrap, owners)
    wanted = one_process(kind)
    for num_ranks in (4, 2, 1):
        for found in on_ranks(num_ranks, load, tmp_path, kind, wrap, owners):
            assert_equal(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 7), (3, 2, 4), (6,)])
def test_boxes_are_the_range(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(numbers.numel() + 1):
        for stop in range(start, numbers.numel() + 1):
            found = [
                numbers[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten()
                for box in boxes(shape, start, stop)
            ]
            assert len(found) <= 2 * len(shape) - 1
            joined = torch.cat([torch.arange(0), *found])
            assert joined.tolist() == list(range(start, stop))


def test_a_checkpoint_of_one_container_loads_into_another(tmp_path: Path) -> None:
    on_ranks(2, save, tmp_path, Forms, fsdp, False)
    for found in on_ranks(2, load, tmp_path, Forms, zero_2, False):
        assert_equal(found, one_process(Forms), rtol=1e-4, atol=1e-5)
    for found in on_ranks(2, load, tmp_path, Forms, bucketed, True):
        assert_equal(found, one_process(Forms), rtol=1e-4, atol=1e-5)


def test_each_rank_writes_its_part_alone(tmp_path: Path) -> None:
    """Weights and two moments: three tensors of the model, on four ranks about a quarter each."""
    on_ranks(4, save, tmp_path, Forms, fsdp, False)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.distcp")]
    assert len(sizes) == 4
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    stored = [
        torch.Size(chunk.sizes).numel()
        for name, entry in metadata.state_dict_metadata.items()
        if name.endswith("last.weight") or "last.weight." in name
        for chunk in getattr(entry, "chunks", ())
    ]
    # Nothing twice; a step counter besides.
    assert sum(stored) == 3 * (5 * WIDTH + 3) * WIDTH + 1
    assert max(stored) < (5 * WIDTH + 3) * WIDTH / 2


def load_with_pytorch(group: dist.ProcessGroup, folder: Path) -> dict[str, Tensor]:
    """fully_shard's model and optimizer, by PyTorch's own functions."""
    torch.manual_seed(7)
    model = fully_shard(Large(), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": {"state": get_optimizer_state_dict(model, optimizer)["state"]},
    }
    dcp.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    moment = state["optimizer"]["state"]["layers.1.weight"]["exp_avg"]
    weights = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
    return {**weights, "moment": moment.full_tensor()}


def test_fully_shard_loads_it(tmp_path: Path) -> None:
    on_ranks(4, save, tmp_path, Large, fsdp, False)
    model, optimizer = make(Large, None, None, owners=False)
    steps(model, optimizer, 0, 1, slice(CUT))
    wanted = {name: p.detach() for name, p in model.named_parameters()}
    wanted["moment"] = optimizer.state[model.layers[1].weight]["exp_avg"]
    for found in on_ranks(2, load_with_pytorch, tmp_path):
        assert_equal(found, wanted, rtol=1e-4, atol=1e-5)


def refusals(group: dist.ProcessGroup, folder: Path) -> list[str]:
    model, optimizer = make(Tied, fsdp, group, owners=False)
    other = Zero1(Large(), TINY_MB, group=group)
    fewer = optimizer_of_shards(list(model.parameters())[:2], torch.optim.SGD, lr=0.1)
    said = []
    for load_one in (
        lambda: load_checkpoint(folder / "none", model, group=group),
        lambda: load_checkpoint(folder / "alone", model, optimizer, group=group),
        lambda: load_checkpoint(folder / "whole", other, group=group),
        lambda: load_checkpoint(folder / "whole", model, fewer, group=group),
        lambda: save_checkpoint(folder / "alone", model),
    ):
        try:
            load_one()
            said.append("loaded")
        except ValueError as error:
            said.append(str(error).replace(str(folder), "F"))
    return said


def save_both(group: dist.ProcessGroup, folder: Path) -> None:
    model, optimizer = make(Tied, fsdp, group, owners=False)
    save_checkpoint(folder / "alone", model, group=group)
    save_checkpoint(folder / "whole", model, optimizer, group=group)


def test_what_does_not_load_says_why(tmp_path: Path) -> None:
    on_ranks(2, save_both, tmp_path)
    for said in on_ranks(2, refusals, tmp_path):
        assert said == [
            "F/none: holds no checkpoint, or one that is not complete",
            "F/alone: has no optimizer; load the model alone",
            "F/whole: has no last.weight; load it into the same model",
            "F/whole: its parameter groups are of [2, 3] parameters, and the optimizer's of [2], "
            "or of others",
            "the model is trained by 2 ranks and the checkpoint is of 4: give group=, and parts "
            "of a tensor-parallel model a folder each",
        ]


def test_one_process_without_ranks(tmp_path: Path) -> None:
    model, optimizer = make(Tied, None, None, owners=False)
    steps(model, optimizer, 0, 1, slice(CUT))
    save_checkpoint(tmp_path, model, optimizer)
    wanted = steps(model, optimizer, 0, 1, slice(CUT, None))
    again, second = make(Tied, lambda m, g: BucketedDDP(m), None, owners=False)
    load_checkpoint(tmp_path, again, second)
    assert_equal(steps(again, second, 0, 1, slice(CUT, None)), wanted, rtol=1e-6, atol=1e-7)


def test_a_checkpoint_of_more_is_another_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    smaller = nn.Sequential(nn.Linear(2, 2))
    before = smaller[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"has 1\.weight, which the model has not"):
        load_checkpoint(tmp_path, smaller)
    assert torch.equal(smaller[0].weight, before)


def test_an_interrupted_save_over_another_loads_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, nn.Linear(2, 2))

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(dcp.FileSystemWriter, "finish", interrupted)
        with pytest.raises(BaseException, match="KeyboardInterrupt"):
            save_checkpoint(tmp_path, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="not complete"):
        load_checkpoint(tmp_path, nn.Linear(2, 2))


def say_why_not_saved(group: dist.ProcessGroup, folder: Path) -> list[str]:
    model, optimizer = make(Tied, fsdp, group, owners=False)
    said = []
    for name in ("kept", "nowhere"):
        with pytest.raises(ValueError, match=r"cannot be written") as caught:
            save_checkpoint(folder / name, model, optimizer, group=group)
        said.append(str(caught.value).replace(str(folder), "F"))
    return said


def test_all_ranks_say_why_they_cannot_save(tmp_path: Path) -> None:
    """Where rank 0 alone fails, at an older checkpoint, and where all do, at the folder."""
    (tmp_path / "kept" / ".metadata").mkdir(parents=True)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    said = on_ranks(2, say_why_not_saved, tmp_path)
    assert said == [
        [
            "F/kept: cannot be written: F/kept/.metadata: Is a directory",
            "F/nowhere: cannot be written: [Errno 17] File exists: 'F/nowhere'",
        ]
    ] * len(said)


class Heads(nn.Module):
    """An embedding and a head, one parameter or two."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_two_parameters_do_not_become_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, Heads(tied=False))
    tied = Heads(tied=True)
    before = tied.head.weight.detach().clone()
    with pytest.raises(ValueError, match=r"has embedding\.weight and head\.weight apart"):
        load_checkpoint(tmp_path, tied)
    assert torch.equal(tied.head.weight, before)


def test_one_parameter_becomes_two(tmp_path: Path) -> None:
    saved, loaded = Heads(tied=True), Heads(tied=False)
    save_checkpoint(tmp_path, saved)
    load_checkpoint(tmp_path, loaded)
    load_checkpoint(tmp_path, Heads(tied=True))
    for weight in (loaded.embedding.weight, loaded.head.weight):
        assert torch.equal(weight, saved.head.weight)


@pytest.mark.parametrize("wrong", ["optimizer", "groups"])
def test_a_refusal_changes_nothing(tmp_path: Path, wrong: str) -> None:
    saved, model = nn.Linear(2, 2), nn.Linear(2, 2)
    save_checkpoint(tmp_path, saved, torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9))
    if wrong == "optimizer":
        optimizer, words = torch.optim.AdamW(model.parameters()), "another optimizer than AdamW"
    else:
        optimizer, words = torch.optim.AdamW([model.bias, model.weight]), "or of others"
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=words):
        load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.weight, before)
    assert "betas" in optimizer.param_groups[0]


@pytest.mark.parametrize(
    ("name", "left", "words"),
    [
        (".metadata", 20, "not complete"),
        ("__0_0.distcp", 0, "cannot be read"),
        ("__0_0.distcp", None, "cannot be read"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    tmp_path: Path, name: str, left: int | None, words: str
) -> None:
    """Cut to ``left`` bytes, or missing."""
    save_checkpoint(tmp_path, nn.Linear(8, 8))
    damaged = tmp_path / name
    if left is None:
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes()[:left])
    with pytest.raises(ValueError, match=words) as error:
        load_checkpoint(tmp_path, nn.Linear(8, 8))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)
