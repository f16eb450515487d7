"""Attention over placed documents, against float64 attention of the whole batch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import (
    CLOSENESS,
    CPU,
    PROBLEM,
    SCALE,
    Batch,
    Hidden,
    attend,
    check,
    exact,
    scheme_of,
    shard,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import BACKENDS, Packing
from kernels.backends.naive import Naive
from kernels.problem import AttentionSpec
from parallel.context import attention
from parallel.context.blocks.tracing import COMPUTE, NO_TRACING, WAIT, RecordingTracer
from parallel.context.documents.calls import joins_well, make_calls
from parallel.context.documents.exchange import AllToAllRows, KeyExchange
from parallel.context.documents.placement import Placement, place
from parallel.context.documents.routes import Routes
from parallel.context.documents.runs import Run

TRANSPORTS = ("all_to_all", "symmetric")

RAGGED = (24, 7, 0, 1, 13, 40, 5, 18)


def ragged(**options: Any) -> Batch:
    return Batch(**{"lengths": RAGGED, "packed": True, **options})


BATCHES = {
    "one_document": ragged(lengths=(37,)),
    "equal_documents": ragged(lengths=(12, 12, 12, 12)),
    "tokens": ragged(lengths=(1, 1, 1)),
    "one_token": ragged(lengths=(0, 1)),
    "short_after_long": ragged(lengths=(3, 64, 2)),
    "more_heads_a_group": ragged(num_heads=6, num_kv_heads=1),
}


class TestAgainstFloat64:
    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
    @pytest.mark.parametrize("kernel", ["auto", "naive", "flash_torch"])
    def test_kernels(self, num_ranks: int, kernel: str) -> None:
        check(num_ranks, "documents", {"kernel": kernel}, ragged())

    @pytest.mark.parametrize("diagonals", ["joined", "first"])
    @pytest.mark.parametrize("keep_keys", ["always", "never"])
    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_choices(self, transport: str, diagonals: str, keep_keys: str, num_ranks: int) -> None:
        options = {"kernel": "naive", "diagonals": diagonals, "keep_keys": keep_keys}
        check(num_ranks, "documents", options | {"transport": transport}, ragged())

    @pytest.mark.parametrize("num_ranks", [2, 4])
    @pytest.mark.parametrize("diagonals", ["joined", "first"])
    @pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_batches(self, transport: str, batch: Batch, diagonals: str, num_ranks: int) -> None:
        options = {"kernel": "naive", "diagonals": diagonals, "transport": transport}
        check(num_ranks, "documents", options, batch)

    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_without_a_mask(self, transport: str, num_ranks: int) -> None:
        options = {"kernel": "naive", "transport": transport}
        check(num_ranks, "documents", options, ragged(causal=False))


def errors_without_lse(
    group: dist.ProcessGroup, batch: Batch, transport: str, saved: bool
) -> list[float]:
    """Largest errors of this rank's o, dq, dk, dv, and of o without gradients.

    In a checkpoint, unless ``saved``.
    """
    scheme = scheme_of("documents", kernel="naive", transport=transport)
    with scheme.bind(group, CPU) as bound:
        bound._kernel = Hidden(name="hidden")
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def run(*inputs: Tensor) -> Tensor:
            return attend(bound, list(inputs), batch)

        o = run(*leaves) if saved else checkpoint(run, *leaves, use_reentrant=False)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        wanted = [shard(bound, x, batch) for x in exact(batch)]
        with torch.no_grad():
            found.append(attend(bound, [q, k, v], batch))
    assert bound.attend_with_lse(q, k, v, AttentionSpec(causal=True, scale=SCALE)) is None
    return [
        float((got.double() - want).abs().max())
        for got, want in zip(found, [*wanted, wanted[0]], strict=True)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "checkpoint"])
@pytest.mark.parametrize("lengths", [RAGGED, (37,), (12, 12), (5, 1), (8, 8, 16)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_kernel_without_lse(
    transport: str, num_ranks: int, lengths: tuple[int, ...], saved: bool
) -> None:
    """Of the last lengths, one of three ranks sends keys and needs none."""
    batch = ragged(lengths=lengths)
    for errors in on_ranks(num_ranks, errors_without_lse, batch, transport, saved):
        assert max(errors) < CLOSENESS


def lse_error(group: dist.ProcessGroup, diagonals: str) -> float:
    """Largest error of o and lse without gradients, against the kernel on whole documents."""
    batch = ragged()
    spec = AttentionSpec(causal=True, scale=SCALE, packing=batch.packing())
    q, k, v, _ = batch.tensors()
    scheme = scheme_of("documents", kernel="flash_torch", diagonals=diagonals)
    with scheme.bind(group, CPU) as bound:
        found = bound.attend_with_lse(*(shard(bound, x, batch) for x in (q, k, v)), spec)
        o, lse = BACKENDS["flash_torch"].target(name="flash_torch").forward(q, k, v, spec)
        wanted = (shard(bound, o, batch), shard(bound, lse.mT, batch))
    assert found is not None
    real = place(batch.lengths, bound.layout.num_ranks).tokens(bound.rank)
    differences = (found[0] - wanted[0], (found[1].mT - wanted[1])[:real])
    return max(float(difference.abs().max()) for difference in differences)


@pytest.mark.parametrize("diagonals", ["joined", "first"])
def test_the_lse_of_all_keys(diagonals: str) -> None:
    assert max(on_ranks(4, lse_error, diagonals)) < 1e-6


def bits_of_runs(group: dist.ProcessGroup, options: dict[str, Any]) -> bool:
    """Whether runs agree in every bit of o, dq, dk and dv, also on padding."""
    batch = ragged(dtype=torch.bfloat16, lengths=(70, 64, 5, 9))
    runs = []
    with scheme_of("documents", kernel="flash_torch", **options).bind(group, CPU) as bound:
        for _ in range(3):
            q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = attend(bound, leaves, batch)
            runs.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    return all(torch.equal(*pair) for run in runs for pair in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("diagonals", ["joined", "first"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_equal_bits_in_every_run(num_ranks: int, diagonals: str) -> None:
    assert on_ranks(num_ranks, bits_of_runs, {"diagonals": diagonals}) == [True] * num_ranks


def norms_in_bf16(group: dist.ProcessGroup, diagonals: str) -> list[float]:
    """Errors of o, dq, dk, dv over those of the kernel alone on one device; of all ranks."""
    batch = ragged(dtype=torch.bfloat16, head_dim=32, lengths=(96, 17, 40, 60))
    expected = exact(batch)
    q, k, v, do = batch.tensors()
    spec = AttentionSpec(causal=True, scale=SCALE, packing=batch.packing())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = Naive(name="naive").attend(*leaves, spec)
    alone = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    scheme = scheme_of("documents", kernel="naive", diagonals=diagonals)
    with scheme.bind(group, CPU) as bound:
        leaves = [shard(bound, x, batch).requires_grad_() for x in (q, k, v)]
        o = attend(bound, leaves, batch)
        found = [o.detach(), *torch.autograd.grad(o, leaves, shard(bound, do, batch))]
        wanted = [shard(bound, x, batch) for x in expected]
    ratios = []
    for got, want, single, whole in zip(found, wanted, alone, expected, strict=True):
        squares = (got.double() - want).square().sum()
        dist.all_reduce(squares, group=group)
        ratios.append(float(squares.sqrt() / (single.double() - whole).norm()))
    return ratios


@pytest.mark.parametrize("diagonals", ["joined", "first"])
def test_the_error_in_bf16_is_about_that_of_one_device(diagonals: str) -> None:
    for ratio in on_ranks(4, norms_in_bf16, diagonals)[0]:
        assert 0.1 < ratio < 1.5


def usual_uses(group: dist.ProcessGroup) -> float:
    """Attention as programs use it, in one process; returns the largest error."""
    batch = ragged()
    expected = exact(batch)
    with scheme_of("documents", kernel="naive").bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        wanted = [shard(bound, x, batch) for x in expected]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        # A graph whose backward pass nobody runs, and two that end in the other order.
        attend(bound, leaves, batch)
        first, second = attend(bound, leaves, batch), attend(bound, [2 * x for x in leaves], batch)
        torch.autograd.grad(second, leaves, do)
        results = [(first, wanted[0])]
        results += zip(torch.autograd.grad(first, leaves, do), wanted[1:], strict=True)
        # As a model's projections leave them: views of a wider tensor.
        wide = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in (q, k, v)]
        results.append((attend(bound, wide, batch), wanted[0]))
        # One row of gradients for all, as a sum's backward pass makes them.
        expanded = do[:1].expand_as(do)
        again = attend(bound, leaves, batch)
        same = [torch.autograd.grad(again, leaves, x, retain_graph=True) for x in
                (expanded, expanded.contiguous())]  # fmt: skip
        results += zip(*same, strict=True)
    return max(float((got.detach().double() - want).abs().max()) for got, want in results)


def test_usual_uses() -> None:
    assert max(on_ranks(3, usual_uses)) < 1e-5


def sent_in_passes(
    group: dist.ProcessGroup, batch: Batch, options: dict[str, Any]
) -> tuple[int, int]:
    """Bytes that leave this rank in a forward pass, and in a backward pass."""
    with scheme_of("documents", kernel="naive", **options).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        forward = recorder.sent_bytes
        torch.autograd.grad(o, leaves, do)
    return forward, recorder.sent_bytes - forward


class TestBytes:
    ROW = 2 * 2 * 8 * 4
    """k and v of two heads of 8 float32."""

    @pytest.mark.parametrize("diagonals", ["joined", "first"])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_are_those_of_the_plan(self, transport: str, causal: bool, diagonals: str) -> None:
        """Kept keys come once, and gradients of those that came go back."""
        routes = Routes.of(place(RAGGED, 3), causal)
        options = {"diagonals": diagonals, "keep_keys": "always", "transport": transport}
        found = on_ranks(3, sent_in_passes, ragged(causal=causal), options)
        ranks = range(3)
        assert found == [
            (routes.sends(rank) * self.ROW, routes.received(rank) * self.ROW) for rank in ranks
        ]

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_keys_that_come_again(self, transport: str) -> None:
        routes = Routes.of(place(RAGGED, 3), True)
        both = [routes.sends(rank) + routes.received(rank) for rank in range(3)]
        options = {"keep_keys": "never", "transport": transport}
        found = on_ranks(3, sent_in_passes, ragged(), options)
        assert [backward for _, backward in found] == [rows * self.ROW for rows in both]

    @pytest.mark.parametrize("transport", TRANSPORTS)
    def test_no_document_that_is_whole(self, transport: str) -> None:
        batch = ragged(lengths=(12,) * 4)
        assert on_ranks(4, sent_in_passes, batch, {"transport": transport}) == [(0, 0)] * 4

    def test_keys_are_kept_unless_there_are_more_than_own_ones(self) -> None:
        assert Routes.of(place(RAGGED, 3), True).keeps_keys()
        assert not Routes.of(place((48,), 4), True).keeps_keys()


def spans_of(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    batch = ragged()
    with scheme_of("documents", kernel="naive", diagonals="first").bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        bound.tracer = recorder = RecordingTracer(CPU)
        o = attend(bound, leaves, batch)
        recorder.phase = "backward"
        torch.autograd.grad(o, leaves, do)
    return [(span.phase, span.kind) for span in recorder.spans()]


def test_a_timeline_begins_with_what_needs_own_keys_alone() -> None:
    """Where diagonals come first, on ranks that hold parts of documents alone too."""
    for spans in on_ranks(3, spans_of):
        for phase in ("forward", "backward"):
            kinds = [kind for its, kind in spans if its == phase]
            assert kinds[0] == COMPUTE
            assert WAIT in kinds


class TestWhetherToJoin:
    """A key to wait for costs what a query to be merged costs, and 1,024 hidden pairs."""

    def joins(self, lengths: tuple[int, int, int], first: int, second: int) -> bool:
        """Of a rank that has the first document and positions [first, second) of the next one."""
        alone, split, other = lengths
        here = Run(0, 0, alone), Run(1, first, second)
        there = Run(2, 0, other), Run(1, 0, first), Run(1, second, split)
        placement = Placement(lengths=lengths, parts=(here, there))
        plan = Routes.of(placement, causal=True)
        assert plan.received(0) == first
        return joins_well(plan, 0)

    def test_few_keys_for_many_queries(self) -> None:
        assert self.joins((0, 8192, 0), 100, 4196)
        assert self.joins((0, 8192, 0), 4096, 8192)

    def test_many_keys_for_few_queries(self) -> None:
        assert not self.joins((0, 8192, 0), 4096, 8191)
        assert not self.joins((40, 8192, 0), 4096, 8191)

    def test_many_keys_that_other_work_hides(self) -> None:
        assert self.joins((2048, 8192, 0), 4096, 6145)
        assert not self.joins((2048, 8192, 0), 4096, 6140)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("lengths", [RAGGED, (48,), (30, 31, 3)])
def test_no_row_is_twice_in_a_layer(lengths: tuple[int, ...], joined: bool, num_ranks: int) -> None:
    """On CUDA, additions to a row that is twice in one call come in any order."""
    plan = Routes.of(place(lengths, num_ranks), causal=True)
    several = 0
    for rank in range(num_ranks):
        calls = make_calls(plan, rank, CPU, joined=joined, keeps_keys=False)
        parts = [calls.gather[start:stop].tolist() for start, stop in calls.layers]
        assert all(len(set(part)) == len(part) for part in parts)
        assert [row for part in parts for row in part] == calls.gather.tolist()
        assert set(calls.gather.tolist()) == set(range(calls.num_keys))
        several += len(parts) > 1
    assert several or lengths != (48,) or num_ranks == 2


def summed_gradients(group: dist.ProcessGroup) -> list[float]:
    """Gradients of one key that three runs have seen, in bfloat16."""
    plan = Routes.of(place((4,), 2), causal=True)
    calls = make_calls(plan, dist.get_rank(group), CPU, joined=True, keeps_keys=False)
    calls = replace(
        calls,
        receive_counts=[1, 0],
        again=torch.zeros(0, dtype=torch.int64),
        num_own=calls.num_rows,
        gather=torch.zeros(3, dtype=torch.int64),
        layers=[(0, 1), (1, 2), (2, 3)],
    )
    exchange = KeyExchange(transport=AllToAllRows(group), calls=calls, tracer=NO_TRACING)
    parts = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)[:, None, None]
    return [float(x) for x in exchange.gradients(parts, 2 * parts).flatten()]


def test_gradients_of_a_key_are_summed_in_float32() -> None:
    """In bfloat16, 256 + 1 is 256."""
    assert on_ranks(2, summed_gradients) == [[258.0, 516.0]] * 2


def message_of(
    group: dist.ProcessGroup,
    lengths_by_rank: list[list[int]],
    extra_tokens: list[int],
    key_lengths: list[int] | None = None,
) -> str:
    """What a rank raises whose packing, or whose number of tokens, is its own."""
    rank = dist.get_rank(group)
    lengths = lengths_by_rank[rank]
    starts, key_starts = (
        torch.tensor([0, *itertools.accumulate(its)], dtype=torch.int32)
        for its in (lengths, key_lengths or lengths)
    )
    packing = Packing(
        cu_seqlens_q=starts,
        cu_seqlens_k=key_starts,
        max_q_len=max(lengths),
        max_kv_len=max(lengths),
    )
    with scheme_of("documents", kernel="naive").bind(group, CPU) as bound:
        q = torch.zeros(bound.layout.packed_len(lengths) + extra_tokens[rank], 2, 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=True, scale=1.0, packing=packing))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def message_of_differing(group: dist.ProcessGroup, what: str) -> str:
    """What a rank raises whose heads, dtype or mask are those of its own."""
    batch = ragged()
    other = what if dist.get_rank(group) == 1 else ""
    num_heads = 4 if other == "heads" else 2
    dtype = torch.bfloat16 if other == "dtype" else torch.float32
    with scheme_of("documents", kernel="naive").bind(group, CPU) as bound:
        q = torch.zeros(bound.layout.packed_len(RAGGED), num_heads, 4, dtype=dtype)
        spec = AttentionSpec(causal=other != "mask", scale=1.0, packing=batch.packing())
        try:
            bound.attend(q, q, q, spec)
        except ValueError as error:
            return str(error)
    return "nothing was raised"


class TestDisagreement:
    @pytest.mark.parametrize("what", ["heads", "dtype", "mask"])
    def test_other_facts(self, what: str) -> None:
        for message in on_ranks(3, message_of_differing, what):
            assert message.startswith(
                "ranks disagree on what they attend to: rank 0 has [36, 2, 4]"
            )

    def test_packings_of_as_many_tokens(self) -> None:
        for message in on_ranks(3, message_of, [[8, 4], [4, 8], [8, 4]], [0, 0, 0]):
            assert "lengths [8, 4], rank 1 has" in message
            assert message.endswith("causal, lengths [4, 8]")

    def test_lengths_of_local_parts(self) -> None:
        """All ranks say it, also those whose own call is right."""
        for message in on_ranks(2, message_of, [[8, 4], [8, 4]], [0, 3]):
            assert message == (
                "rank 1: q, k and v have 9, 9, 9 tokens; its part of documents of 8, 4 has 6: "
                "lengths are those of whole documents"
            )

    def test_keys_of_other_lengths(self) -> None:
        for message in on_ranks(2, message_of, [[8, 4], [8, 4]], [0, 0], [4, 8]):
            assert message == (
                "rank 0: queries and keys of a split document are the same tokens, equally many"
            )

    def test_equal_calls(self) -> None:
        assert on_ranks(2, message_of, [[8, 4], [8, 4]], [0, 0]) == ["nothing was raised"] * 2


class TestSupport:
    PACKED = replace(PROBLEM, packed=True)

    @pytest.mark.parametrize(
        ("options", "changes", "reason"),
        [
            ({}, {"packed": False}, "documents are placed in a packed batch; the sequences of a"),
            ({}, {"kv_len": 32}, "queries and keys of a split document are the same tokens"),
            ({"kernel": "sdpa"}, {}, "attention.kernel=sdpa: takes no packed batch"),
            (
                {"kernel": "sdpa", "diagonals": "first"},
                {},
                "attention.kernel=sdpa gives no log-sum-exp, by which diagonals are merged; use",
            ),
        ],
    )
    def test_reasons(self, options: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
        found = scheme_of("documents", **options).supports(replace(self.PACKED, **changes))
        assert found is not None
        assert found.startswith(reason)
        assert "\n" not in found

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA devices")
    def test_memory_that_no_peer_reads(self) -> None:
        scheme = scheme_of("documents", kernel="flash_torch", transport="symmetric")
        on_cuda = replace(self.PACKED, device="cuda", dtype="bfloat16")
        assert scheme.supports(on_cuda) == "torch sees no CUDA device"
        assert scheme.supports(self.PACKED) is None

    @pytest.mark.parametrize("kernel", ["auto", "naive", "flash_torch"])
    def test_what_works_is_supported(self, kernel: str) -> None:
        for causal in (True, False):
            problem = replace(self.PACKED, causal=causal)
            assert scheme_of("documents", kernel=kernel).supports(problem) is None

    @pytest.mark.parametrize("key", ["transport", "diagonals", "keep_keys"])
    def test_unknown_choices(self, key: str) -> None:
        with pytest.raises(ValueError, match=rf"^attention\.{key}=ring: must be one of auto, "):
            scheme_of("documents", **{key: "ring"})

    def test_the_choice_of_auto_is_told(self) -> None:
        choice = scheme_of("documents").choice(self.PACKED)
        kernel = scheme_of("documents").kernel_of(self.PACKED)
        assert kernel in BACKENDS
        assert choice == f"documents(kernel={kernel}, transport=all_to_all)"
        chosen = scheme_of("documents", transport="symmetric").choice(self.PACKED)
        assert chosen == f"documents(kernel={kernel}, transport=symmetric)"

    @pytest.mark.parametrize(
        ("reason", "transport"), [(None, "symmetric"), ("no peer access", "all_to_all")]
    )
    def test_auto_reads_memory_where_gpus_can(
        self, reason: str | None, transport: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attention, "why_not_peers", lambda _: reason)
        scheme, device = scheme_of("documents"), torch.device("cuda")
        assert scheme.transport_of(replace(self.PACKED, device="cuda")) == transport
        two = SimpleNamespace(size=lambda: 2)
        assert scheme.reads_peers(two, device) == (transport == "symmetric")
        assert scheme_of("documents", transport="all_to_all").reads_peers(two, device) is False
        assert scheme.reads_peers(two, torch.device("cpu")) is False
