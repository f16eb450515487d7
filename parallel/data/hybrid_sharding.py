"""Averages of hybrid sharding: over a group that shares out weights, and over such groups.

A gradient is reduce-scattered in the group of this rank, such as the GPUs of one host, and the
shard that arrives is all-reduced over the ranks that hold it in other groups: links between hosts
carry one shard a rank (Zhao et al., "PyTorch FSDP", 2023, section 3.2.2).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from parallel.data.gradients import Averager


class HybridAverager(Averager):
    """Starts the second average behind the first: the current stream waits, or a CPU's process."""

    def __init__(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._over_replicas = Averager(replicas)

    def start(self, tensor: Tensor, received: Tensor | None = None) -> dist.Work:
        super().start(tensor, received).wait()
        return self._over_replicas.start(tensor if received is None else received)
