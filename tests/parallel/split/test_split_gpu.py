"""The functions of the library over NCCL, in bfloat16; on gloo ranks in test_split_attention.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, on_gpus, on_ranks
from split_attention import SCALE, Batch, exact
from torch import Tensor

from parallel.split import (
    release,
    scheme_names,
    shard,
    shard_stream,
    split_attention,
    stream_attention,
)

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

needs_gpus = pytest.mark.skipif(
    NUM_GPUS < 2, reason=f"needs several CUDA devices, torch sees {NUM_GPUS}"
)

PACKED = Batch(
    lengths=(500, 17, 331, 176), packed=True, num_heads=8, head_dim=64, dtype=torch.bfloat16
)


def errors(group: dist.ProcessGroup, scheme: str) -> list[float]:
    """Of o, dq, dk and dv of a packed batch, relative to the largest entry."""
    device = device_of(group)
    starts = PACKED.packing().cu_seqlens_q.to(device)
    arguments: dict[str, Any] = {"causal": True, "scale": SCALE, "cu_seqlens": starts}

    def own(x: Tensor) -> Tensor:
        if scheme == "stream":
            return shard_stream(x, pad_value=0, group=group)
        return shard(x, scheme, dim=0, cu_seqlens=starts, pad_value=0, group=group)

    q, k, v, do = (own(x).to(device) for x in PACKED.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    real = own(torch.ones_like(PACKED.tensors()[0])).to(device)
    if scheme == "stream":
        o = stream_attention(*leaves, group=group, **arguments)
    else:
        o = split_attention(scheme, *leaves, group=group, **arguments)
    # A gradient of padding that must lead nowhere.
    found = [o.detach(), *torch.autograd.grad(o, leaves, do + 100 * (1 - real))]
    wanted = [own(x).to(device) for x in exact(PACKED)]
    masks = [own(torch.ones_like(x)).to(device) for x in exact(PACKED)]
    release(group)
    return [
        float(((got.double() - want).abs() * mask).max() / want.abs().max())
        for got, want, mask in zip(found, wanted, masks, strict=True)
    ]


SCHEMES = [name for name in scheme_names() if name != "context_parallel_torch"]


@pytest.mark.multigpu
@needs_gpus
@pytest.mark.parametrize("scheme", [*SCHEMES, "stream"])
def test_packed_over_nccl(scheme: str) -> None:
    for found in on_gpus(2, errors, scheme):
        assert max(found) < 0.02


@pytest.mark.parametrize("scheme", ["zigzag", "stream"])
def test_packed_over_gloo(scheme: str) -> None:
    """The same on CPUs, so that it is known to run."""
    for found in on_ranks(2, errors, scheme):
        assert max(found) < 0.02
