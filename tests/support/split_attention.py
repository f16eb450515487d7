"""Batches and schemes with which attention on split sequences is compared with float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from kernels import BACKENDS, AttentionProblem, Packing
from kernels.backends.naive import Naive
from kernels.problem import AttentionSpec
from parallel.context.attention import ContextParallelAttention

CPU = torch.device("cpu")

SCHEMES = ("ring", "zigzag", "striped", "llama3", "zigzag_llama3")

TRANSPORTS = {
    **dict.fromkeys(("ring", "zigzag", "striped"), ("send_recv", "symmetric")),
    **dict.fromkeys(("llama3", "zigzag_llama3"), ("all_gather", "symmetric")),
}

KERNELS = ("naive", "flash_torch", "sdpa_flash")


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


class Hidden(Naive):
    """A kernel that keeps its log-sum-exp to itself."""

    gives_lse: ClassVar[bool] = False  # type: ignore[assignment, misc]

    def forward(self, *arguments: Any) -> Any:
        raise AssertionError("no log-sum-exp here")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return Naive(name="naive").attend(q, k, v, spec)


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


def shard(bound: Any, x: Tensor, batch: Batch) -> Tensor:
    if batch.packed:
        return bound.layout.shard_packed(x, batch.lengths, bound.rank)
    return bound.layout.shard(x, bound.rank, dim=2)


def attend(bound: Any, leaves: list[Tensor], batch: Batch) -> Tensor:
    packing = batch.packing() if batch.packed else None
    return bound.attend(*leaves, AttentionSpec(causal=batch.causal, scale=SCALE, packing=packing))


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


CLOSENESS = 2e-5
"""Largest error, relative to the largest expected entry."""


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


def check(num_ranks: int, name: str, options: dict[str, Any], batch: Batch) -> None:
    for rank, errors in enumerate(on_ranks(num_ranks, errors_on_rank, name, options, batch)):
        for what, error in zip(("o", "dq", "dk", "dv"), errors, strict=True):
            assert error < CLOSENESS, f"{what} on rank {rank} is off by {error:.2g}"
