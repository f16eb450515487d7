"""Attention on split sequences against float64 attention of the whole, on gloo ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

from kernels import BACKENDS, AttentionProblem, Packing
from kernels.backends.naive import Naive
from kernels.problem import AttentionSpec
from parallel.context.attention import ContextParallelAttention
from parallel.context.blocks.tracing import COMPUTE, RecordingTracer
from parallel.context.schemes.zigzag_llama3 import MODES

CPU = torch.device("cpu")

SCHEMES = ("ring", "zigzag", "striped", "llama3", "zigzag_llama3")

TRANSPORTS = {
    **dict.fromkeys(("ring", "zigzag", "striped"), ("send_recv", "symmetric")),
    **dict.fromkeys(("llama3", "zigzag_llama3"), ("all_gather", "symmetric")),
}

KERNELS = ("naive", "flash_torch", "sdpa_flash")

CLOSENESS = 2e-5
"""Largest error, relative to the largest expected entry."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """q, k, v and do of whole sequences, the same on every rank."""

    lengths: tuple[int, ...]
    """One length for each sequence; a dense batch has equal ones."""
    packed: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    causal: bool = True
    dtype: torch.dtype = torch.float32

    def tensors(self) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(7)

        def randn(heads: int) -> Tensor:
            shape = (sum(self.lengths), heads, self.head_dim)
            x = torch.randn(shape, generator=generator)
            return x.to(self.dtype) if self.packed else dense(x.to(self.dtype), len(self.lengths))

        q_heads, kv_heads = self.num_heads, self.num_kv_heads
        return randn(q_heads), randn(kv_heads), randn(kv_heads), randn(q_heads)

    def packing(self) -> Packing:
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        longest = max(self.lengths)
        return Packing(
            cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest
        )


def dense(x_THD: Tensor, batch_size: int) -> Tensor:
    return x_THD.unflatten(0, (batch_size, -1)).transpose(1, 2)


SCALE = 0.3


def exact(batch: Batch) -> list[Tensor]:
    """(o, dq, dk, dv) in float64, sequence by sequence."""
    tensors = [x.double() for x in batch.tensors()]
    if not batch.packed:
        return [
            torch.stack(parts)
            for parts in zip(
                *(
                    exact_sequence(*(x[b] for x in tensors), batch.causal)
                    for b in range(len(batch.lengths))
                ),
                strict=True,
            )
        ]
    parts = zip(*(x.split(batch.lengths) for x in tensors), strict=True)
    found = [
        [
            y.transpose(0, 1)
            for y in exact_sequence(*(x.transpose(0, 1) for x in part), batch.causal)
        ]
        for part in parts
    ]
    return [torch.cat(wholes) for wholes in zip(*found, strict=True)]


def exact_sequence(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> list[Tensor]:
    """One sequence [H, S, D]."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT * SCALE
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    o = scores.softmax(-1) @ v
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def scheme_of(name: str, **options: Any) -> ContextParallelAttention:
    entry = BACKENDS[name]
    return entry.target(name=name, **entry.preset, **options)


def errors_on_rank(
    group: dist.ProcessGroup, name: str, options: dict[str, Any], batch: Batch
) -> list[float]:
    """Largest error of this rank's part of o, dq, dk, dv, relative to the largest entry."""
    with scheme_of(name, **options).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = attend(bound, leaves, batch)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        expected = [shard(bound, x, batch) for x in exact(batch)]
        real = [shard(bound, torch.ones_like(x), batch) for x in exact(batch)]
    errors = []
    for got, wanted, mask in zip(found, expected, real, strict=True):
        assert got.shape == wanted.shape
        assert got.dtype == batch.dtype
        # Results of padded queries are never used.
        difference = (got.double() - wanted).abs() * mask
        errors.append(float(difference.max() / wanted.abs().max().clamp_min(0.1)))
    return errors


def shard(bound: Any, x: Tensor, batch: Batch) -> Tensor:
    if batch.packed:
        return bound.layout.shard_packed(x, batch.lengths, bound.rank)
    return bound.layout.shard(x, bound.rank, dim=2)


def attend(bound: Any, leaves: list[Tensor], batch: Batch) -> Tensor:
    packing = batch.packing() if batch.packed else None
    return bound.attend(*leaves, AttentionSpec(causal=batch.causal, scale=SCALE, packing=packing))


