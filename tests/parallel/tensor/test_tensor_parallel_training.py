"""Tensor parallelism on gloo ranks, alone and on a mesh with other axes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tensor_parallel_training import (
    BOUNDS,
    CPU,
    ON_FOUR,
    case_of,
    make_model,
    naive,
    tp_mesh,
    train_on_mesh,
    train_one_process,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness.cases.case import Case
from harness.tasks.batch import whole_batch
from models.transformer import cross_entropy
from parallel import STRATEGIES
from parallel.tensor import (
    gradient_norm,
    split_transformer,
    vocab_parallel_cross_entropy,
    whole_parameters,
)
from parallel.tensor.plan import split_dim


def train_fully_sharded(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    """Gradients with PyTorch's FSDP over the data ranks of a model that tp ranks share."""
    tp, data = case.parallel.tp_mesh(), case.parallel.data_mesh()
    module = make_model(case, case.attention, "meta")
    split_transformer(module, tp, CPU)
    for block in module.blocks:
        fully_shard(block, mesh=data)
    fully_shard(module, mesh=data)
    batch = whole_batch(case, CPU, case.parallel.data_rank(dist.get_rank()))
    logits = module(batch.tokens, batch.positions)
    vocab_parallel_cross_entropy(logits, batch.targets, mesh=tp).backward()
    found = {}
    for name, parameter in module.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.to_local().numel() == parameter.grad.numel() // 2
        found[name] = parameter.grad.full_tensor()
    # Every rank has its part of weights; one after the other they make the whole.
    parts: list[Any] = [None] * tp.size()
    dist.all_gather_object(parts, found, group=tp.get_group())
    dims = {name: split_dim(name) for name in found}
    return {
        name: parts[0][name] if dim is None else torch.cat([part[name] for part in parts], dim)
        for name, dim in dims.items()
    }


MESHES = {
    "tp": (ON_FOUR, "parallel.tp=4"),
    "cp x tp": ("attention=zigzag", "attention.kernel=naive", "parallel.cp=2", "parallel.tp=2"),
    "cp x tp, padded": (
        *("attention=ring", "attention.kernel=naive", "seq_len=15"),
        *("parallel.cp=2", "parallel.tp=2"),
    ),
    "dp x tp with sinks": (
        *("parallel=fsdp", "parallel.dp=2", "parallel.tp=2", "attention.sinks=true"),
        *("attention.window=5", "model.full_attention_every=2"),
    ),
    "dp x tp of one rank": ("parallel=ddp_naive", "parallel.dp=4"),
    "dp of one rank x tp": (ON_FOUR, "parallel=ddp_bucketed", "parallel.dp=1", "parallel.tp=4"),
    **{
        f"{name} x tp": (f"parallel={name}", "parallel.dp=2", "parallel.tp=2")
        for name in STRATEGIES.names()
        if name != "none"
    },
}


class TestWeightsAreThoseOfOneProcess:
    @pytest.mark.parametrize(
        ("name", "optimizer"),
        [
            *((name, "sgd") for name in MESHES),
            *((name, "adamw") for name in ("tp", "cp x tp", "sharded_optimizer x tp")),
        ],
    )
    def test_every_mesh(self, name: str, optimizer: str) -> None:
        case = case_of(*MESHES[name])
        wanted = train_one_process(case, case.parallel.dp, optimizer)
        ranks = on_ranks(4, train_on_mesh, case, optimizer)
        for found in ranks:
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(
                    found[key], value, msg=lambda text, key=key: key + text, **BOUNDS[optimizer]
                )
                # Also of what is not split, which nothing but its gradient's sum keeps equal.
                assert torch.equal(found[key], ranks[0][key]), key

    def test_fully_sharded_over_the_data_ranks(self) -> None:
        """A container that shards sees plain parameters, and needs the data ranks alone."""
        case = case_of("parallel=ddp_naive", "parallel.dp=2", "parallel.tp=2")
        model = make_model(case, naive())
        for index in range(2):
            batch = whole_batch(case, CPU, index)
            (cross_entropy(model(batch.tokens, batch.positions), batch.targets) / 2).backward()
        for found in on_ranks(4, train_fully_sharded, case):
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad)

    @pytest.mark.parametrize("masks", [(), ("attention.sinks=true", "attention.softcap=0.5")])
    def test_two_ranks_step_by_step(self, masks: tuple[str, ...]) -> None:
        """Grouped queries; first weights to the bit, losses, gradients and their norm."""
        case = case_of("parallel.tp=2", *masks)
        model = make_model(case, naive())
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        batch = whole_batch(case, CPU, 0)
        loss = cross_entropy(model(batch.tokens, batch.positions), batch.targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert any("sinks" in name for name in first) == bool(masks)
        for found in on_ranks(2, step_by_step, case):
            assert found["first"].keys() == first.keys()
            assert all(torch.equal(found["first"][name], first[name]) for name in first)
            assert found["loss"] == pytest.approx(loss.item(), rel=1e-6)
            assert found["norm"] == pytest.approx(float(norm), rel=1e-5)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(found["gradients"][name], parameter.grad)


def step_by_step(group: dist.ProcessGroup, case: Case) -> dict[str, Any]:
    mesh = tp_mesh(group)
    model = make_model(case, naive(), "meta")
    split_transformer(model, mesh, CPU)
    first = whole_parameters(model.named_parameters(), mesh)
    batch = whole_batch(case, CPU, 0)
    logits = model(batch.tokens, batch.positions)
    loss = vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh)
    loss.backward()
    norm = gradient_norm(model.named_parameters(), mesh)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    gradients = whole_parameters(model.named_parameters(), mesh)
    return {"first": first, "loss": loss.item(), "norm": float(norm), "gradients": gradients}


def train_compiled(group: dist.ProcessGroup, case: Case) -> list[list[Tensor]]:
    """Gradients with and without blocks compiled, each in one graph."""
    mesh = tp_mesh(group)
    batch = whole_batch(case, CPU, 0)
    found = []
    for compiled in (False, True):
        model = make_model(case, naive(), "meta")
        split_transformer(model, mesh, CPU)
        if compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        logits = model(batch.tokens, batch.positions)
        vocab_parallel_cross_entropy(logits, batch.targets, mesh=mesh).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    torch._dynamo.reset()
    return found


def test_compiled_blocks_have_the_same_gradients() -> None:
    """In one graph each: exchanges between ranks do not break it."""
    for plain, compiled in on_ranks(2, train_compiled, case_of("parallel.tp=2")):
        assert len(plain) == len(compiled) == 21
        for found, wanted in zip(compiled, plain, strict=True):
            torch.testing.assert_close(found, wanted)


def step_with_overflow(group: dist.ProcessGroup, overflows: bool) -> tuple[bool, float]:
    """Whether a rank that sees no overflow itself moved, and the scale afterwards."""
    strategy = STRATEGIES["none"].target(name="none", tp=4)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = strategy.grad_scaler("cpu", enabled=True)
    scaler.scale(weight.sum()).backward()
    if overflows and dist.get_rank() == 2:
        assert weight.grad is not None
        weight.grad[1] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    return bool((weight != 1).any()), scaler.get_scale()


@pytest.mark.parametrize(
    ("overflows", "outcome"), [(False, (True, 2.0**16)), (True, (False, 2.0**15))]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    overflows: bool, outcome: tuple[bool, float]
) -> None:
    assert on_ranks(4, step_with_overflow, overflows) == [outcome] * 4
