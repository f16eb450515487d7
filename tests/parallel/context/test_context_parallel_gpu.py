"""Split attention on several GPUs over NCCL and symmetric memory, in bfloat16 and at real sizes.

The same schemes are tested on gloo ranks in test_context_parallel.py; here are what a CPU has
not: streams that run beside each other, copy engines, and kernels that are fast enough to race.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, on_gpus
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels import Packing
from kernels.problem import AttentionSpec
from kernels.reference import relative_error
from parallel import BACKENDS
from parallel.context.transports.peer_memory import PeerBuffers
from parallel.context.transports.strided_copy import StridedCopy, stream_of_copies

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs several CUDA devices, torch sees {NUM_GPUS}"),
]

TRANSPORTS = {
    **dict.fromkeys(("ring", "zigzag", "striped"), ("send_recv", "symmetric")),
    **dict.fromkeys(("llama3", "zigzag_llama3"), ("all_gather", "symmetric")),
    "ulysses": ("all_to_all", "symmetric"),
    **dict.fromkeys(("ulysses_ring", "ulysses_zigzag"), ("send_recv", "symmetric")),
}

KERNELS = ("flash_triton", "sdpa_cudnn", "sdpa_flash", "naive")

RANKS = [ranks for ranks in (2, 4, 8) if ranks <= NUM_GPUS] or [2]

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, SEQ_LEN = 8, 2, 128, 2048

SCALE = HEAD_DIM**-0.5

LENGTHS = (1000, 17, 700, 331)

REPEATABLE = ("flash_triton", "naive")
"""Kernels whose backward pass gives equal bits each time."""

REPEATS = 5
"""Calls in a row without a pause, whose results must be equal bit for bit: a race would show."""


def whole_tensors(device: torch.device, packed: bool) -> list[Tensor]:
    """q, k, v, do: [1, H, S, D], or [T, H, D]; equal on all ranks."""
    generator = torch.Generator(device).manual_seed(3)

    def randn(heads: int) -> Tensor:
        shape = (sum(LENGTHS), heads, HEAD_DIM) if packed else (1, heads, SEQ_LEN, HEAD_DIM)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    return [randn(heads) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)]


def float64_results(tensors: list[Tensor], packed: bool) -> list[Tensor]:
    """(o, dq, dk, dv) of the whole batch."""
    if not packed:
        return exact(tensors)
    parts = zip(*(x.split(LENGTHS) for x in tensors), strict=True)
    dense = [exact([x.transpose(0, 1).unsqueeze(0) for x in part]) for part in parts]
    return [
        torch.cat([x.squeeze(0).transpose(0, 1) for x in wholes])
        for wholes in zip(*dense, strict=True)
    ]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, do = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * SCALE
    scores = scores.masked_fill(scores.new_ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    o = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def packing_on(device: torch.device) -> Packing:
    starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
    longest = max(LENGTHS)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)


def ratios_to_one_device(
    group: dist.ProcessGroup, name: str, options: dict[str, Any], packed: bool
) -> list[float]:
    """Errors of o, dq, dk, dv of all ranks over those of the kernel on one device."""
    device = device_of(group)
    tensors = whole_tensors(device, packed)
    expected = float64_results(tensors, packed)
    scheme = BACKENDS[name].target(name=name, **options)
    kernel, packing = scheme.on_one_device, packing_on(device)
    with scheme.bind(group, device) as bound:
        layout, rank = bound.layout, bound.rank

        def shard(x: Tensor) -> Tensor:
            return layout.shard_packed(x, LENGTHS, rank) if packed else layout.shard(x, rank, 2)

        def whole(x: Tensor) -> Tensor:
            parts = bound.all_parts(x)
            if packed:
                return layout.unshard_packed(parts, LENGTHS)
            return layout.unshard(parts, 2, SEQ_LEN)

        def results(attention: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            spec = AttentionSpec(causal=True, scale=SCALE, packing=packing if packed else None)
            o = attention.attend(*leaves, spec)
            return [o.detach(), *torch.autograd.grad(o, leaves, do)]

        alone = results(kernel, *tensors)
        own = [shard(x) for x in tensors]
        runs = [results(bound, *own) for _ in range(REPEATS)]
        # Libraries sum dq by atomic additions, in any order; o they give the same each time.
        num_equal = 4 if kernel.name in REPEATABLE else 1
        for again in runs[1:]:
            pairs = list(zip(again, runs[0], strict=True))[:num_equal]
            assert all(torch.equal(x, y) for x, y in pairs), "a race"
        found = [whole(x) for x in runs[0]]
    return [
        relative_error(split, want) / relative_error(one, want)
        for split, one, want in zip(found, alone, expected, strict=True)
    ]


def meet_in_new_memory(group: dist.ProcessGroup, late: int) -> None:
    """One rank's GPU is busy while buffers are made, and meets the others long after them."""
    device = device_of(group)
    buffers = PeerBuffers(group, device)
    for size in (1 << 10, 1 << 22):
        if dist.get_rank(group) == late:
            torch.cuda._sleep(1 << 30)
        buffers.get("keys", size).barrier(0)
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_busy_rank_loses_no_signal(num_ranks: int) -> None:
    """A lost one hangs, and the ranks' processes are given up."""
    for late in range(2):
        on_gpus(num_ranks, meet_in_new_memory, late)


