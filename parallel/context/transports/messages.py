"""Messages between ranks, whose operations are made once and given other tensors in each pass.

To describe an operation to torch.distributed takes longer than to start it: ranks of the group are
looked up and arguments checked, each time with the same outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


class Messages:
    """Messages of this rank in a group.

    Attributes:
        rank: this process among the ranks of the group.
        num_ranks: processes of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._operations: dict[tuple[int, ...], list[dist.P2POp]] = {}
        """By peers, tags, and numbers of tensors: a few for each rank of the group."""

    def start(
        self,
        sent: Sequence[Tensor],
        to: int,
        received: Sequence[Tensor],
        source: int,
        first_tag: int,
    ) -> list[dist.Work]:
        """Send tensors to rank ``to`` of the group, and receive others from ``source``.

        Args:
            received: where they arrive, contiguous; either may have no tensors.
            first_tag: of the first tensor each way; the others have the next ones.
        """
        if not sent and not received:
            return []
        key = (to, len(sent), source, len(received), first_tag)
        operations = self._operations.get(key)
        if operations is None:
            operations = self._operations[key] = [
                dist.P2POp(call, x, group=self._group, tag=first_tag + place, group_peer=peer)
                for call, tensors, peer in ((dist.isend, sent, to), (dist.irecv, received, source))
                for place, x in enumerate(tensors)
            ]
        for operation, x in zip(operations, itertools.chain(sent, received), strict=True):
            operation.tensor = x
        try:
            works: list[dist.Work] = dist.batch_isend_irecv(operations)
        finally:
            for operation in operations:
                # What is kept is how to send, and not what.
                operation.tensor = None
        return works
