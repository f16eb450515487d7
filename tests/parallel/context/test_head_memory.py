"""Predicted memory of exchanged heads beside the tensors that live in a pass.

Over memory that peers read, since a message's own copies depend on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from live_tensors import LiveTensors
from ranks import on_ranks
from split_attention import CPU, PROBLEM, SCALE, Batch, scheme_of, shard
from torch import Tensor

from kernels import Attention, AttentionSpec
from parallel.context.heads import memory

LENGTH, HEAD_DIM, NUM_HEADS = 512, 64, 8


@dataclass(kw_only=True, slots=True)
class Copies(Attention):
    """Results of the right sizes, and nothing beside them."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        shape = q.shape[:3] if spec.packing is None else (q.shape[1], q.shape[0])
        return q.clone(), q.new_zeros(shape)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return q.clone(), k.clone(), v.clone()


def of_copies(num_heads: int, num_kv_heads: int) -> dict[str, float]:
    """Bytes of such a kernel's pass, by part."""
    head = LENGTH * HEAD_DIM * 4.0
    q, kv = num_heads * head, 2 * num_kv_heads * head
    parts = {"inputs": q + kv, "output": q, "lse": q / HEAD_DIM}
    return parts | {"output_gradient": q, "gradients": q + kv}


def without_gradients(num_heads: int, num_kv_heads: int) -> dict[str, float]:
    parts = of_copies(num_heads, num_kv_heads)
    return {name: parts[name] for name in ("inputs", "output", "lse")}


def measured_over_predicted(
    group: dist.ProcessGroup, head_groups: int, num_kv_heads: int, needs_grad: bool, packed: bool
) -> float:
    options = {"kernel": "naive", "transport": "symmetric", "head_groups": head_groups}
    scheme = scheme_of("ulysses", **options)
    heads = {"num_heads": NUM_HEADS, "num_kv_heads": num_kv_heads, "head_dim": HEAD_DIM}
    sizes = {"q_len": LENGTH, "kv_len": LENGTH, "cp": group.size()}
    problem = replace(PROBLEM, packed=packed, needs_grad=needs_grad, **heads, **sizes)
    predicted = memory.peak(
        problem,
        scheme.layout(group.size()),
        scheme.head_split(group.size(), NUM_HEADS, num_kv_heads),
        of_copies if needs_grad else without_gradients,
        num_groups=head_groups,
        published=True,
    )
    assert predicted is not None
    batch = Batch(lengths=(LENGTH,), packed=packed, **heads)
    with scheme.bind(group, CPU) as bound:
        bound._kernel = Copies(name="copies")
        q, k, v, do = (shard(bound, x, batch).clone() for x in batch.tensors())
        leaves = [x.detach().requires_grad_(needs_grad) for x in (q, k, v)]

        spec = AttentionSpec(causal=True, scale=SCALE, packing=batch.packing() if packed else None)

        def run() -> None:
            o = bound.attend(*leaves, spec)
            if needs_grad:
                torch.autograd.grad(o, leaves, do)

        run()
        buffers = bound._transport._buffers._memory.values()
        published = sum(buffer.num_bytes for buffer in buffers)
        assert published == predicted["published"]
        live = LiveTensors()
        for buffer in buffers:
            live.ignore(buffer._buffers)
        with live:
            run()
    given = sum(x.nbytes for x in ((q, k, v, do) if needs_grad else (q, k, v)))
    return (given + live.peak + published) / sum(predicted.values())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
@pytest.mark.parametrize("head_groups", [1, 2, 4])
def test_tensors_that_live(
    head_groups: int, num_kv_heads: int, needs_grad: bool, packed: bool
) -> None:
    options = (head_groups, num_kv_heads, needs_grad, packed)
    for ratio in on_ranks(2, measured_over_predicted, *options):
        assert 0.99 < ratio < 1.01
