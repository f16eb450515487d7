"""Keys of documents in symmetric memory, with a side stream as late as those of CUDA can be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from late_stream import LateStream
from ranks import on_ranks
from split_attention import (
    CPU,
    Batch,
    Hidden,
    attend,
    scheme_of,
    shard,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from parallel.context.blocks.tracing import NO_TRACING
from parallel.context.documents import symmetric
from parallel.context.documents.placement import place
from parallel.context.documents.routes import Routes
from parallel.context.documents.symmetric import SymmetricRows
from parallel.context.transports.peer_memory import HostPeerMemory

RAGGED = (24, 7, 0, 1, 13, 40, 5, 18)

SENDS_ALONE = (8, 8, 16)
"""Of three ranks, the first sends keys and needs none."""


def late_on(rank: int, slow: int) -> LateStream:
    return LateStream(0.02 if rank == slow else 0.0, symmetric, (Tensor, "copy_"))


def passes(bound: Any, batch: Batch, saved: bool) -> list[Tensor]:
    """(o, dq, dk, dv) of three passes over other values; in a checkpoint, unless ``saved``."""
    found = []
    for number in range(3):
        q, k, v, do = (shard(bound, x + number, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run(*inputs: Tensor) -> Tensor:
            return attend(bound, list(inputs), batch)

        o = run(*leaves) if saved else checkpoint(run, *leaves, use_reentrant=False)
        found += [o.detach(), *torch.autograd.grad(o, leaves, do)]
    return found


def differences(
    group: dist.ProcessGroup,
    options: dict[str, Any],
    lengths: tuple[int, ...],
    slow: int,
    saved: bool,
    gives_lse: bool,
) -> tuple[bool, int, int, int]:
    """Whether late copies change no bit of what a collective gives, and what they had to do."""
    batch, results = Batch(lengths=lengths, packed=True), []
    late = late_on(dist.get_rank(group), slow)
    for transport in ("all_to_all", "symmetric"):
        more = {"kernel": "naive", "transport": transport, **options}
        with scheme_of("documents", **more).bind(group, CPU) as bound:
            if not gives_lse:
                bound._kernel = Hidden(name="hidden")
            if transport == "all_to_all":
                results.append(passes(bound, batch, saved))
                continue
            # Buffers are made in the first call.
            passes(bound, batch, saved)
            with late.patched():
                results.append(passes(bound, batch, saved))
    same = all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    return same, late.num_barriers, late.num_freed, late.num_left


class TestPassesWaitForTheirCopies:
    """Two barriers each way; a checkpoint makes the forward pass twice."""

    @pytest.mark.parametrize("diagonals", ["joined", "first"])
    @pytest.mark.parametrize("keep_keys", ["always", "never"])
    @pytest.mark.parametrize(("num_ranks", "slow"), [(2, 0), (2, 1), (3, 1), (4, 0), (4, 3)])
    def test_saved(self, num_ranks: int, slow: int, diagonals: str, keep_keys: str) -> None:
        options = {"diagonals": diagonals, "keep_keys": keep_keys}
        found = on_ranks(num_ranks, differences, options, RAGGED, slow, True, True)
        barriers = 3 * 2 * (2 if keep_keys == "always" else 3)
        assert found == [(True, barriers, 0, 0)] * num_ranks

    @pytest.mark.parametrize("gives_lse", [True, False], ids=["lse", "no lse"])
    @pytest.mark.parametrize("saved", [True, False], ids=["saved", "checkpoint"])
    @pytest.mark.parametrize("slow", [0, 2])
    def test_a_rank_that_sends_alone(self, slow: int, saved: bool, gives_lse: bool) -> None:
        options = {"keep_keys": "always"}
        found = on_ranks(3, differences, options, SENDS_ALONE, slow, saved, gives_lse)
        assert found == [(True, 3 * 2 * (2 if saved else 3), 0, 0)] * 3


def start(
    rows: SymmetricRows, sent: Tensor, landing: Tensor, counts: list[list[int]]
) -> SymmetricRows:
    """An exchange of ``sent``."""
    leaving = rows.room(landing, counts)
    leaving.copy_(sent)
    return rows.start(leaving, landing, counts, NO_TRACING, 1)


def left(group: dist.ProcessGroup, slow: int) -> tuple[list[float], int, int]:
    """What comes in exchanges of which the first is not waited for, and nobody holds its rows."""
    rank = dist.get_rank(group)
    counts = [[0, 2, 1], [1, 0, 0], [3, 0, 0]]
    num_sent, num_landing = sum(counts[rank]), sum(row[rank] for row in counts)
    late, rows = late_on(rank, slow), SymmetricRows(group, CPU)
    landed = []
    start(rows, torch.zeros(num_sent, 2), torch.zeros(num_landing, 2), counts).wait()
    with late.patched():
        for number in range(3):
            landing = torch.zeros(num_landing, 2)
            sent = torch.full((num_sent, 2), 10.0 * number + rank)
            work = start(rows, sent, landing, counts)
            if number:
                landed.append(landing)
            del landing, sent
            if number == 1:
                work.wait()
        work.wait()
    return [float(x) for rows in landed for x in rows[:, 0]], late.num_freed, late.num_left


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_an_exchange_that_an_error_has_left(slow: int) -> None:
    """The next one waits for it, and holds what is copied into until then."""
    expected = [
        ([base + source for base in (10, 20) for source in sources], 0, 0)
        for sources in ([1, 2, 2, 2], [0, 0], [0])
    ]
    assert on_ranks(3, left, slow) == expected


def order_of_rows(group: dist.ProcessGroup) -> list[int]:
    """Rows from the ranks before this one, as their numbers among those that the source sends."""
    rank = dist.get_rank(group)
    counts = [[0, 2, 1, 0], [1, 0, 0, 2], [3, 4, 0, 1], [0, 0, 0, 0]]
    sent = torch.arange(sum(counts[rank]))[:, None, None] + 100 * rank
    landing = torch.full((sum(row[rank] for row in counts), 1, 1), -1)
    start(SymmetricRows(group, CPU), sent, landing, counts).wait()
    return landing.flatten().tolist()


def test_blocks_are_found_by_the_plan() -> None:
    assert on_ranks(4, order_of_rows) == [
        [100, 200, 201, 202],
        [0, 1, 203, 204, 205, 206],
        [2],
        [101, 102, 207],
    ]


BATCHES = [RAGGED, (37,), (12, 12, 12, 12), (3, 64, 2), RAGGED]


def sizes(group: dist.ProcessGroup) -> list[tuple[int, int]]:
    """After each batch, bytes of this rank's buffer and how many were made so far."""
    found, made = [], []
    make = HostPeerMemory.__init__

    def count(memory: HostPeerMemory, *arguments: Any) -> None:
        made.append(memory)
        make(memory, *arguments)

    options = {"kernel": "naive", "transport": "symmetric"}
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        scheme_of("documents", **options).bind(group, CPU) as bound,
    ):
        monkeypatch.setattr(HostPeerMemory, "__init__", count)
        for lengths in BATCHES:
            batch = Batch(lengths=lengths, packed=True)
            q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            torch.autograd.grad(attend(bound, leaves, batch), leaves, do)
            found.append((made[-1].num_bytes, len(made)))
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_buffers_hold_the_most_rows_of_any_rank(num_ranks: int) -> None:
    """Of either way, and of all batches so far; made where there are more."""
    expected, largest, num_made = [], 0, 0
    for lengths in BATCHES:
        routes = Routes.of(place(lengths, num_ranks), True)
        ranks = range(num_ranks)
        most = max(max(routes.sends(rank), routes.received(rank)) for rank in ranks)
        if most > largest:
            largest, num_made = most, num_made + 1
        # k and v of two heads of 8 float32.
        expected.append((largest * 2 * 2 * 8 * 4, num_made))
    assert num_made > 1
    assert on_ranks(num_ranks, sizes) == [expected] * num_ranks
