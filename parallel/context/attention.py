"""Context-parallel attention as a backend: a layout, a transport of keys, and a kernel.

A subclass is one choice of ``attention=`` that trains on sequences split over ``parallel.cp``
ranks; ``attention.kernel=`` is any attention on one device that gives a log-sum-exp. On one
rank it is that kernel and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist

from kernels.backend import BACKENDS, Attention, AttentionBackend, DelegatedAttention
from kernels.backends.auto import choose
from kernels.problem import MASKS, AttentionProblem, AttentionSpec, Mask
from parallel.context import bound
from parallel.context.blocks import schedule
from parallel.context.blocks.layouts import Contiguous, Layout, ScoreBlock
from parallel.context.blocks.score_blocks import begins, hides_more
from parallel.context.memory.sizes import CallReader, CallSizes, LocalSizes
from parallel.context.memory.transports import (
    AllGatherMemory,
    HaloMemory,
    SendRecvMemory,
    SymmetricGatherMemory,
    SymmetricRingMemory,
    TransportMemoryFactory,
)
from parallel.context.memory.walk import PassMemory, Visits
from parallel.context.transports import factories

SYMMETRIC = "symmetric"
"""The transport that reads peers' memory directly."""


@dataclass(kw_only=True, slots=True)
class SequenceParallelAttention(DelegatedAttention):
    """The role of attending to sequences split over ranks; on a whole one it is its kernel."""

    role_in_words: ClassVar[str] = "splits sequences over ranks"

    kernel: str = "auto"
    """Attention on one device that computes each block of scores: any that gives its lse."""

    def __post_init__(self) -> None:
        if self.kernel not in BACKENDS:
            raise ValueError(
                f"attention.kernel={self.kernel}: no such kernel, one of {', '.join(kernels())}"
            )
        if not _attends_on_one_device(BACKENDS[self.kernel].target):
            raise ValueError(
                f"attention.kernel={self.kernel}: must be an attention on one device, such as "
                "flash_triton or sdpa_flash"
            )

    @property
    def on_one_device(self) -> Attention:
        """The backend that :attr:`kernel` names, with its preset options."""
        entry = BACKENDS[self.kernel]
        return entry.target(name=self.kernel, **entry.preset).role(Attention)

    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> contextlib.AbstractContextManager[bound.SplitAttention]:
        """This attention over the ranks of a group; all of them call it together."""
        raise self.unwritten("bind()")

    def layout(self, num_ranks: int) -> Layout:
        """The layout of sequences over ``num_ranks`` ranks."""
        raise self.unwritten("layout()")

    def kernel_of(self, problem: AttentionProblem) -> str:
        """The kernel that computes with a rank's own keys; for other blocks auto may differ."""
        raise self.unwritten("kernel_of()")

    def transport_of(self, problem: AttentionProblem) -> str:
        """The transport that brings keys of other ranks here, where an option leaves it open."""
        raise self.unwritten("transport_of()")

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Predicted peak bytes on one rank by category; None if not predicted."""
        if problem.cp == 1:
            return self.on_one_device.peak_memory(problem)
        return self.split_peak_memory(problem)

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """:meth:`peak_memory` of a problem on several ranks."""
        raise self.unwritten("split_peak_memory()")

    # On one device: the kernel itself, without anything around it.

    @property
    def gives_lse(self) -> bool:
        return self.on_one_device.gives_lse

    @property
    def compiles(self) -> bool:
        return self.on_one_device.compiles

    def version(self) -> str | None:
        return self.on_one_device.version()

    def libraries(self) -> tuple[str, ...]:
        return self.on_one_device.libraries()

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.cp == 1:
            return self.on_one_device.why_unsupported(problem)
        return self.why_not_split(problem)

    def takes_here(self, problem: AttentionProblem) -> frozenset[str]:
        return self.on_one_device.takes_here(problem) if problem.cp == 1 else self.takes

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        """:meth:`supports` of a problem on several ranks."""
        raise self.unwritten("why_not_split()")

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        return problem.cp == 1 and self.on_one_device.keeps_scores(problem)

    def rounds_scores(self, problem: AttentionProblem) -> bool:
        return self.on_one_device.rounds_scores(replace(problem, cp=1))

    def delegate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        *,
        with_lse: bool,
    ) -> Attention:
        return self.on_one_device


def kernels() -> list[str]:
    """Names of the backends that attend to whole sequences on one device."""
    return [entry.name for entry in BACKENDS if _attends_on_one_device(entry.target)]


def _attends_on_one_device(target: type[AttentionBackend]) -> bool:
    return issubclass(target, Attention) and not issubclass(target, SequenceParallelAttention)


@dataclass(kw_only=True, slots=True)
class TransportedAttention(SequenceParallelAttention):
    """Schemes with a choice of transports, of which one may read peers' memory directly."""

    transport: str = "auto"
    """How tokens travel; auto reads peers' memory directly where GPUs can, else sends messages."""

    transports: ClassVar[tuple[str, ...]]
    """Choices of :attr:`transport` beside auto, the one that runs everywhere first."""

    def __post_init__(self) -> None:
        SequenceParallelAttention.__post_init__(self)
        choices = ("auto", *self.transports)
        if self.transport not in choices:
            raise ValueError(
                f"attention.transport={self.transport}: must be one of {', '.join(choices)}"
            )

    def transport_of(self, problem: AttentionProblem) -> str:
        if self.transport != "auto":
            return self.transport
        direct = problem.device == "cuda" and why_not_symmetric(problem) is None
        return SYMMETRIC if direct else self.transports[0]

    def why_not_transport(self, problem: AttentionProblem) -> str | None:
        """None if the transport can be used here, else the reason in one line."""
        if self.transport_of(problem) != SYMMETRIC:
            return None
        return why_not_symmetric(problem)

    def predicted_symmetric(self, problem: AttentionProblem) -> bool:
        """Whether the transport is symmetric memory, without asking the devices.

        Predictions are made where no CUDA context should be.
        """
        if self.transport == "auto":
            return problem.device == "cuda"
        return self.transport == SYMMETRIC

    def reads_peers(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        """Whether the transport is symmetric memory, here."""
        if self.transport == "auto":
            return device.type == "cuda" and why_not_peers(group.size()) is None
        return self.transport == SYMMETRIC


@dataclass(kw_only=True, slots=True)
class ContextParallelAttention(TransportedAttention):
    """The project's own schemes: one forward and one backward loop, whatever the layout."""

    transport: str = "auto"
    """How keys travel; auto reads peers' memory directly where GPUs can, else sends messages."""

    layout_type: ClassVar[type[Layout]]
    gathers: ClassVar[bool] = False
    """Whether all keys are brought here at once, in the order of their positions."""
    needs_causal: ClassVar[bool] = False
    """Whether the layout exists only to balance a causal mask."""
    takes: ClassVar[frozenset[str]] = frozenset(MASKS)
    """Of the whole sequence; blocks of it ask the kernel for shifts besides."""

    def layout(self, num_ranks: int) -> Layout:
        # One rank has nothing to balance, and so nothing to pad.
        layout_type = self.layout_type if num_ranks > 1 else Contiguous
        return layout_type(num_ranks=num_ranks)

    def choice(self, problem: AttentionProblem) -> str:
        if problem.cp == 1:
            return self.on_one_device.choice(problem)
        found = {"kernel": self.kernel_of(problem), "transport": self.transport_of(problem)}
        if found == {"kernel": self.kernel, "transport": self.transport}:
            return self.name
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in found.items())})"

    def kernel_of(self, problem: AttentionProblem) -> str:
        local = self.layout(problem.cp).local_len(problem.q_len)
        own = replace(problem, cp=1, q_len=local, kv_len=local, sinks=False)
        return choose(own, with_lse=True).name if self.kernel == "auto" else self.kernel

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        layout = self.layout(problem.cp)
        if self.needs_causal and not problem.causal:
            return f"{layout.name} balances a causal mask; without one use ring or llama3"
        if problem.q_len != problem.kv_len:
            return "queries and keys of a split sequence are the same tokens, equally many"
        if not problem.causal and problem.q_len % layout.multiple:
            return (
                f"{problem.q_len} tokens do not divide by {layout.multiple}, and without a causal "
                "mask the padding would be attended to"
            )
        return (
            self.why_not_transport(problem)
            or why_not_prefix(problem, layout)
            or self._why_not_kernel(problem)
        )

    def _why_not_kernel(self, problem: AttentionProblem) -> str | None:
        kernel = self.on_one_device
        if not kernel.gives_lse:
            return (
                f"attention.kernel={self.kernel} gives no log-sum-exp, by which the results of "
                "blocks of keys are merged"
            )
        for q_len, kv_len, mask in self._shapes(problem):
            reason = kernel.why_unsupported(part_of(problem, q_len, kv_len, mask))
            if reason is not None:
                return f"attention.kernel={self.kernel}: {reason}"
        return None

    def _shapes(self, problem: AttentionProblem) -> set[tuple[int, int, Mask]]:
        """Queries, keys and mask of all kernel calls; of a packed batch, its longest sequence's."""
        layout, ranks = self.layout(problem.cp), range(problem.cp)
        local, mask = layout.local_len(problem.q_len), problem.mask
        if not self.gathers:
            found = [b for r in ranks for s in ranks for b in layout.blocks(r, s, local, mask)]
            return {(b.q_len, b.kv_len, b.mask) for b in found}
        blocks = [b for r in ranks for b in layout.gathered_blocks(r, local, mask)]
        if problem.packed:
            return {(b.q_len, b.kv_len, b.mask) for b in blocks}
        # A dense rectangle that the kernel refuses is computed in two parts.
        return {(b.q_len, b.q_len if b.mask.is_plain else b.kv_len, b.mask) for b in blocks}

    def split_peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Of the fullest rank, by :mod:`parallel.context.memory`."""
        sizes = LocalSizes(problem=problem, layout=self.layout(problem.cp))
        memory = PassMemory(
            sizes=sizes,
            kernel=self.on_one_device,
            transport=self._transport_memory(problem),
            keys_in_turn=not self.gathers,
        )
        reader = CallReader(sizes=sizes, kernel=self.on_one_device)
        peaks = (memory.peak(self._visits(reader, rank)) for rank in range(problem.cp))
        return max(peaks, key=lambda parts: sum(parts.values()))

    def _visits(self, reader: CallReader, rank: int) -> Visits:
        """The kernel calls of a rank, as the passes make them."""
        raise self.unwritten("_visits()")

    def _transport_memory(self, problem: AttentionProblem) -> TransportMemoryFactory:
        """The memory of the transport that a problem has."""
        raise self.unwritten("_transport_memory()")

    @contextlib.contextmanager
    def bind(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> Iterator[bound.SplitAttention]:
        yield bound.BoundAttention(
            kernel=self.on_one_device,
            layout=self.layout(group.size()),
            group=group,
            transports=self._transport_factory(group, device),
            gathers=self.gathers,
            fusion=self._fusion(),
        )

    def _fusion(self) -> bound.Fusion:
        return bound.Fusion()

    def _transport_factory(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> factories.TransportFactory:
        """Makes the transport of each pass; buffers that peers read outlive a pass."""
        raise self.unwritten("_transport_factory()")


@dataclass(kw_only=True, slots=True)
class RingAttention(ContextParallelAttention):
    """Keys visit one rank after another: little memory, and transfers hide behind computing."""

    transports: ClassVar[tuple[str, ...]] = ("send_recv", "symmetric")

    def _visits(self, reader: CallReader, rank: int) -> Visits:
        sizes, problem = reader.sizes, reader.sizes.problem
        found = []
        for step in range(problem.cp):
            source = (rank - step) % problem.cp
            blocks = sizes.layout.blocks(rank, source, sizes.local_len, problem.mask)
            firsts = begins(blocks) if step == 0 else [False] * len(blocks)
            found.append(
                [
                    reader.read([block], all_keys=False, first=first)
                    for block, first in zip(blocks, firsts, strict=True)
                ]
            )
        return found

    def _transport_memory(self, problem: AttentionProblem) -> TransportMemoryFactory:
        symmetric = self.predicted_symmetric(problem)
        if not hides_more(problem.mask, self.layout(problem.cp).padded(problem.q_len)).is_plain:
            return functools.partial(HaloMemory, published=symmetric)
        return SymmetricRingMemory if symmetric else SendRecvMemory

    def _transport_factory(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> factories.TransportFactory:
        if self.reads_peers(group, device):
            return factories.symmetric_ring(group, device)
        return factories.send_recv(group, device)


@dataclass(kw_only=True, slots=True)
class GatherAttention(ContextParallelAttention):
    """All keys are gathered, then attended to: few kernel calls, and memory for all keys."""

    kv_heads_at_once: int = 0
    """KV heads to gather at a time, which bounds the memory; 0 is all of them."""

    gathers: ClassVar[bool] = True
    transports: ClassVar[tuple[str, ...]] = ("all_gather", "symmetric")

    def __post_init__(self) -> None:
        ContextParallelAttention.__post_init__(self)
        if self.kv_heads_at_once < 0:
            raise ValueError(
                f"attention.kv_heads_at_once={self.kv_heads_at_once}: must be 0 (all) or more"
            )

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        if self.kv_heads_at_once and problem.num_kv_heads % self.kv_heads_at_once:
            return (
                f"attention.kv_heads_at_once={self.kv_heads_at_once}: must divide the "
                f"{problem.num_kv_heads} KV heads"
            )
        return ContextParallelAttention.why_not_split(self, problem)

    def _visits(self, reader: CallReader, rank: int) -> Visits:
        sizes, problem = reader.sizes, reader.sizes.problem
        blocks = sizes.layout.gathered_blocks(rank, sizes.local_len, problem.mask)
        num_groups = problem.num_kv_heads // (self.kv_heads_at_once or problem.num_kv_heads)
        return [self._calls(reader, blocks, num_groups)] * num_groups

    def _calls(
        self, reader: CallReader, blocks: list[ScoreBlock], num_groups: int
    ) -> list[CallSizes]:
        """The calls of one visit, which has some heads of the keys of all ranks."""
        read = functools.partial(reader.read, all_keys=True, num_groups=num_groups)
        if reader.sizes.problem.packed:
            joined = [blocks] if self._fusion().backward else [[block] for block in blocks]
            return [read(group, first=True) for group in joined]
        return [
            read([part], first=index == 0)
            for block in blocks
            for index, part in enumerate(schedule.cut(block, self._takes_rectangle))
        ]

    def _takes_rectangle(self, q_len: int, kv_len: int) -> bool:
        return self.on_one_device.takes_causal_rectangles

    def _transport_memory(self, problem: AttentionProblem) -> TransportMemoryFactory:
        kind = SymmetricGatherMemory if self.predicted_symmetric(problem) else AllGatherMemory
        return functools.partial(kind, kv_heads_at_once=self.kv_heads_at_once)

    def _transport_factory(
        self, group: dist.ProcessGroup, device: torch.device
    ) -> factories.TransportFactory:
        heads = self.kv_heads_at_once or None
        if self.reads_peers(group, device):
            return factories.symmetric_gather(group, device, heads)
        return factories.all_gather(group, device, heads)


def part_of(problem: AttentionProblem, q_len: int, kv_len: int, mask: Mask) -> AttentionProblem:
    """One kernel call for a split problem, in which sinks are put afterwards."""
    return replace(
        problem,
        cp=1,
        q_len=q_len,
        kv_len=kv_len,
        causal=mask.causal,
        window=mask.window,
        prefix_len=mask.prefix_len,
        shift=mask.shift,
        sinks=False,
    )


def why_not_prefix(problem: AttentionProblem, layout: Layout) -> str | None:
    """None unless a prefix shows the padding of a dense batch, else the reason in one line."""
    length = problem.q_len
    if problem.packed or problem.prefix_len <= length or length % layout.multiple == 0:
        return None
    return (
        f"attention.prefix_len={problem.prefix_len}: must be at most the {length} tokens of a "
        f"sequence, since they do not divide by {layout.multiple} and padding would be seen"
    )


def why_not_symmetric(problem: AttentionProblem) -> str | None:
    """None if ranks can read each other's memory, else the reason in one line."""
    return None if problem.device == "cpu" else why_not_peers(problem.cp)


def why_not_peers(num_ranks: int) -> str | None:
    """None if this host has ``num_ranks`` CUDA devices that reach each other's memory."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    count = torch.cuda.device_count()
    if count < num_ranks:
        return (
            f"attention.transport=symmetric needs all {num_ranks} ranks on one host, "
            f"which has {count} CUDA devices"
        )
    for device in range(num_ranks):
        for peer in range(num_ranks):
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return (
                    f"attention.transport=symmetric: device {device} cannot read the memory of "
                    f"device {peer}"
                )
    return None