def combinations() -> list[Any]:
    """Our kernel under every scheme and transport; other kernels under one ring and one gather."""
    shown = {("zigzag", "symmetric"), ("llama3", "all_gather")}
    return [
        pytest.param(
            *(name, transport, kernel, packed),
            id=f"{name}-{transport}-{kernel}-{'packed' if packed else 'dense'}",
            marks=[]
            if kernel == "flash_triton" or (name, transport) in shown
            else pytest.mark.exhaustive,
        )
        for name, transports in TRANSPORTS.items()
        for transport in transports
        for kernel in KERNELS
        for packed in ([False] if kernel.startswith("sdpa") else [False, True])
    ]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(("name", "transport", "kernel", "packed"), combinations())
def test_the_error_in_bf16_does_not_grow_with_ranks(
    num_ranks: int, name: str, transport: str, kernel: str, packed: bool
) -> None:
    options = {"kernel": kernel, "transport": transport}
    for ratio in on_gpus(num_ranks, ratios_to_one_device, name, options, packed)[0]:
        assert ratio <= 1.5


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
@pytest.mark.parametrize("packed", [False, True])
def test_groups_of_heads(num_ranks: int, transport: str, packed: bool) -> None:
    """Kernels of a group beside the exchange of another, in passes without a pause; one key head
    for several groups where ranks have no more."""
    groups = min(2, NUM_HEADS // num_ranks)
    options = {"kernel": "flash_triton", "transport": transport, "head_groups": groups}
    for ratio in on_gpus(num_ranks, ratios_to_one_device, "ulysses", options, packed)[0]:
        assert ratio <= 1.5


@pytest.mark.skipif(NUM_GPUS < 4, reason=f"needs four CUDA devices, torch sees {NUM_GPUS}")
@pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
def test_groups_of_heads_around_a_ring(transport: str) -> None:
    options = {"kernel": "flash_triton", "transport": transport, "ulysses": 2, "head_groups": 2}
    for ratio in on_gpus(4, ratios_to_one_device, "ulysses_zigzag", options, False)[0]:
        assert ratio <= 1.5


def same_when_checkpointed(group: dist.ProcessGroup, transport: str) -> bool:
    """Whether passes whose forward runs again in the backward pass give the same bits."""
    device = device_of(group)
    options = {"kernel": "flash_triton", "transport": transport, "head_groups": 2}
    spec = AttentionSpec(causal=True, scale=SCALE)
    with BACKENDS["ulysses"].target(name="ulysses", **options).bind(group, device) as bound:
        *inputs, do = (
            bound.layout.shard(x, bound.rank, dim=2) for x in whole_tensors(device, packed=False)
        )

        def gradients(is_checkpointed: bool) -> tuple[Tensor, ...]:
            leaves = [x.detach().requires_grad_() for x in inputs]
            if is_checkpointed:
                o = checkpoint(lambda *x: bound.attend(*x, spec), *leaves, use_reentrant=False)
            else:
                o = bound.attend(*leaves, spec)
            return torch.autograd.grad(o, leaves, do)

        expected = gradients(is_checkpointed=False)
        found = [gradients(is_checkpointed=True) for _ in range(REPEATS)]
    return all(torch.equal(x, y) for each in found for x, y in zip(each, expected, strict=True))


@pytest.mark.parametrize("num_ranks", [ranks for ranks in RANKS if ranks < NUM_HEADS])
@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_groups_of_heads_in_a_checkpoint(num_ranks: int, transport: str) -> None:
    """The forward pass runs in the middle of the backward pass, and stops before its end."""
    assert all(on_gpus(num_ranks, same_when_checkpointed, transport))


def passes_of_uneven_heads(group: dist.ProcessGroup, head_groups: int) -> bool:
    """Whether passes end, of calls in which ranks have other heads, and memory grows between."""
    device = device_of(group)
    options = {"transport": "symmetric", "ulysses": 2, "head_groups": head_groups}
    scheme = BACKENDS["ulysses_zigzag"].target(
        name="ulysses_zigzag", kernel="flash_triton", **options
    )
    spec = AttentionSpec(causal=True, scale=SCALE)
    with scheme.bind(group, device) as bound:
        for num_heads, num_kv_heads, tokens in ((10, 5, 256), (12, 6, 256), (14, 7, 512)):
            q, k, v = (
                torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=torch.bfloat16)
                for heads in (num_heads, num_kv_heads, num_kv_heads)
            )
            leaves = [x.requires_grad_() for x in (q, k, v)]
            bound.attend(*leaves, spec).sum().backward()
        torch.cuda.synchronize(device)
    return all(bool(x.grad.isfinite().all()) for x in leaves)


