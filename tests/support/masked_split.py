"""Attention on split sequences under a window, a prefix, a cap and sinks, judged in float64.

Which key a query sees is asked pair by pair, of positions in whole sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CPU, SCALE, Batch, dense, scheme_of, shard
from torch import Tensor

from kernels.problem import AttentionSpec
from parallel.context.blocks.tracing import RecordingTracer

CLOSENESS = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}
"""Largest error, relative to the largest expected entry."""


@dataclass(frozen=True, kw_only=True)
class MaskedBatch(Batch):
    """A batch under a mask."""

    window: int | None = None
    prefix_len: int = 0
    softcap: float | None = None
    with_sinks: bool = False
    scale: float = SCALE

    def sinks(self) -> Tensor | None:
        generator = torch.Generator().manual_seed(3)
        return torch.randn(self.num_heads, generator=generator) if self.with_sinks else None

    def spec(self, sinks: Tensor | None) -> AttentionSpec:
        return AttentionSpec(
            causal=self.causal,
            scale=self.scale,
            packing=self.packing() if self.packed else None,
            window=self.window,
            prefix_len=self.prefix_len,
            softcap=self.softcap,
            sinks=sinks,
        )

    def sees(self, query: int, key: int) -> bool:
        if key < self.prefix_len:
            return True
        if self.causal and key > query:
            return False
        return self.window is None or abs(query - key) < self.window


def exact(batch: MaskedBatch) -> tuple[list[Tensor], Tensor | None]:
    """(o, lse, dq, dk, dv) of the whole batch and the gradient of sinks, in float64.

    lse is as o is, with a last dimension of one.
    """
    tensors = [x.double() for x in batch.tensors()]
    sinks = batch.sinks()
    logits = None if sinks is None else sinks.double().requires_grad_()
    if batch.packed:
        parts = [
            [x.transpose(0, 1) for x in part]
            for part in zip(*(x.split(batch.lengths) for x in tensors), strict=True)
        ]
    else:
        parts = [list(part) for part in zip(*(x.unbind() for x in tensors), strict=True)]
    found = [_sequence(batch, *part, logits) for part in parts]
    d_sinks = None if logits is None else sum(one[-1] for one in found)
    wholes = [torch.cat([one[index].transpose(0, 1) for one in found]) for index in range(5)]
    return [x if batch.packed else dense(x, len(batch.lengths)) for x in wholes], d_sinks


def _sequence(
    batch: MaskedBatch, q: Tensor, k: Tensor, v: Tensor, do: Tensor, logits: Tensor | None
) -> list[Any]:
    """One sequence [H, S, D]."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = q @ k.mT * batch.scale
    if batch.softcap is not None:
        scores = batch.softcap * torch.tanh(scores / batch.softcap)
    length = q.shape[1]
    seen = torch.tensor([[batch.sees(i, j) for j in range(length)] for i in range(length)])
    scores = columns = scores.masked_fill(~seen, -torch.inf)
    if logits is not None:
        columns = torch.cat([scores, logits[:, None, None].expand(-1, length, 1)], -1)
    lse = columns.logsumexp(-1, keepdim=True)
    o = (scores - lse).exp() @ v
    inputs = leaves if logits is None else [*leaves, logits]
    gradients = torch.autograd.grad(o, inputs, do)
    return [o.detach(), lse.detach(), *gradients]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank found."""

    errors: dict[str, float]
    sent_bytes: int
    """Of a forward and a backward pass."""
    same_bits: bool
    """Whether a second run gave the same."""


def found_on_rank(
    group: dist.ProcessGroup, name: str, options: dict[str, Any], batch: MaskedBatch
) -> Found:
    with scheme_of(name, **{"kernel": "flash_torch", **options}).bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, batch) for x in batch.tensors())

        def run() -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            logits = batch.sinks()
            if logits is not None:
                leaves.append(logits.requires_grad_())
            o = bound.attend(*leaves[:3], batch.spec(logits))
            return [o.detach(), *torch.autograd.grad(o, leaves, do)]

        bound.tracer = tracer = RecordingTracer(CPU)
        found = run()
        sent_bytes = tracer.sent_bytes
        again = run()
        same_bits = all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
        both = bound.attend_with_lse(q, k, v, batch.spec(batch.sinks()))
        assert both is not None
        lse = both[1].mT if batch.packed else both[1]
        expected, d_sinks = exact(batch)
        real = shard(bound, torch.ones_like(batch.tensors()[0]), batch)[..., :1]
        wanted = [shard(bound, x, batch) for x in expected]
    got = [found[0], lse.unsqueeze(-1), *found[1:4]]
    errors = {}
    for what, mine, should, whole in zip(
        ("o", "lse", "dq", "dk", "dv"), got, wanted, expected, strict=True
    ):
        assert mine.shape == should.shape, what
        # Results of padded queries are never used.
        rows = _rows(real, mine, batch)
        worst = torch.where(rows > 0, (mine.double() - should).abs(), 0.0).max()
        errors[what] = float(worst / whole.abs().max().clamp_min(0.1))
    if d_sinks is not None:
        total = found[4].double()
        dist.all_reduce(total, group=group)
        errors["dsinks"] = float((total - d_sinks).abs().max() / d_sinks.abs().max())
    return Found(errors=errors, sent_bytes=sent_bytes, same_bits=same_bits)


def _rows(real: Tensor, like: Tensor, batch: MaskedBatch) -> Tensor:
    """Real tokens, in the heads of ``like``."""
    heads = 1 if batch.packed else like.dim() - 3
    return real.narrow(heads, 0, 1).expand_as(like.narrow(-1, 0, 1))


def check(num_ranks: int, name: str, options: dict[str, Any], batch: MaskedBatch) -> list[Found]:
    found = on_ranks(num_ranks, found_on_rank, name, options, batch)
    for rank, one in enumerate(found):
        assert one.same_bits, f"rank {rank} of {name} repeats no bits of {batch}"
        for what, error in one.errors.items():
            assert error < CLOSENESS[batch.dtype], (
                f"{name}: {what} on rank {rank} is off by {error:.2g}: {batch}"
            )
    return found
