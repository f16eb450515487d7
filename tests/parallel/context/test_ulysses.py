"""Ulysses against float64 attention of the whole, and which heads each rank attends with."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, PROBLEM, SCALE, Batch, attend, check, scheme_of, shard
from torch import Tensor

from kernels import BACKENDS, Packing
from kernels.problem import AttentionSpec
from parallel.context.blocks.layouts import Contiguous
from parallel.context.blocks.tracing import COMPUTE, WAIT, RecordingTracer
from parallel.context.heads import all_to_all, symmetric
from parallel.context.heads.exchange import summed_columns
from parallel.context.heads.sequences import PackedSequences
from parallel.context.heads.split import HeadSplit
from parallel.context.transports import peer_memory

SHAPES = [(4, 4), (4, 2), (8, 1), (6, 6), (6, 3), (10, 2), (12, 4), (7, 7), (9, 3)]


class TestHeads:
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
    def test_each_query_head_is_in_one_call_beside_its_key_head(
        self, num_heads: int, num_kv_heads: int, num_ranks: int
    ) -> None:
        split = HeadSplit(num_ranks=num_ranks, num_heads=num_heads, num_kv_heads=num_kv_heads)
        found = []
        for rank in range(num_ranks):
            q_heads, kv_heads = split.q_heads(rank), split.kv_heads(rank)
            for piece in split.pieces(rank):
                own_q, own_kv = q_heads[piece.q], kv_heads[piece.kv]
                each = len(own_q) // len(own_kv)
                assert each * len(own_kv) == len(own_q)
                for place, head in enumerate(own_q):
                    assert own_kv[place // each] == head // (num_heads // num_kv_heads)
                found += list(own_q)
        assert found == list(range(num_heads))
        sizes = [len(split.q_heads(rank)) for rank in range(num_ranks)]
        assert max(sizes) - min(sizes) <= 1

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
    def test_shared_key_heads(self, num_heads: int, num_kv_heads: int) -> None:
        split = HeadSplit(num_ranks=4, num_heads=num_heads, num_kv_heads=num_kv_heads)
        owned = [set(split.kv_heads(rank)) for rank in range(4)]
        shared = any(one & other for one, other in itertools.combinations(owned, 2))
        assert split.shares_kv_heads == shared

    def test_one_call_where_heads_divide(self) -> None:
        for num_heads, num_kv_heads in ((8, 8), (8, 4), (8, 2), (32, 8)):
            split = HeadSplit(num_ranks=4, num_heads=num_heads, num_kv_heads=num_kv_heads)
            assert [len(split.pieces(rank)) for rank in range(4)] == [1, 1, 1, 1]


def batch(**options: Any) -> Batch:
    return Batch(**{"lengths": (24, 24), **options})


EXCHANGES = [
    (transport, head_groups)
    for transport in ("all_to_all", "symmetric")
    for head_groups in (1, 2, 3)
]


def options(transport: str, head_groups: int = 1, kernel: str = "naive") -> dict[str, Any]:
    return {"kernel": kernel, "transport": transport, "head_groups": head_groups}


@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
class TestAgainstOneDevice:
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("kernel", ["naive", "flash_torch", "sdpa"])
    def test_dense(self, num_ranks: int, kernel: str, transport: str) -> None:
        """sdpa gives no log-sum-exp, and needs none here."""
        check(num_ranks, "ulysses", options(transport, kernel=kernel), batch())

    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), SHAPES)
    @pytest.mark.parametrize("packed", [False, True])
    def test_heads_that_do_not_divide_and_few_key_heads(
        self, num_heads: int, num_kv_heads: int, packed: bool, transport: str
    ) -> None:
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        check(4, "ulysses", options(transport), batch(packed=packed, **heads))

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_packed(self, num_ranks: int, transport: str) -> None:
        ragged = Batch(lengths=(24, 7, 1, 13), packed=True)
        check(num_ranks, "ulysses", options(transport), ragged)

    @pytest.mark.parametrize("head_groups", [1, 2])
    def test_many_sequences(self, head_groups: int, transport: str) -> None:
        """More than are worth a copy each, with padding and without."""
        for lengths in (tuple(range(1, 13)), (4,) * 12):
            ragged = Batch(lengths=lengths, packed=True)
            check(2, "ulysses", options(transport, head_groups), ragged)

    @pytest.mark.parametrize("head_groups", [1, 2])
    def test_sequences_without_tokens(self, head_groups: int, transport: str) -> None:
        ragged = Batch(lengths=(0, 7, 0, 9), packed=True)
        check(2, "ulysses", options(transport, head_groups), ragged)
        assert on_ranks(2, tokens_of_nothing, transport, head_groups) == [[0] * 4] * 2

    def test_one_sequence(self, transport: str) -> None:
        """A rank's tokens follow on those of the rank before."""
        check(2, "ulysses", options(transport, 2), Batch(lengths=(24,), packed=True))

    def test_a_length_that_does_not_divide(self, transport: str) -> None:
        check(2, "ulysses", options(transport), Batch(lengths=(23,)))

    @pytest.mark.parametrize("packed", [False, True])
    def test_without_a_mask(self, packed: bool, transport: str) -> None:
        check(3, "ulysses", options(transport), batch(causal=False, packed=packed))

    def test_auto_picks_a_kernel(self, transport: str) -> None:
        check(2, "ulysses", options(transport, kernel="auto"), Batch(lengths=(24,)))

    @pytest.mark.parametrize("head_groups", [2, 3])
    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    @pytest.mark.parametrize("packed", [False, True])
    def test_groups_of_heads(
        self, head_groups: int, num_ranks: int, packed: bool, transport: str
    ) -> None:
        """Groups of whole key heads, of parts of one, and uneven ones."""
        lengths = (24, 7, 1, 13) if packed else (23, 23)
        for num_heads, num_kv_heads in ((12, 12), (12, 3), (12, 1), (14, 2)):
            heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
            one = Batch(lengths=lengths, packed=packed, **heads)
            check(num_ranks, "ulysses", options(transport, head_groups), one)

    def test_a_group_of_a_kernel_without_an_lse(self, transport: str) -> None:
        check(2, "ulysses", options(transport, 2, "sdpa"), batch())


