"""``parallel.shard_group=`` of fsdp and fsdp_torch, against one process on four batches."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from strategy_training import case_of, train_case, train_case_on_rank

from parallel.data.hybrid_sharding import hybrid_mesh

OPTIONS = {"fsdp": ("parallel.replicate_below=40",), "fsdp_torch": ()}
"""So small that matrices are divided, and norms are not."""


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_two_copies_end_where_one_process_does(name: str, group: int) -> None:
    options = (f"parallel.shard_group={group}", "parallel.dp=4", *OPTIONS[name])
    case = case_of(f"parallel={name}", *options)
    assert case.parallel.parameter_share == 1 / group
    wanted = train_case(case_of(), 0, 4)
    for found in on_ranks(4, train_case_on_rank, case):
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def neighbours(group: dist.ProcessGroup, shards: int, cp: int, tp: int) -> list[list[int]]:
    """Ranks that share a copy with this one, and those that hold the same shard."""
    mesh = hybrid_mesh(shards, dp=4 // cp // tp, cp=cp, tp=tp)
    groups = [mesh.get_group(axis) for axis in ("shard", "replicate")]
    return [dist.get_process_group_ranks(found) for found in groups]


@pytest.mark.parametrize(
    ("shards", "cp", "tp", "wanted"),
    [
        (2, 1, 1, [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]),
        (2, 2, 1, [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]),
        # Ranks 0 and 1 split every weight: 0 and 2 hold the same part.
        (2, 1, 2, [[[0, 2], [0]], [[1, 3], [1]], [[0, 2], [2]], [[1, 3], [3]]]),
    ],
)
def test_neighbours_share_a_copy(shards: int, cp: int, tp: int, wanted: list[object]) -> None:
    assert on_ranks(4, neighbours, shards, cp, tp) == wanted


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_groups_of_other_sizes_are_refused(name: str, group: int) -> None:
    words = (
        f"parallel.shard_group={group}: must be at least 2 and divide the 4 ranks of "
        "parallel.dp=2 x parallel.cp=2"
    )
    with pytest.raises(ValueError, match=f"^{words}$"):
        case_of(
            f"parallel={name}", "parallel.dp=2", "parallel.cp=2", f"parallel.shard_group={group}"
        )