def check(num_ranks: int, name: str, options: dict[str, Any], batch: Batch) -> None:
    for rank, errors in enumerate(on_ranks(num_ranks, errors_on_rank, name, options, batch)):
        for what, error in zip(("o", "dq", "dk", "dv"), errors, strict=True):
            assert error < CLOSENESS, f"{what} on rank {rank} is off by {error:.2g}"


SHOWN = (("zigzag", "send_recv"), ("zigzag_llama3", "symmetric"))
"""Scheme and transport under which every kernel runs; the others run naive alone."""


def combinations(kernels: tuple[str, ...] = KERNELS) -> list[Any]:
    return [
        pytest.param(
            *(name, transport, kernel),
            id=f"{name}-{transport}-{kernel}",
            marks=[] if kernel == "naive" or (name, transport) in SHOWN else pytest.mark.exhaustive,
        )
        for name in SCHEMES
        for transport in TRANSPORTS[name]
        for kernel in kernels
    ]


def rank_counts(*shown: int) -> list[Any]:
    """One to four ranks; all but ``shown`` are exhaustive."""
    return [
        pytest.param(count, marks=[] if count in shown else pytest.mark.exhaustive)
        for count in (1, 2, 3, 4)
    ]


class TestAgainstOneDevice:
    @pytest.mark.parametrize("num_ranks", rank_counts(1, 3))
    @pytest.mark.parametrize(("name", "transport", "kernel"), combinations())
    def test_dense(self, num_ranks: int, name: str, transport: str, kernel: str) -> None:
        """Grouped queries, two sequences; 24 tokens divide by 2 P for each P."""
        check(num_ranks, name, {"kernel": kernel, "transport": transport}, Batch(lengths=(24, 24)))

    @pytest.mark.parametrize("num_ranks", rank_counts(3))
    @pytest.mark.parametrize(
        ("name", "transport", "kernel"), combinations(kernels=("naive", "flash_torch"))
    )
    def test_packed(self, num_ranks: int, name: str, transport: str, kernel: str) -> None:
        """Sequences that divide, that are padded, and one of a single token."""
        batch = Batch(lengths=(24, 7, 1, 13), packed=True)
        check(num_ranks, name, {"kernel": kernel, "transport": transport}, batch)

    @pytest.mark.parametrize("num_ranks", rank_counts(2))
    @pytest.mark.parametrize("name", SCHEMES)
    def test_a_length_that_does_not_divide(self, num_ranks: int, name: str) -> None:
        check(num_ranks, name, {"kernel": "naive"}, Batch(lengths=(23,)))

    @pytest.mark.parametrize("name", ["ring", "llama3"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_without_a_mask(self, name: str, packed: bool) -> None:
        batch = Batch(lengths=(24, 24), causal=False, packed=packed)
        check(3, name, {"kernel": "naive"}, batch)

    @pytest.mark.parametrize("transport", ["all_gather", "symmetric"])
    @pytest.mark.parametrize("name", ["llama3", "zigzag_llama3"])
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("at_once", [1, 2])
    def test_some_heads_at_a_time(
        self, name: str, transport: str, packed: bool, at_once: int
    ) -> None:
        batch = Batch(lengths=(24, 24), num_heads=8, num_kv_heads=4, packed=packed)
        options = {"kernel": "naive", "transport": transport, "kv_heads_at_once": at_once}
        check(2, name, options, batch)

    @pytest.mark.parametrize("num_ranks", rank_counts(2))
    @pytest.mark.parametrize("forward_mode", MODES)
    @pytest.mark.parametrize("backward_mode", MODES)
    @pytest.mark.parametrize(
        "kernel", ["naive", pytest.param("flash_torch", marks=pytest.mark.exhaustive)]
    )
    @pytest.mark.parametrize("transport", ["all_gather", "symmetric"])
    def test_modes_of_zigzag_llama3(
        self, num_ranks: int, forward_mode: str, backward_mode: str, kernel: str, transport: str
    ) -> None:
        options = {"kernel": kernel, "transport": transport}
        options |= {"forward_mode": forward_mode, "backward_mode": backward_mode}
        batch = Batch(lengths=(24, 7, 1, 13), packed=True)
        check(num_ranks, "zigzag_llama3", options, batch)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_auto_picks_a_kernel_and_a_transport(self, name: str) -> None:
        check(2, name, {}, Batch(lengths=(24,)))


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


class RoundsOnce(Naive):
    """Computes in float32 and rounds results alone: whatever else is rounded shows beside it."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        o, lse = Naive.forward(self, q.float(), k.float(), v.float(), spec)
        return o.to(q.dtype), lse

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, spec = arguments
        dq, dk, dv = Naive.backward(self, *(x.float() for x in tensors), spec)
        dtype = tensors[0].dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def bf16_error_growth(
    group: dist.ProcessGroup, name: str, transport: str, kernel_type: type[Naive]
) -> list[float]:
    """Errors of o, dq, dk, dv on this group over those of the kernel alone; norms of all ranks."""
    batch = Batch(lengths=(256,), head_dim=32, dtype=torch.bfloat16)
    expected = exact(batch)
    kernel = kernel_type(name="naive")
    q, k, v, do = batch.tensors()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = kernel.attend(*leaves, AttentionSpec(causal=True, scale=SCALE))
    with torch.no_grad():
        o, lse = kernel.forward(q, k, v, AttentionSpec(causal=True, scale=SCALE))
        alone = [o, *kernel.backward(do, q, k, v, o, lse, AttentionSpec(causal=True, scale=SCALE))]
    with scheme_of(name, kernel="naive", transport=transport).bind(group, CPU) as bound:
        bound._kernel = kernel
        locals_ = [bound.layout.shard(x, bound.rank, 2) for x in (q, k, v)]
        leaves = [x.clone().requires_grad_() for x in locals_]
        o = attend(bound, leaves, batch)
        own_do = bound.layout.shard(do, bound.rank, 2)
        found = [o.detach(), *torch.autograd.grad(o, leaves, own_do)]
        wanted = [bound.layout.shard(x, bound.rank, 2) for x in expected]
    ratios = []
    for got, want, single, whole in zip(found, wanted, alone, expected, strict=True):
        squares = (got.double() - want).square().sum()
        dist.all_reduce(squares, group=group)
        ratios.append(float(squares.sqrt() / (single.double() - whole).norm()))
    return ratios


@pytest.mark.parametrize(("name", "transport"), [(n, t) for n in SCHEMES for t in TRANSPORTS[n]])
class TestErrorInBf16:
    @pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
    def test_is_about_that_of_one_device(self, name: str, transport: str, num_ranks: int) -> None:
        for ratio in on_ranks(num_ranks, bf16_error_growth, name, transport, Naive)[0]:
            assert 0.1 < ratio < 1.5

    def test_does_not_grow_with_ranks(self, name: str, transport: str) -> None:
        """Merged in bfloat16, it would: by a quarter and more from two ranks to four."""
        two, four = (
            on_ranks(ranks, bf16_error_growth, name, transport, RoundsOnce)[0] for ranks in (2, 4)
        )
        for few, many in zip(two, four, strict=True):
            assert many < 1.12 * few


def usual_uses(group: dist.ProcessGroup, name: str, transport: str) -> float:
    """Attention as programs use it, in one process; returns the largest error."""
    batch = Batch(lengths=(24,))
    expected = exact(batch)
    with scheme_of(name, kernel="naive", transport=transport).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
        wanted = [shard(bound, x, batch) for x in expected]
        with torch.no_grad():
            results = [(attend(bound, [q, k, v], batch), wanted[0])]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        # A graph whose backward pass nobody runs, and two that end in the other order.
        attend(bound, leaves, batch)
        first, second = attend(bound, leaves, batch), attend(bound, [2 * x for x in leaves], batch)
        results += zip(torch.autograd.grad(second, leaves, do), [None] * 3, strict=True)
        results += zip(torch.autograd.grad(first, leaves, do), wanted[1:], strict=True)
        # As the transformer stores them: heads behind the sequence.
        turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        results.append((attend(bound, turned, batch), wanted[0]))
        compiled = torch.compile(
            lambda *x: 2 * attend(bound, list(x), batch), backend="eager", dynamic=False
        )
        results += zip(
            torch.autograd.grad(compiled(*leaves), leaves, do / 2), wanted[1:], strict=True
        )
    return max(
        float((got.double() - want).abs().max()) for got, want in results if want is not None
    )


@pytest.mark.parametrize(("name", "transport"), [(n, t) for n in SCHEMES for t in TRANSPORTS[n]])
def test_usual_uses(name: str, transport: str) -> None:
    assert max(on_ranks(3, usual_uses, name, transport)) < 1e-5


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


def different_shapes(group: dist.ProcessGroup, name: str) -> str:
    rank = dist.get_rank(group)
    with scheme_of(name, kernel="naive").bind(group, CPU) as bound:
        q = torch.zeros(1, 2, 8 + rank, 4)
        try:
            bound.attend(q, q, q, AttentionSpec(causal=True, scale=1.0))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_that_disagree_say_so(name: str) -> None:
    for message in on_ranks(3, different_shapes, name):
        assert message == (
            "ranks disagree on the shapes of q, k, v: rank 0 has [1, 2, 8, 4] float32, "
            "[1, 2, 8, 4] float32, [1, 2, 8, 4] float32, rank 1 has [1, 2, 9, 4] float32, "
            "[1, 2, 9, 4] float32, [1, 2, 9, 4] float32"
        )


def passes_through(group: dist.ProcessGroup, name: str) -> bool:
    q, k, v, _ = Batch(lengths=(24,)).tensors()
    scheme = scheme_of(name, kernel="flash_torch")
    alone = scheme.on_one_device.attend(q, k, v, AttentionSpec(causal=True, scale=SCALE))
    with scheme.bind(group, CPU) as bound:
        return torch.equal(bound.attend(q, k, v, AttentionSpec(causal=True, scale=SCALE)), alone)


@pytest.mark.parametrize("name", SCHEMES)
def test_one_rank_is_the_kernel_itself(name: str) -> None:
    assert on_ranks(1, passes_through, name) == [True]


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
        ("zigzag_llama3", "symmetric", (3, 3 + 3)),
    ],
)
def test_bytes_that_are_sent(name: str, transport: str, hops: tuple[int, int]) -> None:
    """Keys go to P - 1 ranks, and gradients home from as many, or around the whole ring."""
    for found in on_ranks(4, sent_bytes, name, transport):
        assert found == [KV_BYTES * hop for hop in hops]


PROBLEM = AttentionProblem(
    batch_size=1,
    num_heads=4,
    num_kv_heads=2,
    q_len=64,
    kv_len=64,
    head_dim=16,
    dtype="float32",
    device="cpu",
    causal=True,
    needs_grad=True,
    cp=4,
)


class TestSupport:
    @pytest.mark.parametrize(
        ("name", "options", "changes", "reason"),
        [
            ("zigzag", {}, {"causal": False}, "balances a causal mask; without one use ring"),
            ("striped", {}, {"causal": False}, "balances a causal mask; without one use ring"),
            ("zigzag_llama3", {}, {"causal": False}, "balances a causal mask"),
            ("ring", {}, {"causal": False, "q_len": 63, "kv_len": 63}, "63 tokens do not divide"),
            ("ring", {}, {"kv_len": 128}, "are the same tokens"),
            (
                "ring",
                {"kernel": "sdpa_math"},
                {},
                "sdpa_math gives no log-sum-exp",
            ),
            (
                "zigzag",
                {"kernel": "sdpa_cudnn"},
                {},
                "kernel=sdpa_cudnn: PyTorch's cudnn",
            ),
            ("zigzag", {"kernel": "sdpa_flash"}, {"packed": True}, "takes no packed batch"),
            ("llama3", {"kv_heads_at_once": 3}, {}, "kv_heads_at_once=3: must divide the 2 KV"),
            ("zigzag_llama3", {"forward_mode": "fused"}, {}, "forward_mode=fused: needs a packed"),
            (
                "zigzag_llama3",
                {"backward_mode": "fused"},
                {},
                "backward_mode=fused: needs a pack",
            ),
            ("zigzag", {"transport": "symmetric"}, {"device": "cuda"}, "sees no CUDA device"),
        ],
    )
    def test_reasons_are_one_line(
        self, name: str, options: dict[str, Any], changes: dict[str, Any], reason: str
    ) -> None:
        if changes.get("device") == "cuda" and torch.cuda.is_available():
            pytest.skip("this host has CUDA devices")
        found = scheme_of(name, **options).supports(replace(PROBLEM, **changes))
        assert found is not None
        assert "\n" not in found
        assert reason in found

    @pytest.mark.parametrize("name", SCHEMES)
    @pytest.mark.parametrize("kernel", KERNELS)
    def test_what_works_is_supported(self, name: str, kernel: str) -> None:
        scheme = scheme_of(name, kernel=kernel)
        assert scheme.supports(PROBLEM) is None
        assert scheme.supports(replace(PROBLEM, q_len=61, kv_len=61)) is None

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel": "nothing"}, "attention.kernel=nothing: no such kernel, one of auto,"),
            ({"kernel": "ring"}, "attention.kernel=ring: must be an attention on one device"),
            ({"transport": "pigeon"}, "attention.transport=pigeon: must be one of auto, all_ga"),
            ({"kv_heads_at_once": -1}, "attention.kv_heads_at_once=-1: must be 0"),
            ({"forward_mode": "both"}, "attention.forward_mode=both: must be one of two_kernels"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match="attention") as caught:
            scheme_of("zigzag_llama3", **options)
        assert str(caught.value).startswith(message)

    @pytest.mark.parametrize("name", SCHEMES)
    def test_the_choice_of_auto_is_told(self, name: str) -> None:
        transport = TRANSPORTS[name][0]
        chosen = f"{name}(kernel=sdpa_flash, transport={transport})"
        assert scheme_of(name).choice(PROBLEM) == chosen
        options = {"kernel": "naive", "transport": transport}
        assert scheme_of(name, **options).choice(PROBLEM) == name


class TestTorchPeer:
    """PyTorch's context_parallel, as far as it runs without GPUs."""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"device": "cpu"}, "has kernels for CUDA devices only"),
            ({"packed": True}, "takes no packed batch"),
            ({"causal": False}, "refuses calls without"),
            ({"q_len": 60, "kv_len": 60}, "60 tokens do not divide by 8, and it does not pad"),
        ],
    )
    def test_limits_are_reasons(self, changes: dict[str, Any], reason: str) -> None:
        problem = replace(PROBLEM, **{"device": "cuda", **changes})
        found = scheme_of("context_parallel_torch").supports(problem)
        assert found is not None
        assert reason in found

    def test_otherwise_it_is_tried(self) -> None:
        peer = scheme_of("context_parallel_torch")
        assert peer.supports(replace(PROBLEM, device="cuda")) is None

    def test_the_context_is_entered_and_left(self) -> None:
        assert on_ranks(2, patched_and_restored, "alltoall") == [(True, True), (True, True)]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"kernel": "flash_triton"},
                "attention.kernel=flash_triton: must be one of sdpa_flash",
            ),
            ({"rotate": "twist"}, "attention.rotate=twist: must be one of allgather, alltoall"),
        ],
    )
    def test_what_cannot_be_is_refused(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match="attention") as caught:
            scheme_of("context_parallel_torch", **options)
        assert str(caught.value).startswith(message)


