"""Passes of split attention as CUDA graphs, on several GPUs, beside the same passes launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_of, on_gpus
from torch import Tensor

import parallel.split
from kernels import Packing
from kernels.launching.graphs import capture
from kernels.problem import AttentionSpec
from parallel import BACKENDS

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.multigpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs several CUDA devices, torch sees {NUM_GPUS}"),
]

RANKS = [ranks for ranks in (2, 3, 4, 8) if ranks <= NUM_GPUS] or [2]
"""With three, the symmetric ring has an odd number of barriers."""

SCHEMES = [
    *((name, transport) for name in ("ring", "zigzag") for transport in ("send_recv", "symmetric")),
    ("striped", "symmetric"),
    *(("zigzag_llama3", transport) for transport in ("all_gather", "symmetric")),
    ("llama3", "symmetric"),
    ("ulysses", "all_to_all"),
    ("ulysses", "symmetric"),
    ("documents", "all_to_all"),
    ("documents", "symmetric"),
]

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 2, 128, 1536

LENGTHS = (600, 17, 588, 331)

OTHER_TOKENS = 3072
"""Longer than what was captured: buffers that peers read must grow beside those of a graph."""


class Call:
    """A scheme on this rank's part of random tensors."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        transport: str,
        packed: bool,
        window: int | None = None,
    ) -> None:
        self.device, self.packed = device_of(group), packed
        options = {"kernel": "flash_triton", "transport": transport}
        self.scheme = BACKENDS[name].target(name=name, **options)
        self.generator = torch.Generator(self.device).manual_seed(5)
        starts = torch.tensor([0, *LENGTHS], device=self.device).cumsum(0).int()
        packing = Packing(
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_q_len=max(LENGTHS),
            max_kv_len=max(LENGTHS),
        )
        self.spec = AttentionSpec(
            causal=True,
            scale=HEAD_DIM**-0.5,
            packing=packing if packed else None,
            window=window,
        )

    def inputs(self, bound: Any, tokens: int = TOKENS) -> list[Tensor]:
        """q, k, v, do."""
        found = []
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS):
            shape = (tokens, heads, HEAD_DIM) if self.packed else (1, heads, tokens, HEAD_DIM)
            whole = torch.randn(
                shape, generator=self.generator, device=self.device, dtype=torch.bfloat16
            )
            if self.packed:
                found.append(bound.layout.shard_packed(whole, LENGTHS, bound.rank))
            else:
                found.append(bound.layout.shard(whole, bound.rank, 2))
        return found

    def results(self, bound: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = bound.attend(*leaves, self.spec)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def replays(
    group: dist.ProcessGroup, name: str, transport: str, packed: bool, window: int | None = None
) -> None:
    """Replays on other values, with launched and longer passes in between, give their bits."""
    call = Call(group, name, transport, packed, window)
    with call.scheme.bind(group, call.device) as bound:
        held = call.inputs(bound)
        graph, results = capture(lambda: call.results(bound, *held))
        for number in range(4):
            for mine, new in zip(held, call.inputs(bound), strict=True):
                mine.copy_(new)
            launched = call.results(bound, *held)
            for result in results:
                result.fill_(float("nan"))
            graph.replay()
            same = [torch.equal(x, y) for x, y in zip(results, launched, strict=True)]
            assert all(same), f"o, dq, dk, dv of replay {number} equal those launched: {same}"
            if number == 1 and not packed:
                call.results(bound, *call.inputs(bound, OTHER_TOKENS))
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(results, launched, strict=True))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("name", "transport"), SCHEMES)
def test_replays_equal_launched_passes(
    num_ranks: int, name: str, transport: str, packed: bool
) -> None:
    if name == "documents" and not packed:
        pytest.skip("documents are packed")
    on_gpus(num_ranks, replays, name, transport, packed)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("window", [64, 500], ids=["few keys of others", "many"])
@pytest.mark.parametrize("transport", ["send_recv", "symmetric"])
def test_replays_under_a_window(num_ranks: int, transport: str, window: int) -> None:
    on_gpus(num_ranks, replays, "ring", transport, False, window)


def too_early(group: dist.ProcessGroup) -> str:
    call = Call(group, "zigzag", "symmetric", packed=False)
    with call.scheme.bind(group, call.device) as bound:
        inputs = call.inputs(bound)
        # Shapes are compared in the first call; the buffers of the backward pass are not there yet.
        bound.attend(*inputs[:3], call.spec)
        longer = call.inputs(bound, OTHER_TOKENS)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                bound.attend(*longer[:3], call.spec)
        except RuntimeError as error:
            return str(error)
    return ""


def test_a_capture_before_a_first_call_is_refused() -> None:
    for said in on_gpus(2, too_early):
        assert "call it once" in said


def functions(group: dist.ProcessGroup) -> None:
    """The public functions, captured together with what stands around them."""
    device = device_of(group)
    q, k, v = (
        torch.randn(1, heads, 512, HEAD_DIM, device=device, dtype=torch.bfloat16).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def step() -> list[Tensor]:
        # auto may choose a kernel whose backward pass differs from run to run.
        o = parallel.split.zigzag_attention(
            q, k, v, causal=True, layout="bhsd", group=group, kernel="flash_triton"
        )
        return [o.detach(), *torch.autograd.grad(o.square().mean(), (q, k, v))]

    graph, results = capture(step)
    launched = step()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(results, launched, strict=True))


def test_functions_are_captured_too() -> None:
    on_gpus(2, functions)