def test_gradients_of_a_shared_key_head_are_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256 again."""
    parts = [torch.full((1, 1, 2, 2), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    columns = [(range(1, 2), part) for part in parts]
    found = summed_columns(columns, num_heads=3, dim=1)
    assert found[0, :, 0, 0].tolist() == [0, 258, 0]


def tokens_of_nothing(group: dist.ProcessGroup, transport: str, head_groups: int) -> list[int]:
    """Of o, dq, dk and dv, where no sequence has any."""
    empty = Batch(lengths=(0, 0), packed=True)
    with scheme_of("ulysses", **options(transport, head_groups)).bind(group, CPU) as bound:
        return [len(x) for x in one_pass(bound, empty)]


def padded_rows(group: dist.ProcessGroup, exchange: tuple[str, int]) -> float:
    """The largest entry of o, dq, dk or dv in a row of padding, after a batch without any."""
    full = Batch(lengths=(12, 12, 12), packed=True)
    ragged = Batch(lengths=(10, 7, 12), packed=True)
    with scheme_of("ulysses", **options(*exchange)).bind(group, CPU) as bound:
        one_pass(bound, full)
        found = one_pass(bound, ragged)
        real = shard(bound, torch.ones(29, 1, 1), ragged)
        return max(float((x * (1 - real)).abs().max()) for x in found)


@pytest.mark.parametrize("exchange", EXCHANGES[::3] + EXCHANGES[1::3])
def test_padding_is_zero(exchange: tuple[str, int]) -> None:
    assert on_ranks(2, padded_rows, exchange) == [0.0] * 2


def copies_of(lengths: list[int]) -> list[int]:
    """How many copies bring the tokens of each of two ranks to their places."""
    sequences = PackedSequences(Contiguous(num_ranks=2), lengths, CPU)
    num_local = sum(map(Contiguous(num_ranks=2).local_len, lengths))
    part = torch.empty(num_local, 1, 4)
    landing = torch.empty(sequences.landing(part, 1))
    return [len(list(sequences.places(landing, part, rank))) for rank in range(2)]


def test_copies_of_packed_sequences() -> None:
    """One for each sequence that a rank has tokens of, if they are few; else one for all."""
    assert copies_of([24]) == [1, 1]
    assert copies_of([24, 8, 1]) == [3, 2]
    assert copies_of([4] * 12) == [1, 1]


def alive_in_growth(group: dist.ProcessGroup) -> list[int]:
    """How many smaller buffers there are at each time that memory is mapped anew."""
    made: list[weakref.ref[Any]] = []
    alive = []
    init = peer_memory.HostPeerMemory.__init__

    def note(memory: Any, group: dist.ProcessGroup, num_bytes: int) -> None:
        alive.append(sum(one() is not None for one in made if one() is not memory))
        init(memory, group, num_bytes)
        # Views keep what they are views of, whatever has become of the buffer's own object.
        made.append(weakref.ref(memory._buffers[0].untyped_storage()))

    with (
        patch.object(peer_memory.HostPeerMemory, "__init__", note),
        scheme_of("ulysses", **options("symmetric")).bind(group, CPU) as bound,
    ):
        for length in (8, 12, 48):
            one_pass(bound, Batch(lengths=(length,)))
    return alive


def test_buffers_that_were_too_small_are_let_go_before_larger_ones_are_made() -> None:
    """Of inputs and of results: beside one of the one kind there is one of the other."""
    assert on_ranks(2, alive_in_growth) == [[0, 1, 1, 1, 1, 1]] * 2


def test_auto_sends_messages_between_cpus() -> None:
    scheme = scheme_of("ulysses", kernel="naive")
    assert scheme.transport_of(PROBLEM) == "all_to_all"
    assert scheme_of("ulysses", transport="symmetric").transport_of(PROBLEM) == "symmetric"


def lse_error(group: dist.ProcessGroup, batch: Batch, exchange: tuple[str, int]) -> float:
    """Largest error of o and lse without gradients, against the kernel on whole sequences."""
    packing = batch.packing() if batch.packed else None
    spec = AttentionSpec(causal=True, scale=SCALE, packing=packing)
    q, k, v, _ = batch.tensors()
    with scheme_of("ulysses", **options(*exchange, "flash_torch")).bind(group, CPU) as bound:
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


@pytest.mark.parametrize(
    "batch",
    [
        Batch(lengths=(23,), num_heads=14, num_kv_heads=7),
        Batch(lengths=(24, 7, 1, 13), packed=True, num_heads=14, num_kv_heads=7),
    ],
    ids=["dense", "packed"],
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_the_lse_comes_home_too(batch: Batch, exchange: tuple[str, int]) -> None:
    assert max(on_ranks(4, lse_error, batch, exchange)) < 1e-6


def one_pass(bound: Any, batch: Batch) -> list[Tensor]:
    """(o, dq, dk, dv) of this rank."""
    q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(bound, leaves, batch)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def exchanged_and_awaited(group: dist.ProcessGroup, transport: str) -> list[list[int]]:
    """The groups of heads in the order in which inputs are exchanged, and waited for, by pass."""
    kind = {"all_to_all": all_to_all, "symmetric": symmetric}[transport]._Arriving
    started: list[int] = []
    awaited: list[int] = []
    init, wait = kind.__init__, kind.wait

    def start(arriving: Any, *arguments: Any) -> None:
        init(arriving, *arguments)
        started.append(arriving._group)

    def await_(arriving: Any) -> list[Tensor]:
        awaited.append(arriving._group)
        return wait(arriving)

    with (
        patch.object(kind, "__init__", start),
        patch.object(kind, "wait", await_),
        scheme_of("ulysses", **options(transport, 3)).bind(group, CPU) as bound,
    ):
        one_pass(bound, batch(num_heads=12, num_kv_heads=12))
    return [started, awaited]


@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_the_group_that_is_computed_first_is_exchanged_first(transport: str) -> None:
    """Backward passes begin with the last, and its exchange must not wait for the others'."""
    order = [0, 1, 2, 2, 1, 0]
    assert on_ranks(2, exchanged_and_awaited, transport) == [[order, order]] * 2


