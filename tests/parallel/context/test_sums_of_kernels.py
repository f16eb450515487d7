"""Backward passes whose kernel sums dq over all ranks' keys, instead of a float32 sum of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, SCHEMES, TRANSPORTS, Batch, attend, exact, scheme_of, shard
from torch import Tensor

from kernels import AttentionProblem
from kernels.backends.naive import Naive
from kernels.problem import Mask
from kernels.query_gradient import QueryBlock, QueryGradientMemory
from parallel.context.blocks.layouts import LAYOUTS
from parallel.context.blocks.rows import DenseRows
from parallel.context.blocks.schedule import DenseSchedule, Scores

RINGS = ("ring", "zigzag", "striped")


class Sums(NamedTuple):
    """Sums dq in float64, as it is told to."""

    kernel: KeepsSums
    do: Tensor
    q: Tensor
    o: Tensor
    lse: Tensor
    total: Tensor
    announced: list[QueryBlock]

    def add(self, block: QueryBlock, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert block == self.announced.pop(0), "blocks come as they were announced"
        assert k.shape[2] == v.shape[2] == block.num_keys
        rows = slice(block.start, block.stop)
        do, q, o, lse = (x[:, :, rows] for x in (self.do, self.q, self.o, self.lse))
        dq, dk, dv = Naive.backward(self.kernel, do, q, k, v, o, lse, block.spec)
        self.total[:, :, rows] += dq
        return dk, dv

    def result(self) -> Tensor:
        assert not self.announced, "all blocks come before the end"
        return self.total.to(self.q.dtype)


class KeepsSums(Naive):
    """Counts the passes that it has summed."""

    num_passes = 0

    def query_gradient(
        self, do: Tensor, q: Tensor, k: Tensor, o: Tensor, lse: Tensor, blocks: Sequence[QueryBlock]
    ) -> Sums:
        assert q.shape == do.shape == o.shape
        assert k.shape[1] < q.shape[1]
        type(self).num_passes += 1
        return Sums(self, do, q, o, lse, torch.zeros_like(q, dtype=torch.float64), [*blocks])


def summed_passes(
    group: dist.ProcessGroup, name: str, transport: str, batch: Batch
) -> tuple[float, int]:
    """The largest error of o, dq, dk and dv, and how many passes the kernel has summed."""
    kernel = KeepsSums(name="naive")
    before = KeepsSums.num_passes
    with scheme_of(name, kernel="naive", transport=transport).bind(group, CPU) as bound:
        bound._kernel = kernel
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attend(bound, leaves, batch)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        wanted = [shard(bound, x, batch) for x in exact(batch)]
    errors = (float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))
    return max(errors), KeepsSums.num_passes - before


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("name", "transport"), [(n, t) for n in SCHEMES for t in TRANSPORTS[n]])
def test_rings_of_dense_batches(num_ranks: int, name: str, transport: str) -> None:
    """Gathered keys are seen in one call; there is nothing to sum."""
    results = on_ranks(num_ranks, summed_passes, name, transport, Batch(lengths=(24, 24)))
    for error, summed in results:
        assert error < 1e-5
        # The first rank of a contiguous split sees no other's keys.
        assert summed in ({0, 1} if name == "ring" else {1} if name in RINGS else {0})
    assert (sum(summed for _, summed in results) > 0) == (name in RINGS)


def test_packed_batches_are_summed_call_by_call() -> None:
    batch = Batch(lengths=(24, 7), packed=True)
    for _, summed in on_ranks(2, summed_passes, "zigzag", "send_recv", batch):
        assert summed == 0


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rank", range(4))
def test_blocks_are_those_of_the_calls(name: str, rank: int) -> None:
    layout = LAYOUTS[name](num_ranks=4)
    schedule = schedule_of(name, rank, Mask(causal=True))
    calls = [call for step in range(4) for call in schedule.of_source((rank - step) % 4)]
    assert len(schedule.query_blocks) == (len(calls) if len(calls) > 1 else 0)
    pairs = 0
    for block, call in zip(schedule.query_blocks, calls, strict=False):
        assert block.spec is call.spec
        assert isinstance(call.q, DenseRows)
        assert slice(block.start, block.stop) == call.q.rows
        pairs += block.spec.mask.pairs(block.stop - block.start, block.num_keys)
    if schedule.query_blocks:
        positions = [p for run in layout.runs(rank, 256) for p in run]
        assert pairs == sum(p + 1 for p in positions)


def test_none_of_a_halo() -> None:
    """Few keys of other ranks: parts are added as they are."""
    assert not schedule_of("contiguous", 1, Mask(causal=True, window=8)).query_blocks


def schedule_of(name: str, rank: int, mask: Mask) -> DenseSchedule:
    return DenseSchedule(
        LAYOUTS[name](num_ranks=4), rank, 64, mask, Scores(scale=1.0), prefixes=False,
        takes_rectangles=lambda q_len, kv_len: True,
    )  # fmt: skip


class Predicted(Naive):
    """A kernel with workspaces of 1,000 bytes, or sums of 5,000."""

    sums: Any = QueryGradientMemory(5000.0, (300.0, 200.0, 100.0, 50.0))

    def backward_workspace(self, problem: AttentionProblem) -> float:
        return 1000.0

    def query_gradient_memory(
        self, problem: AttentionProblem, blocks: Sequence[QueryBlock]
    ) -> QueryGradientMemory | None:
        assert (problem.q_len, problem.cp) == (64, 1)
        assert (blocks[0].start, blocks[0].stop, blocks[0].num_keys) == (0, 64, 64)
        found: QueryGradientMemory | None = self.sums
        return found


def test_predicted_memory_is_that_of_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the pass, or while a block is added: no dq of calls, and no float32 total."""
    problem = AttentionProblem(
        batch_size=1, num_heads=4, num_kv_heads=2, q_len=256, kv_len=256, head_dim=16,
        dtype="bfloat16", device="cpu", causal=True, needs_grad=True, cp=4,
    )  # fmt: skip
    scheme = scheme_of("striped", kernel="naive", transport="send_recv")
    kernel = Predicted(name="naive")
    monkeypatch.setattr(type(scheme), "on_one_device", property(lambda self: kernel))
    q, kv = 4 * 64 * 16 * 2, 2 * 2 * 64 * 16 * 2
    with_sums = scheme.split_peak_memory(problem)
    assert with_sums is not None
    assert with_sums["dq_sums"] == 5000
    assert with_sums["dq"] == q
    monkeypatch.setattr(Predicted, "sums", None)
    without = scheme.split_peak_memory(problem)
    assert without is not None
    assert "dq_sums" not in without
    # The total is float32, beside a call's part of it.
    assert 2 * q < without["dq"] <= 3 * q
    assert without["kernel_workspace"] > 1000
    # At the second block, when the gradients of the first one's keys have left.
    assert with_sums["kernel_workspace"] == 200
    assert with_sums["dk_dv"] == kv
