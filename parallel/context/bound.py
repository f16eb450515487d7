"""Context-parallel attention bound to the ranks that it runs on, differentiable."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionProblem, AttentionSpec, sinks
from kernels.autograd import first_order_only
from parallel.context.blocks.kept import Kept, identity_of
from parallel.context.blocks.layouts import Layout
from parallel.context.blocks.loops import AttentionPass, Visit
from parallel.context.blocks.schedule import DenseSchedule, PackedSchedule, RankSchedule, Scores
from parallel.context.blocks.tracing import NO_TRACING, Tracer
from parallel.context.transports.factories import TransportFactory


@dataclass(kw_only=True, slots=True, frozen=True)
class Prepared:
    """What all passes of calls have in common that differ in the values of their tensors alone.

    Shapes, dtype, packing, mask, scale and cap decide on it, and nothing that a tracer, a stream
    or the state of autograd could change.
    """

    forward: RankSchedule
    backward: RankSchedule


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

    def reserve(self, k: Tensor, spec: AttentionSpec, *, trained: bool) -> None:
        """Make the memory that peers read in calls of ``spec`` with keys up to the size of ``k``.

        Ranks that call with fewer heads than others would make theirs at other times. All ranks
        of the host call it together; nothing is read of ``k`` but its shape and dtype.
        """

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
        self._kept: Kept[Prepared] = Kept()
        self._agreed = False
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    @property
    def outside_bytes(self) -> int:
        buffers = self._transports.buffers
        return 0 if buffers is None else buffers.outside_bytes

    def reserve(self, k: Tensor, spec: AttentionSpec, *, trained: bool) -> None:
        if self._transports.reserve is not None:
            self._transports.reserve(k, self._prepare(k, k, spec).forward, trained)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if their first calls differ in shape or dtype.
        """
        if self.layout.num_ranks == 1:
            return self._kernel.attend(q, k, v, spec)
        self._agree(q, k, v)
        prepared = self._prepared(q, k, spec)
        return _Attention.apply(q, k, v, spec.sinks, self, prepared)

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        if self.layout.num_ranks == 1:
            return self._kernel.attend_with_lse(q, k, v, spec) if self._kernel.gives_lse else None
        self._agree(q, k, v)
        prepared = self._prepared(q, k, spec)
        # Buffers and their views outlive the pass, and are no part of anybody's graph.
        with torch.no_grad():
            return self.new_pass(prepared.forward, spec.sinks).forward(q, k, v)[:2]

    def _prepared(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Prepared:
        """What the passes of such a call share, made once."""
        starts = None if spec.packing is None else spec.packing.cu_seqlens_q
        key = (
            (q.shape, k.shape, q.dtype) if starts is None else (identity_of(starts), q.device),
            *(spec.causal, spec.window, spec.prefix_len, spec.shift, spec.scale, spec.softcap),
        )
        found = self._kept.get(key, q.device)
        if found is None:
            # An evaluation may come first, and its inference tensors are no part of a graph.
            with torch.inference_mode(False):
                found = self._kept.put(key, self._prepare(q, k, spec), starts)
        return found

    def _prepare(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> Prepared:
        if spec.packing is None:
            schedule = self._dense_schedule(q, k, spec)
            return Prepared(forward=schedule, backward=schedule)
        starts, fusion = spec.packing.cu_seqlens_q, self._fusion
        forward = self._packed_schedule(starts, spec, fusion.forward, q.device)
        backward = forward
        if fusion.backward != fusion.forward:
            backward = self._packed_schedule(starts, spec, fusion.backward, q.device)
        return Prepared(forward=forward, backward=backward)

    def _dense_schedule(self, q: Tensor, k: Tensor, spec: AttentionSpec) -> RankSchedule:
        def takes_rectangles(q_len: int, kv_len: int) -> bool:
            return self._kernel.why_unsupported(_problem(q, k, q_len, kv_len)) is None

        return DenseSchedule(
            self.layout,
            self.rank,
            q.shape[2],
            spec.mask,
            Scores(scale=spec.scale, softcap=spec.softcap),
            prefixes=self._gathers,
            takes_rectangles=takes_rectangles,
        )

    def _packed_schedule(
        self, starts: Tensor, spec: AttentionSpec, fused: bool, device: torch.device
    ) -> RankSchedule:
        return PackedSchedule(
            self.layout,
            self.rank,
            [end - start for start, end in itertools.pairwise(starts.tolist())],
            spec.mask,
            Scores(scale=spec.scale, softcap=spec.softcap),
            prefixes=self._gathers,
            fused=fused,
            device=device,
        )

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

    def new_pass(self, schedule: RankSchedule, sinks: Tensor | None = None) -> AttentionPass:
        """A pass over the keys of all ranks, with a new transport."""
        return AttentionPass(
            kernel=self._kernel,
            schedule=schedule,
            transport=self._transports.make(self.tracer),
            tracer=self.tracer,
            sinks=sinks,
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
    """Saves local q, k, v, o and lse.

    Keys of other ranks are saved where they are few; else they come again for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_logits: Tensor | None,
        bound: BoundAttention,
        prepared: Prepared,
    ) -> Tensor:
        o, lse, kept = bound.new_pass(prepared.forward, sink_logits).forward(q, k, v)
        keys = [x for visit in kept for x in (visit.k, visit.v)]
        # As saved tensors, so that a checkpoint lets them go.
        ctx.save_for_backward(q, k, v, o, lse, sink_logits, *keys)
        ctx.kept = [(visit.step, visit.source, visit.kv_heads) for visit in kept]
        ctx.bound, ctx.prepared = bound, prepared
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        this_pass = ctx.bound.new_pass(ctx.prepared.backward)
        q, k, v, o, lse, sink_logits, *keys = ctx.saved_tensors
        kept = [
            Visit(step=step, source=source, kv_heads=heads, k=kept_k, v=kept_v)
            for (step, source, heads), kept_k, kept_v in zip(
                ctx.kept, keys[::2], keys[1::2], strict=True
            )
        ]
        with torch.no_grad():
            gradients: tuple[Tensor, ...] = this_pass.backward(do, q, k, v, o, lse, kept)
            sources: tuple[Tensor, ...] = (do, q, k, v)
            if sink_logits is not None:
                gradients = (*gradients, sinks.gradient(do, o, lse, sink_logits))
                sources = (*sources, sink_logits)
        name = f"context-parallel attention ({ctx.bound.layout.name})"
        found = first_order_only(name, gradients, sources)
        return *found, *(None,) * (6 - len(found))
