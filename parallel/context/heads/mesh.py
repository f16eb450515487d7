"""A mesh of ranks: neighbours exchange heads, and ranks of equal place in them form rings.

Rank r of P is number r mod u of group r div u, where u ranks exchange heads; a ring joins the
ranks of one number over all P/u groups (USP, Fang and Zhao 2024; LoongTrain, Gu et al. 2024, calls
it head-first placement). Neighbours, whose links are the fastest, exchange what nothing hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadMesh:
    """This rank's two process groups."""

    inner: dist.ProcessGroup
    """The neighbours with which it exchanges heads."""
    ring: dist.ProcessGroup
    """The ranks of its own number in every group, in the order of the groups."""


@contextlib.contextmanager
def head_mesh(
    group: dist.ProcessGroup, inner_degree: int, device: torch.device
) -> Iterator[HeadMesh]:
    """The mesh of a group, released at the end; all ranks of the group call it together.

    Args:
        inner_degree: how many neighbours exchange heads; divides the size of the group.
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    first, place = rank - rank % inner_degree, rank % inner_degree
    serial = _times_called(group, rank)
    inner = _subgroup(group, range(first, first + inner_degree), f"heads-{serial}", device)
    ring = _subgroup(group, range(place, num_ranks, inner_degree), f"ring-{serial}", device)
    try:
        yield HeadMesh(inner=inner, ring=ring)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except BaseException:
        # Other ranks may wait in an exchange for ever, and this one would wait for them.
        for made in (inner, ring):
            made.abort()
        raise
    finally:
        for made in (inner, ring):
            dist.destroy_process_group(made)


def _times_called(group: dist.ProcessGroup, rank: int) -> int:
    """How often this rank has asked, equal on all ranks of the group."""
    store = distributed_c10d._get_process_group_store(group)
    return int(store.add(f"head_mesh/{rank}", 1))


def _subgroup(
    group: dist.ProcessGroup, ranks: range, purpose: str, device: torch.device
) -> dist.ProcessGroup:
    """A group of some ranks of a group, which these make without the others.

    ``torch.distributed.new_group`` must be called by the whole world, or names a group by how many
    there are in the process: other ranks may have others, and a name that comes again finds the
    addresses of a group that is gone. This name is of the ranks and of this occasion alone.
    """
    members = [dist.get_global_rank(group, rank) for rank in ranks]
    made, _ = distributed_c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        dist.Backend(dist.get_backend(group)),
        distributed_c10d._get_process_group_store(group),
        distributed_c10d.GroupName(f"{group.group_name}/{purpose}/{ranks.start}"),
        timeout=group._get_backend(device).options._timeout,
    )
    distributed_c10d._world.pg_group_ranks[made] = {
        member: number for number, member in enumerate(members)
    }
    return made
