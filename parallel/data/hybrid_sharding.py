"""Averages of hybrid sharding: over a group that shares out weights, and over such groups.

A gradient is reduce-scattered in the group of this rank, such as the GPUs of one host, and the
shard that arrives is all-reduced over the ranks that hold it in other groups: links between hosts
carry one shard a rank (Zhao et al., "PyTorch FSDP", 2023, section 3.2.2).
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from parallel.data.gradients import Averager
from parallel.mesh import require_world

SHARD, REPLICATE = "shard", "replicate"
"""Names of the mesh axes whose ranks share out one copy of the weights, and hold equal shards."""


def hybrid_mesh(shard_group: int, *, dp: int, cp: int, tp: int) -> DeviceMesh:
    """The world's mesh of axes replicate, shard and tp; all ranks call it together.

    Neighbours among the ranks of the axes dp and cp share out a copy, ``shard_group`` at a time,
    so that copies lie inside hosts. Made once for each shape in the life of a world.

    Raises:
        ValueError: the world has another number of ranks than dp x cp x tp.
    """
    require_world(dp, cp, tp)
    return _mesh(id(dist.group.WORLD), dp * cp // shard_group, shard_group, tp)


@cache
def _mesh(world: int, copies: int, shards: int, tp: int) -> DeviceMesh:
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(
        device_type, (copies, shards, tp), mesh_dim_names=(REPLICATE, SHARD, "tp")
    )


class HybridAverager(Averager):
    """Starts the second average behind the first: the current stream waits, or a CPU's process."""

    def __init__(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._over_replicas = Averager(replicas)

    def start(self, tensor: Tensor, received: Tensor | None = None) -> dist.Work:
        super().start(tensor, received).wait()
        return self._over_replicas.start(tensor if received is None else received)
