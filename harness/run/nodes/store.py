"""torch.distributed's store of a group of workers, on one address.

By itself torch's TCPStore listens on all addresses of rank 0's host. It knows no secret: whoever
reaches its port can read and change what the ranks tell each other of their addresses, or join
them in a rank's place. ``docs/trust.md`` says what follows.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from harness.run.nodes.address import listen


def group_arguments(
    rendezvous: str, *, rank: int, world_size: int, timeout: timedelta
) -> dict[str, Any]:
    """The arguments of ``init_process_group`` that say where the ranks of a group meet."""
    arguments = {"rank": rank, "world_size": world_size, "timeout": timeout}
    where = urlsplit(rendezvous)
    if where.scheme != "tcp":
        return arguments | {"init_method": rendezvous}
    assert where.hostname is not None
    assert where.port is not None, "the leader has chosen one"
    listener = listen(where.hostname, where.port) if rank == 0 else None
    store = dist.TCPStore(
        where.hostname,
        where.port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    return arguments | {"store": store}
