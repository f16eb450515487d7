"""Context-parallel attention bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionProblem, AttentionSpec, Packing
from parallel.context.blocks import loops as _loops
from parallel.context.blocks.layouts import Layout
from parallel.context.blocks.pieces import DenseWork, PackedWork, Work
from parallel.context.blocks.trace import NO_TRACE, Trace
from parallel.context.transports.choices import TransportMaker

_WORKS_KEPT = 16
"""Prepared shapes of batches; a training run has one or two."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fusion:
    """Whether a packed call makes one kernel call of all its runs, or one for each."""

    forward: bool = False
    backward: bool = False


class SplitAttention:
    """Attention over the ranks of ``group``, each holding its layout's part of every sequence.

    Attributes:
        layout: how sequences are split; ``layout.shard`` makes the local tensors.
        rank: this process among the ranks of the group.
        trace: where spans go; a :class:`parallel.context.blocks.trace.Recorder` makes a
            timeline of what follows.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.rank = dist.get_rank(group)
        self.trace: Trace = NO_TRACE
        self._group = group

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Local q [B, H, S, D] and k, v [B, H_kv, S, D] -> local o; S is layout.local_len(N).

        Of a packed batch q is [T, H, D] and k, v are [T, H_kv, D], as ``layout.shard_packed`` gives
        them; its packing is that of the whole batch, each sequence at its real length, queries
        and keys alike.
        """
        raise NotImplementedError

    @property
    def outside_bytes(self) -> int:
        """Bytes of device memory that it holds and PyTorch's allocator does not count."""
        return 0

    def all_parts(self, x: Tensor) -> list[Tensor]:
        """``x`` of every rank, in rank order; all ranks call it together."""
        parts = [torch.empty_like(x) for _ in range(self.layout.num_ranks)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return parts


class BoundAttention(SplitAttention):
    """The project's own schemes over the ranks of a group."""

    def __init__(
        self,
        *,
        kernel: Attention,
        layout: Layout,
        group: dist.ProcessGroup,
        transports: TransportMaker,
        gathers: bool,
        fusion: Fusion,
    ) -> None:
        super().__init__(layout, group)
        self._kernel = kernel
        self._transports = transports
        self._gathers = gathers
        self._fusion = fusion
        self._works: dict[tuple[Any, ...], tuple[Any, Work]] = {}
        self._agreed = False

    @property
    def outside_bytes(self) -> int:
        buffers = self._transports.buffers
        return 0 if buffers is None else buffers.outside_bytes

    @torch.compiler.disable
    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """As :class:`SplitAttention` says.

        Raises ValueError on all ranks if their first calls differ in shape or dtype.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        self._agree(q, k, v)
        if spec.packing is None:
            work = self._dense_work(q, k, spec.causal)
            return _Attention.apply(q, k, v, self, work, work, spec.scale)
        works = [
            self._packed_work(spec.packing, spec.causal, fused, q.device)
            for fused in (self._fusion.forward, self._fusion.backward)
        ]
        return _Attention.apply(q, k, v, self, *works, spec.scale)

    def _dense_work(self, q: Tensor, k: Tensor, causal: bool) -> Work:
        key = (q.shape, k.shape, q.dtype, causal)

        def takes_rectangles(q_len: int, kv_len: int) -> bool:
            return self._kernel.supports(_problem(q, k, q_len, kv_len)) is None

        def make() -> Work:
            return DenseWork(
                self.layout,
                self.rank,
                q.shape[2],
                causal,
                prefixes=self._gathers,
                takes_rectangles=takes_rectangles,
            )

        return self._prepared(key, None, make)

    def _packed_work(
        self, packing: Packing, causal: bool, fused: bool, device: torch.device
    ) -> Work:
        # By identity: to compare lengths would wait for the device in every call.
        starts = packing.cu_seqlens_q
        key = (id(starts), starts._version, causal, fused)

        def make() -> Work:
            ends = starts.tolist()
            return PackedWork(
                self.layout,
                self.rank,
                [end - start for start, end in itertools.pairwise(ends)],
                causal,
                prefixes=self._gathers,
                fused=fused,
                device=device,
            )

        return self._prepared(key, starts, make)

    def _prepared(self, key: tuple[Any, ...], keep: Any, make: Callable[[], Work]) -> Work:
        """The work of a shape, made once; ``keep`` stays alive with it."""
        if key not in self._works:
            if len(self._works) >= _WORKS_KEPT:
                self._works.pop(next(iter(self._works)))
            self._works[key] = (keep, make())
        return self._works[key][1]

    def _agree(self, *tensors: Tensor) -> None:
        """Raise ValueError on every rank if the first calls of the ranks do not fit together.

        Later calls are not compared, which would cost each of them a collective.
        """
        if self._agreed:
            return
        mine = ", ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in tensors)
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise ValueError(
                    f"ranks disagree on the shapes of q, k, v: rank 0 has {found[0]}, "
                    f"rank {rank} has {theirs}"
                )
        self._agreed = True

    def forward(
        self, work: Work, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        transport = self._transports.make(self.trace)
        return _loops.forward(self._kernel, work, transport, q, k, v, scale, self.trace)

    def backward(
        self,
        work: Work,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        transport = self._transports.make(self.trace)
        return _loops.backward(
            self._kernel, work, transport, do, q, k, v, o, lse, scale, self.trace
        )


def _problem(q: Tensor, k: Tensor, q_len: int, kv_len: int) -> AttentionProblem:
    """One causal kernel call of these many queries and keys."""
    return AttentionProblem(
        batch_size=q.shape[0],
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        q_len=q_len,
        kv_len=kv_len,
        head_dim=q.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        device=q.device.type,
        causal=True,
        needs_grad=True,
    )


class _Attention(torch.autograd.Function):
    """Saves local q, k, v, o and lse; keys of other ranks come again for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bound: BoundAttention,
        forward_work: Work,
        backward_work: Work,
        scale: float,
    ) -> Tensor:
        o, lse = bound.forward(forward_work, q, k, v, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.bound, ctx.work, ctx.scale = bound, backward_work, scale
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        gradients = ctx.bound.backward(ctx.work, do, *ctx.saved_tensors, ctx.scale)
        return *gradients, None, None, None, None
