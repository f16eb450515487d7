"""Heads exchanged inside groups of ranks, and keys that travel from group to group.

A rank's group holds one part of every sequence. After the exchange a rank has all of that part in
some of the heads, and attends by a ring that it forms with the ranks of the same heads in the
other groups.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Attention, AttentionSpec, Packing
from parallel.context.blocks.kept import Kept
from parallel.context.blocks.layouts import Contiguous
from parallel.context.blocks.tracing import COMPUTE, Tracer
from parallel.context.bound import SplitAttention
from parallel.context.heads.agreement import Agreements, facts_of_call, kind_of_call
from parallel.context.heads.exchange import HeadTransport
from parallel.context.heads.head_attention import HeadAttention
from parallel.context.heads.mesh import HeadMesh
from parallel.context.heads.nested import Nested
from parallel.context.heads.sequences import HEAD_DIM
from parallel.context.heads.split import HeadSplit, shapes_of_pieces


class GroupAttention(SplitAttention):
    """Attention over a mesh of ranks.

    Args:
        ring: attention of a rank's group over the groups, bound to ``mesh.ring``.
        group: all ranks of the mesh.
        transport: how the ranks of ``mesh.inner`` exchange heads.
        num_groups: groups of heads that a rank attends with one after another, while the others
            are exchanged.
    """

    def __init__(
        self,
        ring: SplitAttention,
        layout: Nested,
        mesh: HeadMesh,
        group: dist.ProcessGroup,
        transport: HeadTransport,
        num_groups: int,
    ) -> None:
        super().__init__(layout, group)
        self._inner = Contiguous(num_ranks=layout.inner_degree)
        self._ring, self._num_groups = ring, num_groups
        kernel = _RingKernel(name="ring", ring=ring)
        self._heads = HeadAttention(kernel, self._inner, mesh.inner, transport, num_groups)
        self._packings: Kept[tuple[str, _GroupPacking | None]] = Kept()
        self._agreements = Agreements(group)
        # As a decorator it would import torch._dynamo with this module, in more than a second.
        self.attend = torch.compiler.disable(self.attend)  # type: ignore[method-assign]

    @property
    def outside_bytes(self) -> int:
        return self._ring.outside_bytes + self._heads.outside_bytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention over all ranks of the group.

        Raises ValueError on all ranks if they differ in shape, dtype or packing, or the packing
        does not fit one of them; looked at for each new shape and packing.
        """
        return self._heads.attend(q, k, v, self._prepared((q, k, v), spec))

    def attend_with_lse(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor] | None:
        with torch.no_grad():
            return self._heads.attend_with_lse(q, k, v, self._prepared((q, k, v), spec))

    def _prepared(self, tensors: tuple[Tensor, ...], spec: AttentionSpec) -> AttentionSpec:
        """The call as a group sees it, when all ranks are known to make the same one."""
        self._ring.tracer = self.tracer
        self._heads.tracer = _WithoutComputing(self.tracer)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        key = (trained, *kind_of_call(tensors, spec))
        found = self._packings.get(key, tensors[0].device)
        if found is None:
            # An evaluation may come first, and its inference tensors are no part of a graph.
            with torch.inference_mode(False):
                found = self._agreed_packing(tensors, spec)
                called = spec if found[1] is None else replace(spec, packing=found[1])
                self._ring.reserve(self._largest_keys(tensors), _of_whole(called), trained=trained)
            starts = None if spec.packing is None else spec.packing.cu_seqlens_q
            self._packings.put(key, found, starts)
        else:
            self._agreements.repeat(found[0])
        packing = found[1]
        return spec if packing is None else replace(spec, packing=packing)

    def _largest_keys(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """The form of the keys in the ring's call of most heads, on any rank.

        PyTorch numbers what a process shares over all its groups and hangs where the numbers of
        ranks differ, so that rings of different heads may not make their memory one by one.
        """
        q, k, _ = tensors
        split = HeadSplit(
            num_ranks=self._inner.num_ranks,
            num_heads=q.shape[HEAD_DIM],
            num_kv_heads=k.shape[HEAD_DIM],
        )
        pieces = shapes_of_pieces(split.in_groups(self._num_groups))
        shape = list(k.shape)
        shape[HEAD_DIM] = max(num_kv_heads for _, num_kv_heads in pieces)
        # Of [B, H, S, D] and of [T, H, D]: a group has the tokens of all its ranks.
        shape[2 if k.dim() == 4 else 0] *= self._inner.num_ranks
        return torch.empty(shape, dtype=k.dtype, device="meta")

    def _agreed_packing(
        self, tensors: tuple[Tensor, ...], spec: AttentionSpec
    ) -> tuple[str, _GroupPacking | None]:
        """What ranks have agreed on, in words, and the packing of a group's parts."""
        facts, device = facts_of_call(tensors, spec), tensors[0].device
        if spec.packing is None:
            self._agreements.require(device, facts)
            return facts, None
        starts = spec.packing.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in itertools.pairwise(starts)]
        complaint = self._complaint(tensors, lengths, spec)
        facts = f"{facts}, lengths {lengths}"
        self._agreements.require(device, facts, complaint)
        return facts, self._group_packing(lengths, device)

    def _group_packing(self, lengths: Sequence[int], device: torch.device) -> _GroupPacking:
        whole = _packing([self.layout.padded(length) for length in lengths], device)
        group = _packing(
            [self.layout.local_len(length) * self._inner.num_ranks for length in lengths], device
        )
        return _GroupPacking(
            cu_seqlens_q=group.cu_seqlens_q,
            cu_seqlens_k=group.cu_seqlens_k,
            max_q_len=group.max_q_len,
            max_kv_len=group.max_kv_len,
            whole=whole,
        )

    def _complaint(
        self, tensors: tuple[Tensor, ...], lengths: Sequence[int], spec: AttentionSpec
    ) -> str | None:
        expected = sum(map(self.layout.local_len, lengths))
        found = [x.shape[0] for x in tensors]
        if found != [expected] * len(found):
            return (
                f"q, k and v have {', '.join(map(str, found))} tokens; its part of sequences of "
                f"{', '.join(map(str, lengths))} has {expected}: lengths are those of whole "
                "sequences"
            )
        uneven = [length for length in lengths if length % self.layout.multiple]
        if uneven and not spec.causal:
            return (
                f"a sequence of {uneven[0]} tokens does not divide by {self.layout.multiple}, and "
                "without a causal mask the padding would be attended to"
            )
        if uneven and min(uneven) < spec.prefix_len:
            return (
                f"a sequence of {min(uneven)} tokens does not divide by {self.layout.multiple}, "
                f"and prefix_len={spec.prefix_len} would show its padding"
            )
        return None