def results_of(
    group: dist.ProcessGroup, batch: Batch, exchanges: list[tuple[str, int]]
) -> list[list[Tensor]]:
    """Results of passes, each bound anew, and of a second pass that follows at once."""
    found = []
    for transport, head_groups in exchanges:
        with scheme_of("ulysses", **options(transport, head_groups)).bind(group, CPU) as bound:
            found += [one_pass(bound, batch), one_pass(bound, batch)]
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_bits_are_those_of_every_run_and_transport(packed: bool) -> None:
    """With one key head, whose gradients come from every group; rounded to bfloat16 once each."""
    few = batch(num_heads=12, num_kv_heads=1, packed=packed, dtype=torch.bfloat16)
    for head_groups in (1, 2, 3):
        exchanges = [("all_to_all", head_groups), ("symmetric", head_groups)]
        for first, *others in on_ranks(3, results_of, few, exchanges * 2):
            for other in others:
                assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_groups_change_rounding_alone() -> None:
    """Whole key heads are computed alike, in any group."""
    own = batch(num_heads=12, num_kv_heads=12)
    exchanges = [("symmetric", head_groups) for head_groups in (1, 2, 3)]
    for first, *others in on_ranks(2, results_of, own, exchanges):
        for other in others:
            for x, y in zip(first, other, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def sent_in_passes(
    group: dist.ProcessGroup, batch: Batch, exchange: tuple[str, int]
) -> tuple[int, int]:
    """Bytes that leave this rank, or that it reads, in a forward and in a backward pass."""
    with scheme_of("ulysses", **options(*exchange)).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        forward = recorder.sent_bytes
        torch.autograd.grad(o, leaves, do)
    return forward, recorder.sent_bytes - forward


def spans_of(group: dist.ProcessGroup, exchange: tuple[str, int]) -> list[tuple[str, str, int]]:
    """Phase, kind and step of each span of a traced pass, in order."""
    batch = Batch(lengths=(24,))
    with scheme_of("ulysses", **options(*exchange)).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        recorder.phase = "backward"
        torch.autograd.grad(o, leaves, do)
    return [(span.phase, span.kind, span.step) for span in recorder.spans()]


def test_a_timeline_shows_both_exchanges_and_the_kernel_between() -> None:
    once = [(WAIT, 0), (COMPUTE, 0), (WAIT, 1)]
    wanted = [(phase, *span) for phase in ("forward", "backward") for span in once]
    assert on_ranks(2, spans_of, ("all_to_all", 1)) == [wanted] * 2


def test_a_timeline_of_groups() -> None:
    """Backward runs the last group first; results of all groups are waited for at the end."""
    forward = [(WAIT, 0), (COMPUTE, 0), (WAIT, 1), (COMPUTE, 1), (WAIT, 2), (WAIT, 2)]
    backward = [(WAIT, 1), (COMPUTE, 1), (WAIT, 0), (COMPUTE, 0), (WAIT, 2), (WAIT, 2)]
    wanted = [("forward", *span) for span in forward] + [("backward", *span) for span in backward]
    assert on_ranks(2, spans_of, ("all_to_all", 2)) == [wanted] * 2


@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
class TestBytes:
    ROW = 6 * 8 * 4
    """6 tokens of one head of 8 float32, on each of 4 ranks."""

    def test_three_of_four_parts_of_q_k_v_and_o(self, transport: str) -> None:
        """Of 4 heads of q, k, v and o, all but one of each leave; and of their gradients."""
        batch = Batch(lengths=(24,), num_kv_heads=4)
        found = on_ranks(4, sent_in_passes, batch, (transport, 1))
        assert found == [(12 * self.ROW, 12 * self.ROW)] * 4

    def test_key_heads_go_to_all_that_need_them(self, transport: str) -> None:
        """Two ranks to a key head: 3 rows of q and of o, and k and v to three ranks."""
        batch = Batch(lengths=(24,), num_kv_heads=2)
        found = on_ranks(4, sent_in_passes, batch, (transport, 1))
        assert found == [(12 * self.ROW, 12 * self.ROW)] * 4

    def test_groups_of_whole_key_heads_send_no_more(self, transport: str) -> None:
        batch = Batch(lengths=(24,), num_heads=8, num_kv_heads=8)
        found = on_ranks(4, sent_in_passes, batch, (transport, 2))
        assert found == [(24 * self.ROW, 24 * self.ROW)] * 4

    def test_groups_of_one_key_head_copy_it(self, transport: str) -> None:
        """6 rows of q and of o, and k and v to three ranks for two groups each."""
        batch = Batch(lengths=(24,), num_heads=8, num_kv_heads=4)
        found = on_ranks(4, sent_in_passes, batch, (transport, 2))
        assert found == [(24 * self.ROW, 24 * self.ROW)] * 4


def message_of(
    group: dist.ProcessGroup, lengths_by_rank: list[list[int]], extra_tokens: list[int]
) -> str:
    """What a rank raises whose packing, or whose number of tokens, is its own."""
    rank = dist.get_rank(group)
    lengths = lengths_by_rank[rank]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    longest = max(lengths)
    packing = Packing(
        cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest
    )
    with scheme_of("ulysses", kernel="naive").bind(group, CPU) as bound:
        num_local = sum(map(bound.layout.local_len, lengths)) + extra_tokens[rank]
        q = torch.zeros(num_local, 2, 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=True, scale=1.0, packing=packing))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def message_of_shapes(group: dist.ProcessGroup) -> str:
    with scheme_of("ulysses", kernel="naive").bind(group, CPU) as bound:
        q = torch.zeros(1, 2, 8 + bound.rank, 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=True, scale=1.0))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


