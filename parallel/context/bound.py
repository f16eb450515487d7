"""Context-parallel attention bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionProblem, AttentionSpec, Packing, sinks
from kernels.autograd import first_order_only
from kernels.problem import Mask
from parallel.context.blocks.layouts import Layout
from parallel.context.blocks.loops import AttentionPass
from parallel.context.blocks.schedule import DenseSchedule, PackedSchedule, RankSchedule
from parallel.context.blocks.tracing import NO_TRACING, Tracer
from parallel.context.transports.factories import TransportFactory

_SCHEDULES_KEPT = 16
"""One schedule for each shape of batch; a training run has one or two."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Fusion:
    """Whether a packed call joins all its runs in one kernel call, or makes one call for each."""

    forward: bool = False
    backward: bool = False


class SplitAttention:
    """Attention over the ranks of ``group``, each holding its layout's part of every sequence.

    Attributes:
        layout: how sequences are split; ``layout.shard`` makes the local tensors.
        rank: this process among the ranks of the group.
        tracer: where spans go; a :class:`parallel.context.blocks.tracing.RecordingTracer` makes a
            timeline of what follows.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        self.layout = layout
        self.rank = dist.get_rank(group)
        self.tracer: Tracer = NO_TRACING
        self._group = group

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Local q [B, H, S, D] and k, v [B, H_kv, S, D] -> local o; S is layout.local_len(N).

        Sinks of the spec are whole on every rank, and get the gradient of what this rank has
        computed, its queries or its heads: a caller sums it over ranks, as that of any other
        parameter.

        Of a packed batch q is [T, H, D] and k, v are [T, H_kv, D], as ``layout.shard_packed`` gives
        them; its packing is that of the whole batch, each sequence at its real length, queries
        and keys alike.
        """
        raise NotImplementedError

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        """o of :meth:`attend` and its log-sum-exp, without gradients; None where it is hidden.

        The lse is float32, local, and over the keys of all ranks: [B, H, S], or packed [H, T].
        """
        return None

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
        transports: TransportFactory,
        gathers: bool,
        fusion: Fusion,
    ) -> None:
        super().__init__(layout, group)
        self._kernel = kernel
        self._transports = transports
        self._gathers = gathers
        self._fusion = fusion
        self._schedules: dict[tuple[Any, ...], tuple[Any, RankSchedule]] = {}
        self._agreed = False
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    @property
    def outside_bytes(self) -> int:
        buffers = self._transports.buffers
        return 0 if buffers is None else buffers.outside_bytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if their first calls differ in shape or dtype.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        self._agree(q, k, v)
        schedules = self._both_schedules(q, k, spec)
        # What the passes see holds no sinks, of which autograd knows the tensor alone.
        keys = spec if spec.sinks is None else replace(spec, sinks=None)
        return _Attention.apply(q, k, v, spec.sinks, self, *schedules, keys)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        if self.layout.num_ranks == 1:
            return self._kernel.attend_with_lse(q, k, v, spec) if self._kernel.gives_lse else None
        self._agree(q, k, v)
        schedule, _ = self._both_schedules(q, k, spec)
        # Buffers and their views outlive the pass, and are no part of anybody's graph.
        with torch.no_grad():
            return self.new_pass(schedule, spec).forward(q, k, v)

    def _both_schedules(
        self, q: Tensor, k: Tensor, spec: AttentionSpec
    ) -> tuple[RankSchedule, RankSchedule]:
        """Those of the forward and of the backward pass."""
        if spec.packing is None:
            schedule = self._dense_schedule(q, k, spec.mask)
            return schedule, schedule
        forward, backward = (
            self._packed_schedule(spec.packing, spec.mask, fused, q.device)
            for fused in (self._fusion.forward, self._fusion.backward)
        )
        return forward, backward

    def _dense_schedule(self, q: Tensor, k: Tensor, mask: Mask) -> RankSchedule:
        key = (q.shape, k.shape, q.dtype, mask)

        def takes_rectangles(q_len: int, kv_len: int) -> bool:
            return self._kernel.why_unsupported(_problem(q, k, q_len, kv_len)) is None

        def make() -> RankSchedule:
            return DenseSchedule(
                self.layout,
                self.rank,
                q.shape[2],
                mask,
                prefixes=self._gathers,
                takes_rectangles=takes_rectangles,
            )

        return self._prepared(key, None, make)

    def _packed_schedule(
        self, packing: Packing, mask: Mask, fused: bool, device: torch.device
    ) -> RankSchedule:
        # By identity: to compare lengths would wait for the device in every call.
        starts = packing.cu_seqlens_q
        key = (id(starts), starts._version, mask, fused)

        def make() -> RankSchedule:
            ends = starts.tolist()
            return PackedSchedule(
                self.layout,
                self.rank,
                [end - start for start, end in itertools.pairwise(ends)],
                mask,
                prefixes=self._gathers,
                fused=fused,
                device=device,
            )

        return self._prepared(key, starts, make)

    def _prepared(
        self, key: tuple[Any, ...], keep: Any, make: Callable[[], RankSchedule]
    ) -> RankSchedule:
        """The schedule of a shape, made once; ``keep`` stays alive with it."""
        if key not in self._schedules:
            if len(self._schedules) >= _SCHEDULES_KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            self._schedules[key] = (keep, make())
        return self._schedules[key][1]

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

    def new_pass(self, schedule: RankSchedule, spec: AttentionSpec) -> AttentionPass:
        """A pass over the keys of all ranks, with a new transport."""
        return AttentionPass(
            kernel=self._kernel,
            schedule=schedule,
            transport=self._transports.make(self.tracer),
            scale=spec.scale,
            tracer=self.tracer,
            softcap=spec.softcap,
            sinks=spec.sinks,
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
        sink_logits: Tensor | None,
        bound: BoundAttention,
        forward_schedule: RankSchedule,
        backward_schedule: RankSchedule,
        spec: AttentionSpec,
    ) -> Tensor:
        with_sinks = spec if sink_logits is None else replace(spec, sinks=sink_logits)
        o, lse = bound.new_pass(forward_schedule, with_sinks).forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse, sink_logits)
        ctx.bound, ctx.schedule, ctx.spec = bound, backward_schedule, spec
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        this_pass = ctx.bound.new_pass(ctx.schedule, ctx.spec)
        q, k, v, o, lse, sink_logits = ctx.saved_tensors
        with torch.no_grad():
            gradients: tuple[Tensor, ...] = this_pass.backward(do, q, k, v, o, lse)
            sources: tuple[Tensor, ...] = (do, q, k, v)
            if sink_logits is not None:
                gradients = (*gradients, sinks.gradient(do, o, lse, sink_logits))
                sources = (*sources, sink_logits)
        name = f"context-parallel attention ({ctx.bound.layout.name})"
        found = first_order_only(name, gradients, sources)
        return *found, *(None,) * (8 - len(found))
