"""The mesh of data-parallel, context-parallel and tensor-parallel ranks, and its groups.

Rank r of the world is number r mod tp on the tensor-parallel axis, (r div tp) mod cp on the
context-parallel one and r div (tp cp) on the data-parallel one. The ranks of one weight are
neighbours, since they exchange activations in every layer; those of one sequence come next.

Weights are equal over the axes dp and cp, which together are called ``data`` here: gradients
are averaged over them, and optimizer state and weights may be sharded over them.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("dp", "cp", "tp")

DATA = "data"
"""Name of the axis that dp and cp make when they are taken for one."""


def device_mesh(dp: int, cp: int, tp: int) -> DeviceMesh:
    """The mesh of the world, with axes dp, cp and tp; all ranks call it together.

    Made once for each shape in the life of a world, since making groups is a collective
    operation and they are never given back.

    Raises:
        ValueError: the world has another number of ranks.
    """
    require_world(dp, cp, tp)
    return _device_mesh(id(dist.group.WORLD), dp, cp, tp)


def data_mesh(dp: int, cp: int, tp: int) -> DeviceMesh:
    """The ranks that hold the same weights as this one, as a mesh of one axis."""
    return device_mesh(dp, cp, tp)["dp", "cp"]._flatten(DATA)


def data_group(dp: int, cp: int, tp: int) -> dist.ProcessGroup:
    """The ranks that hold the same weights as this one: of all batches and parts of sequences."""
    require_world(dp, cp, tp)
    # A group of the whole world is the world's own: a second would have a second communicator.
    return _world() if tp == 1 else data_mesh(dp, cp, tp).get_group()


def cp_group(dp: int, cp: int, tp: int) -> dist.ProcessGroup:
    """The ranks that hold parts of this rank's sequences, with the same weights."""
    require_world(dp, cp, tp)
    return _world() if dp == tp == 1 else device_mesh(dp, cp, tp).get_group("cp")


def require_world(dp: int, cp: int, tp: int) -> None:
    """Raise ValueError, in one line, unless a mesh has as many ranks as the world."""
    if not dist.is_initialized():
        raise ValueError(
            f"parallel.dp={dp} x parallel.cp={cp} x parallel.tp={tp}: needs a process group; call "
            "torch.distributed.init_process_group() first"
        )
    if dp * cp * tp != dist.get_world_size():
        raise ValueError(
            f"parallel.dp={dp} x parallel.cp={cp} x parallel.tp={tp}: makes {dp * cp * tp} ranks, "
            f"and the world has {dist.get_world_size()}"
        )


@cache
def _device_mesh(world: int, dp: int, cp: int, tp: int) -> DeviceMesh:
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, (dp, cp, tp), mesh_dim_names=AXES)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "require_world() came first"
    return world
