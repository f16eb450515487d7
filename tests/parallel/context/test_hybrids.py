"""Hybrids of Ulysses and a ring against float64 attention, on a mesh of 2 x 2 ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, SCALE, Batch, attend, check, scheme_of, shard
from torch import Tensor
from torch.distributed import distributed_c10d

from kernels import BACKENDS
from kernels.problem import AttentionSpec
from parallel.context.blocks.tracing import COMPUTE, WAIT, RecordingTracer
from parallel.context.heads.mesh import head_mesh
from parallel.context.transports import peer_memory

HYBRIDS = ("ulysses_ring", "ulysses_zigzag")


def options(**others: Any) -> dict[str, Any]:
    return {"kernel": "naive", "ulysses": 2, **others}


def batch(**others: Any) -> Batch:
    return Batch(**{"lengths": (24, 24), **others})


RAGGED = Batch(lengths=(24, 7, 1, 13), packed=True)
"""Sequences that divide, that are padded, and one of a single token."""


@pytest.mark.parametrize("name", HYBRIDS)
class TestAgainstOneDevice:
    @pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_transports(self, name: str, transport: str, packed: bool) -> None:
        check(4, name, options(transport=transport), RAGGED if packed else batch())

    @pytest.mark.parametrize("kernel", ["auto", "flash_torch"])
    def test_kernels(self, name: str, kernel: str) -> None:
        check(4, name, options(kernel=kernel), batch())

    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads"), [(4, 4), (8, 1), (6, 3), (7, 7), (9, 3), (3, 1)]
    )
    @pytest.mark.parametrize("packed", [False, True])
    def test_heads_that_do_not_divide_and_few_key_heads(
        self, name: str, num_heads: int, num_kv_heads: int, packed: bool
    ) -> None:
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        transport = "symmetric" if packed else "send_recv"
        check(4, name, options(transport=transport), batch(packed=packed, **heads))

    @pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_groups_of_heads(self, name: str, packed: bool, transport: str) -> None:
        """Whole key heads in each, and parts of one."""
        for head_groups, num_heads, num_kv_heads in ((2, 4, 4), (3, 6, 6), (2, 8, 2), (2, 5, 5)):
            heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
            more = {"transport": transport, "head_groups": head_groups}
            check(4, name, options(**more), batch(packed=packed, **heads))

    @pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
    def test_sequences_without_tokens(self, name: str, transport: str) -> None:
        ragged = Batch(lengths=(0, 7, 0, 9), packed=True)
        check(4, name, options(transport=transport), ragged)

    def test_a_length_that_does_not_divide(self, name: str) -> None:
        check(4, name, options(), Batch(lengths=(21,)))

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    @pytest.mark.parametrize("packed", [False, True])
    def test_no_groups_to_speak_of(self, name: str, num_ranks: int, packed: bool) -> None:
        """With a prime number of ranks nobody exchanges heads, unless told to."""
        check(num_ranks, name, options(ulysses=0), RAGGED if packed else batch())

    @pytest.mark.parametrize("degree", [1, 4])
    def test_one_axis(self, name: str, degree: int) -> None:
        check(4, name, options(ulysses=degree), batch())


@pytest.mark.parametrize("packed", [False, True])
def test_without_a_mask(packed: bool) -> None:
    check(4, "ulysses_ring", options(), batch(causal=False, packed=packed))


def lse_error(group: dist.ProcessGroup, name: str, batch: Batch) -> float:
    """Largest error of o and lse without gradients, against the kernel on whole sequences."""
    packing = batch.packing() if batch.packed else None
    spec = AttentionSpec(causal=True, scale=SCALE, packing=packing)
    q, k, v, _ = batch.tensors()
    with scheme_of(name, **options(kernel="flash_torch")).bind(group, CPU) as bound:
        found = bound.attend_with_lse(*(shard(bound, x, batch) for x in (q, k, v)), spec)
        o, lse = BACKENDS["flash_torch"].target(name="flash_torch").forward(q, k, v, spec)
        column = lse.mT if batch.packed else lse
        wanted = (shard(bound, o, batch), shard(bound, column, batch))
    assert found is not None
    got_lse = found[1].mT if batch.packed else found[1]
    # Padding, which no real query sees, has an lse of its own.
    real = shard(bound, torch.ones_like(column), batch) > 0
    differences = ((found[0] - wanted[0])[real], (got_lse - wanted[1])[real])
    return max(float(difference.abs().max()) for difference in differences)


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize(
    "batch",
    [
        Batch(lengths=(23,), num_heads=6, num_kv_heads=3),
        Batch(lengths=(24, 7, 1, 13), packed=True, num_heads=6, num_kv_heads=3),
    ],
    ids=["dense", "packed"],
)
def test_the_lse_comes_home_too(name: str, batch: Batch) -> None:
    assert max(on_ranks(4, lse_error, name, batch)) < 1e-6


def one_pass(bound: Any, batch: Batch) -> list[Tensor]:
    """(o, dq, dk, dv) of this rank."""
    q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(bound, leaves, batch)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def transport_of_heads(group: dist.ProcessGroup, transport: str) -> str:
    with scheme_of("ulysses_ring", **options(transport=transport)).bind(group, CPU) as bound:
        # Who leaves closes connections, which others may still be making: gloo fails there.
        dist.barrier(group)
        return type(bound._heads._transport).__name__


def test_heads_travel_as_keys_do() -> None:
    assert on_ranks(4, transport_of_heads, "symmetric") == ["SymmetricHeads"] * 4
    assert on_ranks(4, transport_of_heads, "send_recv") == ["AllToAll"] * 4
    assert on_ranks(4, transport_of_heads, "auto") == ["AllToAll"] * 4


def differing_bits(group: dist.ProcessGroup, name: str, more: dict[str, Any]) -> int:
    """Entries that are not the same in two runs, each bound anew."""
    few = batch(num_heads=8, num_kv_heads=2, dtype=torch.bfloat16)
    found = []
    for _ in range(2):
        with scheme_of(name, **options(**more)).bind(group, CPU) as bound:
            found.append(one_pass(bound, few))
    return sum(int((one != other).sum()) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
def test_two_runs_have_equal_bits(name: str, transport: str) -> None:
    for head_groups in (1, 2):
        more = {"transport": transport, "head_groups": head_groups}
        assert on_ranks(4, differing_bits, name, more) == [0] * 4


def sizes_of_buffers(group: dist.ProcessGroup, name: str, head_groups: int) -> list[int]:
    """Bytes of memory for peers that a rank makes, in order; of other calls one after another."""
    found: list[int] = []
    init = peer_memory.HostPeerMemory.__init__

    def note(memory: Any, group: dist.ProcessGroup, num_bytes: int) -> None:
        found.append(num_bytes)
        init(memory, group, num_bytes)

    more = options(transport="symmetric", head_groups=head_groups)
    with (
        patch.object(peer_memory.HostPeerMemory, "__init__", note),
        scheme_of(name, **more).bind(group, CPU) as bound,
    ):
        for num_heads, num_kv_heads, packed in ((10, 5, False), (12, 6, False), (14, 7, True)):
            one = batch(num_heads=num_heads, num_kv_heads=num_kv_heads, packed=packed)
            with torch.no_grad():
                attend(bound, [shard(bound, x, one) for x in one.tensors()[:3]], one)
            one_pass(bound, one)
    return found


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
def test_ranks_of_other_heads_make_their_memory_together(name: str, head_groups: int) -> None:
    """Of ten query and five key heads one rank calls with two and one key heads, one with one and
    two: GPUs hang where one of them makes memory twice."""
    first, *others = on_ranks(4, sizes_of_buffers, name, head_groups)
    assert others == [first] * 3


def groups_left(group: dist.ProcessGroup) -> list[int]:
    """Process groups before, while an attention is bound, and after each of three times."""
    counts = [len(distributed_c10d._world.pg_names)]
    for _ in range(3):
        with scheme_of("ulysses_zigzag", **options()).bind(group, CPU) as bound:
            one_pass(bound, batch())
            counts.append(len(distributed_c10d._world.pg_names))
        counts.append(len(distributed_c10d._world.pg_names))
    return counts


def test_groups_are_released() -> None:
    for before, *later in on_ranks(4, groups_left):
        assert later == [before + 2, before] * 3


def sums_after_an_error(group: dist.ProcessGroup) -> list[float]:
    """Sums over both axes of a mesh that is made after one that ended with an error."""
    try:
        with head_mesh(group, 2, CPU):
            raise KeyError("any")
    except KeyError:
        pass
    with head_mesh(group, 2, CPU) as ranks:
        found = [torch.tensor(10.0 ** dist.get_rank(group)) for _ in range(2)]
        for x, axis in zip(found, (ranks.inner, ranks.ring), strict=True):
            dist.all_reduce(x, group=axis)
    return [float(x) for x in found]


def test_neighbours_and_rings() -> None:
    """Ranks 0 and 1 exchange heads, and 2 and 3; rings are 0, 2 and 1, 3."""
    assert on_ranks(4, sums_after_an_error) == [[11, 101], [11, 1010], [1100, 101], [1100, 1010]]


def traced(group: dist.ProcessGroup, name: str, batch: Batch) -> Any:
    """Spans of a pass and the bytes that leave this rank, forward and backward."""
    with scheme_of(name, **options(transport="send_recv")).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        forward = recorder.sent_bytes
        recorder.phase = "backward"
        torch.autograd.grad(o, leaves, do)
    spans = [(span.phase, span.kind) for span in recorder.spans()]
    return spans, forward, recorder.sent_bytes - forward


class TestTracing:
    def test_a_timeline_shows_exchanges_and_the_ring_between(self) -> None:
        """Two steps of the ring; backward waits for gradients to arrive, and to come home."""
        forward = [WAIT, COMPUTE, WAIT, COMPUTE, WAIT]
        backward = [WAIT, COMPUTE, WAIT, COMPUTE, WAIT, WAIT, WAIT]
        wanted = [("forward", kind) for kind in forward]
        wanted += [("backward", kind) for kind in backward]
        for spans, _, _ in on_ranks(4, traced, "ulysses_zigzag", batch()):
            assert spans == wanted

    @pytest.mark.parametrize("name", HYBRIDS)
    def test_bytes(self, name: str) -> None:
        """Half of q, k, v and o to the neighbour, and the other half's keys around the ring.

        4 query and 2 key heads: 2 rows of q and of o and 1 each of k and v leave for the neighbour;
        the ring has one hop of k and v of one head and of twice as many tokens, and two of their
        gradients in float32, of which one is the way home.
        """
        row = 6 * 8 * 4
        one = Batch(lengths=(24,))
        for _, forward, backward in on_ranks(4, traced, name, one):
            assert forward == (2 + 2 + 1 + 1 + 2 * 2) * row
            assert backward == (2 + 2 + 1 + 1 + 3 * 2 * 2) * row


def message_of(
    group: dist.ProcessGroup, lengths_by_rank: list[tuple[int, ...]], causal: bool
) -> str:
    """What a rank raises whose packing is its own."""
    lengths = lengths_by_rank[dist.get_rank(group)]
    with scheme_of("ulysses_ring", **options()).bind(group, CPU) as bound:
        packing = Batch(lengths=lengths, packed=True).packing()
        q = torch.zeros(sum(map(bound.layout.local_len, lengths_by_rank[0])), 2, 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=causal, scale=1.0, packing=packing))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def message_of_shapes(group: dist.ProcessGroup, odd_rank: int) -> str:
    with scheme_of("ulysses_zigzag", **options()).bind(group, CPU) as bound:
        q = torch.zeros(1, 2, 8 + (bound.rank == odd_rank), 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=True, scale=1.0))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


class TestDisagreement:
    @pytest.mark.parametrize("odd_rank", [1, 3])
    def test_shapes(self, odd_rank: int) -> None:
        """Also between groups, which exchange no heads."""
        for message in on_ranks(4, message_of_shapes, odd_rank):
            assert message.startswith("ranks disagree on what they attend to: rank 0 has [1, 2, 8,")
            assert f"rank {odd_rank} has [1, 2, 9, 4] float32" in message

    def test_packings(self) -> None:
        for message in on_ranks(4, message_of, [(8, 4)] * 3 + [(4, 8)], True):
            assert "lengths [8, 4], rank 3 has" in message

    def test_lengths_of_local_parts(self) -> None:
        for message in on_ranks(4, message_of, [(8, 8)] * 2 + [(2, 2)] * 2, True):
            assert message == (
                "rank 2: q, k and v have 4, 4, 4 tokens; its part of sequences of 2, 2 has 2: "
                "lengths are those of whole sequences"
            )

    def test_padding_without_a_mask(self) -> None:
        for message in on_ranks(4, message_of, [(8, 7)] * 4, False):
            assert message == (
                "rank 0: a sequence of 7 tokens does not divide by 4, and without a causal mask "
                "the padding would be attended to"
            )

    def test_equal_calls(self) -> None:
        assert on_ranks(4, message_of, [(8, 7)] * 4, True) == ["nothing was raised"] * 4