@pytest.mark.skipif(NUM_GPUS < 4, reason=f"needs four CUDA devices, torch sees {NUM_GPUS}")
@pytest.mark.parametrize("head_groups", [1, 2])
def test_heads_that_do_not_divide_around_a_ring(head_groups: int) -> None:
    """One rank of a group calls the ring with two and one key heads, the other with one and two."""
    assert all(on_gpus(4, passes_of_uneven_heads, head_groups))


def strided_copies(group: dist.ProcessGroup) -> list[bool]:
    """Whether rows that a peer published arrive in their places, and nothing else changes."""
    device, rank, num_ranks = device_of(group), dist.get_rank(group), dist.get_world_size(group)
    memory = PeerBuffers(group, device).get("rows", 1 << 20)
    peer, found = (rank + 1) % num_ranks, []
    shape = torch.Size((3, 6, 10, 8))
    for number, (dim, start, into_dim) in enumerate([(1, 2, 2), (2, 4, 1), (0, 1, 1)]):
        own = torch.randn(shape, device=device, dtype=torch.bfloat16)
        memory.barrier(0)
        memory.of_rank(rank, 0, own).copy_(own)
        memory.barrier(0)
        out = memory.of_rank(peer, 0, own).narrow(dim, start, 2)
        longer = list(out.shape)
        longer[into_dim] += 5
        target = torch.full(longer, float(number), device=device, dtype=torch.bfloat16)
        wanted = target.clone()
        wanted.narrow(into_dim, 3, out.shape[into_dim]).copy_(out)
        template = torch.empty(longer, device="meta", dtype=torch.bfloat16)
        copy = StridedCopy(template.narrow(into_dim, 3, out.shape[into_dim]), out)
        copy.run(target, stream_of_copies(device))
        found.append(torch.equal(target, wanted))
    memory.barrier(0)
    memory.barrier(0)
    torch.cuda.synchronize(device)
    return found


def test_rows_of_a_peer_on_copy_engines() -> None:
    assert on_gpus(2, strided_copies) == [[True] * 3] * 2


FUSED, SEPARATE = "fused", "two_kernels"


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize(
    ("forward_mode", "backward_mode", "transport"),
    [
        (FUSED, SEPARATE, "symmetric"),
        (SEPARATE, FUSED, "symmetric"),
        (FUSED, FUSED, "all_gather"),
        pytest.param(FUSED, FUSED, "symmetric", marks=pytest.mark.exhaustive),
        pytest.param(FUSED, SEPARATE, "all_gather", marks=pytest.mark.exhaustive),
        pytest.param(SEPARATE, FUSED, "all_gather", marks=pytest.mark.exhaustive),
    ],
)
def test_modes_of_zigzag_llama3(
    num_ranks: int, forward_mode: str, backward_mode: str, transport: str
) -> None:
    options = {"kernel": "flash_triton", "transport": transport}
    options |= {"forward_mode": forward_mode, "backward_mode": backward_mode}
    for ratio in on_gpus(num_ranks, ratios_to_one_device, "zigzag_llama3", options, True)[0]:
        assert ratio <= 1.5


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("diagonals", ["joined", "first"])
@pytest.mark.parametrize("keep_keys", ["always", "never"])
@pytest.mark.parametrize("transport", ["all_to_all", "symmetric"])
def test_placed_documents(num_ranks: int, transport: str, diagonals: str, keep_keys: str) -> None:
    options = {"kernel": "flash_triton", "transport": transport}
    options |= {"diagonals": diagonals, "keep_keys": keep_keys}
    for ratio in on_gpus(num_ranks, ratios_to_one_device, "documents", options, True)[0]:
        assert ratio <= 1.5


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("kernel", ["sdpa_flash", "sdpa_cudnn"])
def test_pytorchs_own(num_ranks: int, rotate: str, kernel: str) -> None:
    options = {"kernel": kernel, "rotate": rotate}
    ratios = on_gpus(num_ranks, ratios_to_one_device, "context_parallel_torch", options, False)[0]
    # Its accuracy is not ours to promise, but it must compute the same thing.
    assert max(ratios) < 10
