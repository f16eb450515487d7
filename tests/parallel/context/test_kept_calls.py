"""What schemes keep between calls: for as long as a graph reads it, and no more than they need."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, SCALE, Batch, attend, scheme_of, shard

from kernels.problem import AttentionSpec
from parallel.context.blocks.kept import MOST_KEPT, Kept, identity_of
from parallel.context.heads import agreement
from parallel.context.transports.peer_memory import HostPeerMemory, PeerBuffers
from parallel.context.transports.symmetric import SymmetricRing

SCHEMES = [
    ("ulysses", {"transport": "all_to_all"}),
    ("ulysses", {"transport": "symmetric"}),
    ("ulysses_ring", {"ulysses": 2}),
    ("documents", {}),
    ("documents", {"transport": "symmetric"}),
]


class Thing:
    """Something that can be referred to weakly."""


def kept_after(num_calls: int) -> bool:
    """Whether the value of a first call is alive after so many of other kinds."""
    kept: Kept[Thing] = Kept()
    first = weakref.ref(kept.put("first", Thing(), None))
    kept.get("first", torch.device("cuda"))
    for number in range(num_calls):
        kept.put(number, Thing(), None)
    gc.collect()
    return first() is not None


class TestKept:
    def test_the_last_kinds_of_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert kept_after(MOST_KEPT - 1)
        assert not kept_after(MOST_KEPT)

    def test_all_that_a_graph_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert kept_after(10 * MOST_KEPT)

    def test_offsets_are_told_by_identity_and_changes(self) -> None:
        one, other = torch.tensor([0, 3]), torch.tensor([0, 3])
        before = identity_of(one)
        assert before == identity_of(one) != identity_of(other)
        one[1] = 4
        assert identity_of(one) != before

    def test_offsets_of_inference_are_told_by_values(self) -> None:
        with torch.inference_mode():
            one = torch.tensor([0, 3])
            before = identity_of(one)
            one[1] = 4
            assert identity_of(one) != before


def evaluated(group: dist.ProcessGroup, name: str, options: dict[str, Any]) -> bool:
    """Whether a call with offsets made in inference mode has the same output as without."""
    batch = Batch(lengths=(24, 7, 1, 13), packed=True)
    with scheme_of(name, kernel="flash_torch", **options).bind(group, CPU) as bound:
        inputs = [shard(bound, x, batch) for x in batch.tensors()[:3]]
        expected = attend(bound, inputs, batch)
        with torch.inference_mode():
            found = attend(bound, inputs, batch)
        return torch.equal(found, expected)


@pytest.mark.parametrize(("name", "options"), [*SCHEMES, ("ring", {}), ("zigzag_llama3", {})])
def test_offsets_made_in_inference_mode(name: str, options: dict[str, Any]) -> None:
    assert all(on_ranks(4, evaluated, name, options))


def facts_kept(group: dist.ProcessGroup, name: str, options: dict[str, Any]) -> int:
    """Statements kept after many packings, of which one comes again and again.

    Rank 1 makes offsets anew in each call, and the others keep those of the one that comes again.
    """
    often = Batch(lengths=(16, 16), packed=True)
    packing = often.packing()
    with (
        patch.object(agreement, "_MOST_AGREED", 2 * MOST_KEPT),
        scheme_of(name, kernel="naive", **options).bind(group, CPU) as bound,
    ):

        def call(batch: Batch, packing: Any) -> None:
            spec = AttentionSpec(causal=True, scale=SCALE, packing=packing)
            bound.attend(*(shard(bound, x, batch) for x in batch.tensors()[:3]), spec)

        for number in range(3 * MOST_KEPT):
            other = Batch(lengths=(4 + 4 * number, 4), packed=True, num_heads=4)
            call(other, other.packing())
            if number % 5 == 0:
                call(often, often.packing() if bound.rank == 1 else packing)
        holder = bound._heads if hasattr(bound, "_heads") else bound
        return len(holder._agreements._facts)


@pytest.mark.parametrize(("name", "options"), SCHEMES)
def test_statements_of_packings_are_forgotten_on_all_ranks_alike(
    name: str, options: dict[str, Any]
) -> None:
    assert on_ranks(4, facts_kept, name, options) == [2 * MOST_KEPT] * 4


class Barriers:
    """The parity of the barriers of gradients, of which every pass makes an even number."""

    def __init__(self) -> None:
        self.odd = False
        self.odd_at_start: list[bool] = []

    @contextlib.contextmanager
    def counted(self, fails: list[bool]) -> Iterator[None]:
        """Count them; the pass fails before step 2 while ``fails`` holds anything."""
        barrier, deliver = HostPeerMemory.barrier, SymmetricRing.deliver

        def meet(memory: HostPeerMemory, channel: int) -> None:
            self.odd ^= channel == SymmetricRing._GRADIENTS
            barrier(memory, channel)

        def settle(memory: HostPeerMemory, channel: int) -> None:
            if self.odd:
                memory.barrier(channel)
            self.odd_at_start.append(self.odd)

        def stop(ring: SymmetricRing, visit: Any, contributions: Any) -> None:
            if visit.step == 2 and fails:
                raise MemoryError(fails.pop())
            deliver(ring, visit, contributions)

        with (
            patch.object(HostPeerMemory, "barrier", meet),
            patch.object(HostPeerMemory, "settle", settle),
            patch.object(SymmetricRing, "deliver", stop),
        ):
            yield


def odd_after_an_error(group: dist.ProcessGroup) -> list[bool]:
    """Whether barriers are odd before each pass's first, and after its last."""
    barriers = Barriers()
    batch = Batch(lengths=(24,))
    options = {"kernel": "naive", "transport": "symmetric"}
    with barriers.counted([True]), scheme_of("ring", **options).bind(group, CPU) as bound:
        for _ in range(2):
            inputs = [shard(bound, x, batch) for x in batch.tensors()]
            leaves = [x.detach().requires_grad_() for x in inputs[:3]]
            o = attend(bound, leaves, batch)
            with contextlib.suppress(MemoryError):
                torch.autograd.grad(o, leaves, inputs[3])
            barriers.odd_at_start.append(barriers.odd)
    return barriers.odd_at_start


def test_a_pass_that_an_error_ends_leaves_no_odd_barrier() -> None:
    """A captured pass begins with the first of two sets of words, and so must all before it."""
    # The first pass begins and is left with one barrier; the second begins and ends with none.
    assert on_ranks(3, odd_after_an_error) == [[False, True, False, False, False]] * 3


def test_memory_that_graphs_hold_is_counted() -> None:
    buffers = PeerBuffers.__new__(PeerBuffers)
    outgrown, current = SimpleNamespace(outside_bytes=3), SimpleNamespace(outside_bytes=5)
    buffers._memory, buffers._in_graphs = {"keys": current}, [outgrown, current]
    assert buffers.outside_bytes == 8
