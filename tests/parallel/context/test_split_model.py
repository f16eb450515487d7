"""Training with split sequences: losses and all gradients are those of one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import GROUPS, on_ranks
from torch import Tensor, nn

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks.batch import Batch, split_batch, whole_batch
from kernels import BACKENDS
from models.transformer import Transformer, cross_entropy
from parallel.data.gradients import average_gradients

CPU = torch.device("cpu")

MODEL = (
    *("model=tiny", "model.num_layers=2", "model.d_model=32", "model.d_ff=48"),
    *("model.num_heads=4", "model.num_kv_heads=2", "model.vocab_size=23", "batch_size=2"),
)

STEPS = 3


def case_of(seq_len: int, *arguments: str) -> Case:
    (case,) = compose_request([*MODEL, f"seq_len={seq_len}", "device=cpu", *arguments]).cases
    return case


@dataclass
class Trained:
    """Results of a few steps of plain gradient descent."""

    losses: list[float]
    gradients: list[Tensor]
    """Gradients of the last step."""


def train(case: Case, attention: Any, batch: Batch, group: dist.ProcessGroup | None) -> Trained:
    torch.manual_seed(5)
    assert case.model is not None
    model = Transformer(case.model, attention, variant=case.attention_variant)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        logits = model(batch.tokens, batch.positions)
        loss = cross_entropy(logits, batch.targets, batch.num_targets)
        loss.backward()
        if group is not None:
            average_gradients(model.parameters(), group)
            loss = loss.detach()
            dist.all_reduce(loss, group=group)
            loss /= group.size()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad  # type: ignore[operator]
    return Trained(losses, [p.grad for p in model.parameters() if p.grad is not None])


def train_split(group: dist.ProcessGroup, name: str, case: Case) -> Trained:
    entry = BACKENDS[name]
    scheme = entry.target(name=name, kernel="naive")
    with scheme.bind(group, CPU) as attention:
        batch = split_batch(case, CPU, dist.get_rank(group), attention.layout)
        return train(case, attention, batch, group)


@pytest.mark.parametrize(
    "name", ["ring", "zigzag", "striped", "llama3", "zigzag_llama3", "ulysses"]
)
@pytest.mark.parametrize(("num_ranks", "seq_len"), [(2, 24), (4, 24), (3, 23)])
def test_losses_and_gradients_are_those_of_one_device(
    name: str, num_ranks: int, seq_len: int
) -> None:
    """Also where the length does not divide: padding counts for nothing."""
    case = case_of(seq_len)
    naive = BACKENDS["naive"].target(name="naive")
    expected = train(case, naive, whole_batch(case, CPU, 0), None)
    assert expected.losses[-1] < expected.losses[0]
    for found in on_ranks(num_ranks, train_split, name, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        for got, wanted in zip(found.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["zigzag", "llama3", "ulysses"])
def test_sinks_and_alternating_windows_are_those_of_one_device(name: str) -> None:
    """Each rank has a part of every sink's gradient, of its own queries or of its heads."""
    masks = ("attention.window=7", "attention.sinks=true", "model.full_attention_every=2")
    case = case_of(24, "attention=naive", *masks)
    naive = BACKENDS["naive"].target(name="naive")
    expected = train(case, naive, whole_batch(case, CPU, 0), None)
    assert sum(tuple(x.shape) == (4,) for x in expected.gradients) == 2
    for found in on_ranks(2, train_split, name, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        for got, wanted in zip(found.gradients, expected.gradients, strict=True):
            assert wanted.abs().max() > 1e-4
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ulysses_ring", "ulysses_zigzag"])
def test_hybrids_on_a_mesh(name: str) -> None:
    """Two groups of two ranks, and padding."""
    case = case_of(23)
    naive = BACKENDS["naive"].target(name="naive")
    expected = train(case, naive, whole_batch(case, CPU, 0), None)
    for found in on_ranks(4, train_split, name, case):
        assert found.losses == pytest.approx(expected.losses, rel=1e-5)
        for got, wanted in zip(found.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def strategy_step(group: dist.ProcessGroup, case: Case) -> list[Tensor]:
    """Gradients of one step on a mesh of all four processes, through the strategy."""
    rank = dist.get_rank()
    assert group.size() == len(GROUPS[4]) == case.world_size
    with case.attention.bind(case.parallel.cp_group(), CPU) as attention:
        batch = split_batch(case, CPU, rank, attention.layout)
        torch.manual_seed(5)
        assert case.model is not None
        model = case.parallel.wrap(Transformer(case.model, attention))
        logits = model(batch.tokens, batch.positions)
        cross_entropy(logits, batch.targets, batch.num_targets).backward()
        case.parallel.after_backward(model)
    return [whole_gradient(p, group) for p in model.parameters()]


def whole_gradient(parameter: nn.Parameter, group: dist.ProcessGroup) -> Tensor:
    """The gradient of a parameter, joined from all ranks' shards if it is sharded."""
    assert parameter.grad is not None
    if not hasattr(parameter, "origin"):
        return parameter.grad
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, parameter.grad, group=group)
    return parameter.origin.join(parts)


@pytest.mark.parametrize(
    ("arguments", "dp"),
    [
        (("parallel.cp=4",), 1),
        (("parallel=ddp_torch", "parallel.dp=2", "parallel.cp=2"), 2),
        (("parallel=ddp_bucketed", "parallel.dp=2", "parallel.cp=2"), 2),
        (("parallel=zero_1", "parallel.dp=2", "parallel.cp=2"), 2),
        (
            ("parallel=fsdp", "parallel.dp=2", "parallel.cp=2", "parallel.replicate_below=40"),
            2,
        ),
    ],
    ids=["cp", "PyTorch's dp and cp", "dp and cp", "ZeRO and cp", "FSDP and cp"],
)
def test_strategies_average_over_both_axes(arguments: tuple[str, ...], dp: int) -> None:
    case = case_of(24, "attention=zigzag", "attention.kernel=naive", *arguments)
    naive = BACKENDS["naive"].target(name="naive")
    torch.manual_seed(5)
    assert case.model is not None
    model = Transformer(case.model, naive)
    for index in range(dp):
        batch = whole_batch(case, CPU, index)
        (cross_entropy(model(batch.tokens, batch.positions), batch.targets) / dp).backward()
    # whole_batch sets the seed; the model was made before.
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for found in on_ranks(4, strategy_step, case):
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