class TestDisagreement:
    def test_shapes(self) -> None:
        for message in on_ranks(2, message_of_shapes):
            assert message.startswith("ranks disagree on what they attend to: rank 0 has [1, 2, 8,")
            assert "rank 1 has [1, 2, 9, 4] float32" in message

    def test_packings_of_as_many_tokens(self) -> None:
        for message in on_ranks(2, message_of, [[8, 4], [4, 8]], [0, 0]):
            assert "lengths [8, 4], rank 1 has" in message
            assert message.endswith("causal, lengths [4, 8]")

    def test_lengths_of_local_parts(self) -> None:
        """All ranks say it, also those whose own call is right."""
        for message in on_ranks(2, message_of, [[8, 4], [8, 4]], [0, 3]):
            assert message == (
                "rank 1: q, k and v have 9, 9, 9 tokens; its part of sequences of 8, 4 has 6: "
                "lengths are those of whole sequences"
            )

    def test_equal_calls(self) -> None:
        assert on_ranks(2, message_of, [[8, 4], [8, 4]], [0, 0]) == ["nothing was raised"] * 2

    def test_long_statements_differ_by_their_checksums(self) -> None:
        many = [[1] * 600 + [2, 4], [1] * 600 + [4, 2]]
        for message in on_ranks(2, message_of, many, [0, 0]):
            assert message.startswith("ranks disagree")


