"""Kernel calls of schemes, visits to other ranks' keys, and the bytes that are sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, TRANSPORTS, Batch, attend, scheme_of, shard
from torch import Tensor

from kernels.backends.naive import Naive
from kernels.problem import AttentionSpec
from parallel.context.blocks.tracing import COMPUTE, RecordingTracer


class CountCalls(Naive):
    """Naive attention that counts its kernel calls and the queries and keys of each."""

    def __init__(self) -> None:
        super().__init__(name="naive")
        CALLS.clear()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        CALLS.append((q.shape[0], k.shape[0]))
        return Naive.forward(self, q, k, v, spec)


CALLS: list[tuple[int, int]] = []


def calls_of_mode(group: dist.ProcessGroup, mode: str, batch: Batch) -> list[tuple[int, int]]:
    scheme = scheme_of("zigzag_llama3", forward_mode=mode, kernel="naive")
    with scheme.bind(group, CPU) as bound:
        bound._kernel = CountCalls()
        q, k, v, _ = (shard(bound, x, batch) for x in batch.tensors())
        attend(bound, [q, k, v], batch)
    return CALLS


def test_fused_is_one_call_and_two_kernels_are_two() -> None:
    """Two ranks, 16 + 8 tokens: chunks of 4 and 2; rank 0 has chunks 0 and 3, rank 1, 1 and 2."""
    batch = Batch(lengths=(16, 8), packed=True)
    assert on_ranks(2, calls_of_mode, "two_kernels", batch) == [
        [(6, 6), (6, 24)],
        [(6, 12), (6, 18)],
    ]
    assert on_ranks(2, calls_of_mode, "fused", batch) == [[(12, 30)], [(12, 30)]]


def steps_of(group: dist.ProcessGroup, transport: str, at_once: int) -> list[int]:
    """The visits of keys that a forward pass computes with."""
    batch = Batch(lengths=(24,), num_heads=8, num_kv_heads=4)
    options = {"kernel": "naive", "transport": transport, "kv_heads_at_once": at_once}
    with scheme_of("llama3", **options).bind(group, CPU) as bound:
        q, k, v, _ = (shard(bound, x, batch) for x in batch.tensors())
        bound.tracer = recorder = RecordingTracer(CPU)
        attend(bound, [q, k, v], batch)
    return sorted({span.step for span in recorder.spans() if span.kind == COMPUTE})


@pytest.mark.parametrize("transport", TRANSPORTS["llama3"])
@pytest.mark.parametrize(("at_once", "num_visits"), [(0, 1), (2, 2), (1, 4)])
def test_heads_come_a_few_at_a_time(transport: str, at_once: int, num_visits: int) -> None:
    for steps in on_ranks(2, steps_of, transport, at_once):
        assert steps == list(range(num_visits))


def sent_bytes(group: dist.ProcessGroup, name: str, transport: str) -> list[int]:
    """Bytes that leave this rank in a forward pass, and in a backward pass."""
    batch = Batch(lengths=(24,))
    found = []
    with scheme_of(name, kernel="naive", transport=transport).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        found.append(recorder.sent_bytes)
        bound.tracer = recorder = RecordingTracer(CPU)
        torch.autograd.grad(o, leaves, do)
        found.append(recorder.sent_bytes)
    return found


# k and v of 6 tokens, 2 heads of 8 floats, for each of 4 ranks.
KV_BYTES = 2 * 6 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("name", "transport", "hops"),
    [
        ("zigzag", "send_recv", (3, 3 + 4)),
        ("zigzag", "symmetric", (3, 3 + 3)),
        ("llama3", "all_gather", (3, 3 + 3)),
    ],
)
def test_bytes_that_are_sent(name: str, transport: str, hops: tuple[int, int]) -> None:
    """Keys go to P - 1 ranks, and gradients home from as many, or around the whole ring."""
    for found in on_ranks(4, sent_bytes, name, transport):
        assert found == [KV_BYTES * hop for hop in hops]


def test_bytes_of_rows_that_are_seen() -> None:
    """Of eight chunks, two a rank: rank r reads those before its late one, 7 - r, of others, and
    its peers read its early chunk, and r of them its late one.
    """
    for rank, found in enumerate(on_ranks(4, sent_bytes, "zigzag_llama3", "symmetric")):
        keys, gradients = 6 - rank, 3 + rank
        assert found == [KV_BYTES / 2 * chunks for chunks in (keys, keys + gradients)]
