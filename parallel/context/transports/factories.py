"""Factories of transports: a new transport for each pass, and buffers that outlive the passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.loops import Transport
from parallel.context.blocks.schedule import RankSchedule
from parallel.context.blocks.tracing import Tracer
from parallel.context.transports.all_gather import AllGather
from parallel.context.transports.messages import Messages
from parallel.context.transports.peer_memory import PeerBuffers
from parallel.context.transports.send_recv import SendRecv
from parallel.context.transports.symmetric import SymmetricRing, reserve_for_ring
from parallel.context.transports.symmetric_gather import GatherMemory, SymmetricGather


@dataclass(kw_only=True, slots=True, frozen=True)
class TransportFactory:
    """Makes a transport for each pass over keys, and keeps buffers between passes."""

    make: Callable[[Tracer], Transport]
    buffers: PeerBuffers | None = None
    """Memory that peers read, if the transport reads peers' memory."""
    reserve: Callable[[Tensor, RankSchedule, bool], None] | None = None
    """Makes the buffers of a schedule's passes over keys like these, with gradients or without."""


def send_recv(group: dist.ProcessGroup, device: torch.device) -> TransportFactory:
    """Messages around the ring."""
    messages = Messages(group)
    return TransportFactory(make=lambda tracer: SendRecv(messages, tracer))


def symmetric_ring(group: dist.ProcessGroup, device: torch.device) -> TransportFactory:
    """One rank's keys after another's, read from its memory."""
    buffers = PeerBuffers(group, device)
    return TransportFactory(
        make=lambda tracer: SymmetricRing(group, device, buffers, tracer),
        buffers=buffers,
        reserve=lambda k, schedule, trained: reserve_for_ring(
            buffers, k, schedule, trained=trained
        ),
    )


def all_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> TransportFactory:
    """Collectives."""
    return TransportFactory(make=lambda tracer: AllGather(group, tracer, heads_at_once))


def symmetric_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> TransportFactory:
    """All ranks' keys, read from their memory."""
    memory = GatherMemory(group, device)
    return TransportFactory(
        make=lambda tracer: SymmetricGather(memory, tracer, heads_at_once),
        buffers=memory.buffers,
    )
