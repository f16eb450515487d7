"""The process groups of a mesh of data-parallel times context-parallel ranks.

Rank r of the world is number r mod cp on the context-parallel axis and r div cp on the
data-parallel one, so that the ranks of one sequence are neighbours.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist


def cp_group(dp: int, cp: int) -> dist.ProcessGroup:
    """The ranks that hold parts of this rank's sequences; all ranks of the world call it.

    Made once for each mesh in the life of a world, since making a group is a collective
    operation and groups are never given back.
    """
    world = dist.group.WORLD
    assert world is not None, "needs init_process_group"
    assert world.size() == dp * cp, "a mesh has as many ranks as the world"
    return world if dp == 1 else _cp_group(id(world), dp, cp)


@cache
def _cp_group(world: int, dp: int, cp: int) -> dist.ProcessGroup:
    rows = [list(range(start, start + cp)) for start in range(0, dp * cp, cp)]
    own, _ = dist.new_subgroups_by_enumeration(rows)
    assert own is not None, "every rank is in a row of the mesh"
    return own
