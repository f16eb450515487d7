"""ZeRO and FSDP over NCCL: streams and memory, which gloo on a CPU has none of."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, on_gpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from parallel.data import FSDP, BucketedDDP, Zero1, Zero2, optimizer_of_shards

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs several CUDA devices, torch sees {NUM_GPUS}"),
]

RANKS = [ranks for ranks in (2, 4, 8) if ranks <= NUM_GPUS] or [2]

WIDTH, DEPTH, BATCH, STEPS = 2048, 12, 16, 6

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


class Layer(nn.Module):
    """Two matrices, and a norm that is whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(DEPTH)))


def bucketed(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return BucketedDDP(module, group=group)


def zero_1(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return Zero1(module, group=group)


def zero_2(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return Zero2(module, group=group)


def fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return FSDP(module, group=group)


def fsdp_bfloat16(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return FSDP(module, compute_dtype=torch.bfloat16, group=group)


def peer_bfloat16(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in module.children():
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def train(
    group: dist.ProcessGroup, wrap: Wrap, kind: type[torch.optim.Optimizer]
) -> tuple[list[float], int]:
    """Losses, steps in a row without a pause, and the peak of memory in bytes from the second."""
    device = device_of(group)
    # Nothing of the call before is to be counted.
    gc.collect()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.manual_seed(1)
    with torch.device(device):
        model = wrap(stack(), group)
        data = torch.randn(group.size(), STEPS, BATCH, WIDTH)[dist.get_rank(group)]
    options: dict[str, Any] = {"fused": True} if kind is torch.optim.AdamW else {}
    # AdamW moves every weight by about the rate, whatever the gradient.
    rate = 1e-5 if kind is torch.optim.AdamW else 1e-3
    optimizer = optimizer_of_shards(model.parameters(), kind, lr=rate, **options)
    losses = []
    for step, batch in enumerate(data):
        if step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        loss = model(batch).float().square().mean()
        loss.backward()
        if hasattr(model, "finish_gradient_synchronization"):
            model.finish_gradient_synchronization()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total, dist.ReduceOp.AVG, group=group)
    if isinstance(model, Zero1 | Zero2):
        model.wait_for_gathering()
    return total.tolist(), torch.cuda.max_memory_allocated(device) - before


@cache
def trained(
    num_ranks: int, wrap: Wrap, kind: type[torch.optim.Optimizer]
) -> list[tuple[list[float], int]]:
    """:func:`train` on each rank, run once for all tests."""
    return on_gpus(num_ranks, train, wrap, kind)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("wrap", [zero_1, zero_2, fsdp])
def test_losses_are_those_of_all_reduce(
    wrap: Wrap, kind: type[torch.optim.Optimizer], num_ranks: int
) -> None:
    """A block that is used before it has come, or freed too early, would show."""
    wanted, _ = trained(num_ranks, bucketed, kind)[0]
    assert wanted[-1] < wanted[0]
    for found, _ in trained(num_ranks, wrap, kind):
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_bfloat16_follows_fully_shard_with_no_more_memory(num_ranks: int) -> None:
    wanted = trained(num_ranks, peer_bfloat16, torch.optim.AdamW)
    found = trained(num_ranks, fsdp_bfloat16, torch.optim.AdamW)
    for (losses, peak), (peer_losses, peer_peak) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(peer_losses, rel=2e-2)
        # Norms are whole on every rank here.
        assert peak <= 1.01 * peer_peak


@pytest.mark.parametrize("num_ranks", RANKS)
def test_memory_falls_from_stage_to_stage(num_ranks: int) -> None:
    peaks = [
        max(peak for _, peak in trained(num_ranks, wrap, torch.optim.AdamW))
        for wrap in (bucketed, zero_1, zero_2, fsdp)
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)