@dataclass(kw_only=True, slots=True, frozen=True)
class _GroupPacking(Packing):
    """The parts of a batch's sequences that a group holds, with their padding."""

    whole: Packing
    """The whole sequences, with their padding."""


def _packing(lengths: Sequence[int], device: torch.device) -> Packing:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)


@dataclass(kw_only=True, slots=True)
class _RingKernel(Attention):
    """The attention that a group's exchange is made for: over the keys of all groups."""

    ring: SplitAttention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        return self.ring.attend(q, k, v, _of_whole(spec))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        found = self.ring.attend_with_lse(q, k, v, replace(_of_whole(spec), sinks=None))
        assert found is not None, "a ring merges by the lse"
        return found


def _of_whole(spec: AttentionSpec) -> AttentionSpec:
    """The call as the ring sees it."""
    if spec.packing is None:
        return spec
    assert isinstance(spec.packing, _GroupPacking), "GroupAttention made it"
    return replace(spec, packing=spec.packing.whole)


class _WithoutComputing(Tracer):
    """Leaves the spans of computing to the ring, which also waits between its kernel calls."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def span(self, kind: str, step: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if kind == COMPUTE else self._tracer.span(kind, step)

    def sent(self, num_bytes: int) -> None:
        self._tracer.sent(num_bytes)