class TestSupport:
    @pytest.mark.parametrize(
        ("options", "changes", "reason"),
        [
            ({}, {"cp": 8}, "4 query heads are too few for 8 ranks"),
            ({}, {"causal": False, "q_len": 63, "kv_len": 63}, "63 tokens do not divide by 4"),
            ({}, {"kv_len": 32}, "queries and keys of a split sequence are the same tokens"),
            ({"kernel": "sdpa_cudnn"}, {}, "attention.kernel=sdpa_cudnn: "),
            (
                {"head_groups": 2},
                {},
                "attention.head_groups=2: 4 query heads on 4 ranks make at most 1",
            ),
        ],
    )
    def test_reasons(self, options: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
        found = scheme_of("ulysses", **options).supports(replace(PROBLEM, **changes))
        assert found is not None
        assert found.startswith(reason)
        assert "\n" not in found

    @pytest.mark.parametrize("kernel", ["auto", "naive", "sdpa", "flash_torch"])
    def test_what_works_is_supported(self, kernel: str) -> None:
        assert scheme_of("ulysses", kernel=kernel).supports(PROBLEM) is None

    def test_an_unknown_transport(self) -> None:
        with pytest.raises(ValueError, match=r"attention\.transport=ring: must be one of auto, al"):
            scheme_of("ulysses", transport="ring")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    def test_memory_of_peers_that_are_not_here(self) -> None:
        problem = replace(PROBLEM, device="cuda")
        symmetric, auto = (scheme_of("ulysses", transport=name) for name in ("symmetric", "auto"))
        assert symmetric.supports(problem) == "torch sees no CUDA device"
        assert auto.transport_of(problem) == "all_to_all"

    def test_no_group_of_heads(self) -> None:
        with pytest.raises(ValueError, match=r"attention\.head_groups=0: must be at least 1"):
            scheme_of("ulysses", head_groups=0)

    def test_groups_are_told(self) -> None:
        found = scheme_of("ulysses", **options("symmetric", 2)).choice(replace(PROBLEM, cp=2))
        assert found == "ulysses(kernel=naive, transport=symmetric, head_groups=2)"

    def test_the_choice_of_auto_is_told(self) -> None:
        choice = scheme_of("ulysses").choice(PROBLEM)
        kernel = scheme_of("ulysses").kernel_of(PROBLEM)
        assert kernel in BACKENDS
        assert choice == f"ulysses(kernel={kernel}, transport=all_to_all)"