def patched_and_restored(group: dist.ProcessGroup, rotate: str) -> tuple[bool, bool]:
    original = F.scaled_dot_product_attention
    with scheme_of("context_parallel_torch", rotate=rotate).bind(group, CPU) as bound:
        patched = F.scaled_dot_product_attention is not original
        assert bound.layout.num_ranks == 2
    return patched, F.scaled_dot_product_attention is original


class TestPredictedMemory:
    """65,536 tokens on 8 ranks, 32 query and 8 KV heads of 128, bfloat16; MB of 10^6 bytes."""

    GUIDE = replace(
        PROBLEM,
        num_heads=32,
        num_kv_heads=8,
        q_len=65_536,
        kv_len=65_536,
        head_dim=128,
        dtype="bfloat16",
        cp=8,
    )
    Q_MB, KV_MB, ALL_KV_MB = 67.1, 33.6, 268.4

    def test_local_tensors(self) -> None:
        found = scheme_of("zigzag", transport="send_recv").peak_memory(self.GUIDE)
        assert found["inputs"] / 1e6 == pytest.approx(self.Q_MB + self.KV_MB, rel=2e-3)
        assert found["output"] / 1e6 == pytest.approx(self.Q_MB, rel=2e-3)
        # A float32 sum beside the part that a kernel gives in bfloat16.
        assert found["dq"] / 1e6 == pytest.approx(3 * self.Q_MB, rel=2e-3)
        assert found["visiting_keys"] / 1e6 == pytest.approx(2 * self.KV_MB, rel=2e-3)

    def test_gathered_keys(self) -> None:
        found = scheme_of("llama3", transport="all_gather").peak_memory(self.GUIDE)
        assert found["gathered_keys"] / 1e6 == pytest.approx(self.ALL_KV_MB, rel=2e-3)

    def test_a_ring_by_hand(self) -> None:
        """A call on other ranks' keys, with sums of dk and dv under way in float32."""
        ring = scheme_of("ring", transport="send_recv", kernel="sdpa_cudnn")
        found = ring.peak_memory(replace(self.GUIDE, device="cuda"))
        expected = {
            "visiting_keys": 2 * self.KV_MB,
            "dq": 3 * self.Q_MB,
            # What leaves and what arrives; the call's own, and what the last one gave.
            "dk_dv_sums": 2 * 2 * self.KV_MB,
            "dk_dv": 2 * self.KV_MB,
            # Float32 sums of dq, a number a row, and dk and dv of every query head.
            "kernel_workspace": 2 * self.Q_MB + 1.05 + 4 * self.KV_MB,
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_a_gather_by_hand(self) -> None:
        """When dv is put in the order of the ranks, beside dk, which has been."""
        gather = scheme_of("llama3", transport="all_gather", kernel="sdpa_cudnn")
        found = gather.peak_memory(replace(self.GUIDE, device="cuda"))
        expected = {
            # In the ranks' order, which the collective keeps, and in that of their positions.
            "gathered_keys": self.ALL_KV_MB,
            "arranged_keys": self.ALL_KV_MB,
            # Causal rectangles are two calls, whose results are summed in float32.
            "dq": 2 * self.Q_MB,
            "dk_dv": self.ALL_KV_MB,
            # Float32 dv of all ranks: the sum, each rank's part, and the parts as one tensor.
            "summed": 3 * self.ALL_KV_MB,
            "reduced_dk_dv": self.ALL_KV_MB * (1 + 1 / 8),
        }
        assert {name: found[name] / 1e6 for name in expected} == pytest.approx(expected, rel=2e-3)

    def test_heads_in_groups_bound_a_gather(self) -> None:
        whole, four = (
            scheme_of("llama3", transport="symmetric", kv_heads_at_once=heads) for heads in (0, 2)
        )
        for part in ("arranged_keys", "summed"):
            assert four.peak_memory(self.GUIDE)[part] == whole.peak_memory(self.GUIDE)[part] / 4

    def test_without_gradients(self) -> None:
        """A ring: q, k, v, three visits' keys for a moment, o in float32, and a part of it."""
        problem = replace(self.GUIDE, needs_grad=False)
        found = scheme_of("ring", transport="send_recv").peak_memory(problem)
        assert found["visiting_keys"] / 1e6 == pytest.approx(3 * self.KV_MB, rel=2e-3)
        total = sum(found.values()) / 1e6
        assert total == pytest.approx(4 * self.Q_MB + 4 * self.KV_MB, rel=0.02)

    def test_a_fused_call_repeats_keys(self) -> None:
        """Chunks r and 2P-1-r of 16 see 17 chunks of keys in two calls or in one."""
        packed = replace(self.GUIDE, packed=True)
        two, one = (
            scheme_of("zigzag_llama3", transport="all_gather", backward_mode=mode)
            for mode in ("two_kernels", "fused")
        )
        assert two.peak_memory(packed)["taken_keys"] / 1e6 == pytest.approx(268.4, rel=2e-3)
        assert one.peak_memory(packed)["taken_keys"] / 1e6 == pytest.approx(
            268.4 * 17 / 16, rel=2e-3
        )

    @pytest.mark.parametrize("name", SCHEMES)
    def test_rings_do_not_grow_with_ranks_and_gathers_do(self, name: str) -> None:
        """With as many tokens a rank."""
        scheme = scheme_of(name, transport=TRANSPORTS[name][0])
        half = replace(self.GUIDE, q_len=32_768, kv_len=32_768, cp=4)
        more, less = (sum(scheme.peak_memory(item).values()) for item in (self.GUIDE, half))
        assert more > 1.3 * less if scheme.gathers else more == less


def grown_buffers(group: dist.ProcessGroup, name: str) -> float:
    """A short batch, a longer one and the short one again, through one bound attention."""
    worst = 0.0
    with scheme_of(name, kernel="naive", transport="symmetric").bind(group, CPU) as bound:
        for length in (12, 48, 12):
            batch = Batch(lengths=(length,))
            q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = attend(bound, leaves, batch)
            found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
            expected = [shard(bound, x, batch) for x in exact(batch)]
            for got, want in zip(found, expected, strict=True):
                worst = max(worst, float((got.double() - want).abs().max()))
    return worst


@pytest.mark.parametrize("name", SCHEMES)
def test_memory_that_peers_read_grows_with_the_batch(name: str) -> None:
    assert max(on_ranks(3, grown_buffers, name)) < 1e-5
