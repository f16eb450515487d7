"""Balance of heads: FLOPs of attention on ranks that exchange sequences for heads.

Ranks of a group attend to one part of an outer layout, in some of the heads each, so that a rank
computes the scores of its group's part times its share of the query heads
(:class:`~parallel.context.heads.split.HeadSplit`). Where one group holds whole sequences, any mask
is balanced as evenly as ranks divide the heads.
"""

from __future__ import annotations

from dataclasses import replace

from parallel.context.blocks.balance import COUNTS, Balance
from parallel.context.heads.split import HeadSplit


def share_by_heads(by_group: Balance, split: HeadSplit) -> Balance:
    """The balance of all ranks from that of the groups, in all heads.

    Args:
        by_group: counts over the groups, each of ``split.num_ranks`` neighbouring ranks.
    """
    shares = [len(split.q_heads(place)) / split.num_heads for place in range(split.num_ranks)]
    return replace(
        by_group,
        **{
            count: [
                [flops * share for flops in of_group]
                for of_group in getattr(by_group, count)
                for share in shares
            ]
            for count in COUNTS
        },
    )
