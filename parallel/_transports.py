"""How to make the transports that ``attention.transport=`` chooses among, one for each pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel._all_gather import AllGather
from parallel._loops import Transport
from parallel._peer_memory import PeerBuffers
from parallel._send_recv import SendRecv
from parallel._symmetric import SymmetricGather, SymmetricRing
from parallel._trace import Trace

MakeTransport = Callable[[Trace], Transport]


def send_recv(group: dist.ProcessGroup, device: torch.device) -> MakeTransport:
    """Messages around the ring."""
    return lambda trace: SendRecv(group, trace)


def symmetric_ring(group: dist.ProcessGroup, device: torch.device) -> MakeTransport:
    """One rank's keys after another's, read from its memory."""
    buffers = PeerBuffers(group, device)
    return lambda trace: SymmetricRing(group, device, buffers, trace)


def all_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> MakeTransport:
    """Collectives."""
    return lambda trace: AllGather(group, trace, heads_at_once)


def symmetric_gather(
    group: dist.ProcessGroup, device: torch.device, heads_at_once: int | None
) -> MakeTransport:
    """All ranks' keys, read from their memory."""
    buffers = PeerBuffers(group, device)
    return lambda trace: SymmetricGather(group, device, buffers, trace, heads_at_once)
