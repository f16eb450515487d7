"""How to make the transports that ``attention.transport=`` chooses among, one for each pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.context.blocks.loops import Transport
from parallel.context.blocks.trace import Trace
from parallel.context.transports.all_gather import AllGather
from parallel.context.transports.peer_memory import PeerBuffers
from parallel.context.transports.send_recv import SendRecv
from parallel.context.transports.symmetric import SymmetricGather, SymmetricRing


@dataclass(kw_only=True, slots=True, frozen=True)
class TransportMaker:
    """Makes a transport for each pass over keys, and keeps what outlives a pass."""

    make: Callable[[Trace], Transport]
    buffers: PeerBuffers | None = None
    """Memory that peers read, where they do."""


def send_recv(group: dist.ProcessGroup, device: torch.device) -> TransportMaker:
    """Messages around the ring."""
    return TransportMaker(make=lambda trace: SendRecv(group, trace))


def symmetric_ring(group: dist.ProcessGroup, device: torch.device) -> TransportMaker:
    """One rank's keys after another's, read from its memory."""
    buffers = PeerBuffers(group, device)
    return TransportMaker(
        make=lambda trace: SymmetricRing(group, device, buffers, trace), buffers=buffers
    )


def all_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> TransportMaker:
    """Collectives."""
    return TransportMaker(make=lambda trace: AllGather(group, trace, heads_at_once))


def symmetric_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> TransportMaker:
    """All ranks' keys, read from their memory."""
    buffers = PeerBuffers(group, device)
    return TransportMaker(
        make=lambda trace: SymmetricGather(group, device, buffers, trace, heads_at_once),
        buffers=buffers,
    )
