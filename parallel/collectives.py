"""Collective operations: their bandwidths as nccl-tests defines them, and one checked run of each.

Size S and time t give the algorithm bandwidth S/t. The bus bandwidth multiplies it by what each
link has to carry for a byte of S, so that it compares with the speed of the links whatever the
number of ranks n (nccl-tests, doc/PERFORMANCE.md):

    all_reduce       2(n-1)/n   S: the buffer of one rank
    all_gather        (n-1)/n   S: all ranks' data together, on every rank at the end
    reduce_scatter    (n-1)/n   S: all ranks' data together, on every rank at the start
    all_to_all        (n-1)/n   S: the buffer of one rank, which keeps one n-th of it
    broadcast               1   S: the buffer of one rank
    send_recv               1   S: the message of each rank to the next one, round a ring
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

LARGEST_VALUE = 7
"""Small integers, so that sums over 36 ranks are exact in every dtype, bfloat16 included."""


def bus_factor(collective: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    return _COLLECTIVES[collective].bus_factor(num_ranks)


def num_elements(num_bytes: float, element_bytes: int, num_ranks: int) -> int:
    """Elements of size S: the most that fit into ``num_bytes`` and divide among the ranks."""
    return int(num_bytes) // element_bytes // num_ranks * num_ranks


@dataclass(kw_only=True, slots=True)
class CheckedCollective:
    """One collective operation with its buffers, ready to run again and again.

    ``reset`` restores the buffers, ``run`` communicates, and ``wrong_elements`` counts the wrong
    elements of this rank's result.
    """

    reset: Callable[[], None]
    run: Callable[[], None]
    wrong_elements: Callable[[], int]


@dataclass(kw_only=True, slots=True)
class CollectiveData:
    """The data that ranks start with; every rank can compute that of all others."""

    group: dist.ProcessGroup
    num_elements: int
    """Elements of size S, as the module defines it; a multiple of the ranks."""
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    @property
    def part(self) -> slice:
        """This rank's n-th of size S."""
        length = self.num_elements // self.num_ranks
        return slice(self.rank * length, (self.rank + 1) * length)

    def of_rank(self, rank: int) -> torch.Tensor:
        """The data of ``rank`` at the start, [num_elements]."""
        generator = torch.Generator(self.device).manual_seed(self.seed + rank)
        values = torch.randint(
            LARGEST_VALUE + 1, (self.num_elements,), generator=generator, device=self.device
        )
        return values.to(self.dtype)

    def total(self) -> torch.Tensor:
        """The sum of all ranks' data."""
        total = self.of_rank(0)
        for rank in range(1, self.num_ranks):
            total += self.of_rank(rank)
        return total


def make_collective(collective: str, data: CollectiveData) -> CheckedCollective:
    """The operation named ``collective``, with its buffers."""
    return _COLLECTIVES[collective].make(data)


def _all_reduce(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)
    buffer = source.clone()

    def run() -> None:
        dist.all_reduce(buffer, group=data.group)

    return CheckedCollective(
        # Sums of sums would grow until they are infinite.
        reset=lambda: _copy(source, buffer),
        run=run,
        wrong_elements=lambda: _differing(buffer, data.total()),
    )


def _broadcast(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)
    buffer = source.clone()

    def run() -> None:
        dist.broadcast(buffer, group=data.group, group_src=0)

    return CheckedCollective(
        reset=lambda: _copy(source, buffer),
        run=run,
        wrong_elements=lambda: _differing(buffer, data.of_rank(0)),
    )


def _all_gather(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)[data.part].clone()
    result = torch.full((data.num_elements,), -1, dtype=data.dtype, device=data.device)

    def run() -> None:
        dist.all_gather_into_tensor(result, source, group=data.group)

    def wrong() -> int:
        return sum(
            _differing(part, data.of_rank(rank).chunk(data.num_ranks)[rank])
            for rank, part in enumerate(result.chunk(data.num_ranks))
        )

    return CheckedCollective(reset=lambda: _spoil(result), run=run, wrong_elements=wrong)


def _reduce_scatter(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)
    result = torch.full_like(source[data.part], -1)

    def run() -> None:
        dist.reduce_scatter_tensor(result, source, group=data.group)

    return CheckedCollective(
        reset=lambda: _spoil(result),
        run=run,
        wrong_elements=lambda: _differing(result, data.total()[data.part]),
    )


def _all_to_all(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)
    result = torch.full_like(source, -1)

    def run() -> None:
        dist.all_to_all_single(result, source, group=data.group)

    def wrong() -> int:
        return sum(
            _differing(part, data.of_rank(rank)[data.part])
            for rank, part in enumerate(result.chunk(data.num_ranks))
        )

    return CheckedCollective(reset=lambda: _spoil(result), run=run, wrong_elements=wrong)


def _send_recv(data: CollectiveData) -> CheckedCollective:
    source = data.of_rank(data.rank)
    result = torch.full_like(source, -1)
    following = (data.rank + 1) % data.num_ranks
    before = (data.rank - 1) % data.num_ranks

    def run() -> None:
        group = data.group
        send = dist.P2POp(dist.isend, source, group=group, group_peer=following)
        receive = dist.P2POp(dist.irecv, result, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return CheckedCollective(
        reset=lambda: _spoil(result),
        run=run,
        wrong_elements=lambda: _differing(result, data.of_rank(before)),
    )


def _both_ways(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def _one_way(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _whole(num_ranks: int) -> float:
    return 1.0


@dataclass(slots=True, frozen=True)
class _Collective:
    bus_factor: Callable[[int], float]
    make: Callable[[CollectiveData], CheckedCollective]


_COLLECTIVES = {
    "all_reduce": _Collective(_both_ways, _all_reduce),
    "all_gather": _Collective(_one_way, _all_gather),
    "reduce_scatter": _Collective(_one_way, _reduce_scatter),
    "broadcast": _Collective(_whole, _broadcast),
    "all_to_all": _Collective(_one_way, _all_to_all),
    "send_recv": _Collective(_whole, _send_recv),
}

COLLECTIVES = tuple(_COLLECTIVES)


def _copy(source: torch.Tensor, buffer: torch.Tensor) -> None:
    buffer.copy_(source)


def _spoil(result: torch.Tensor) -> None:
    """Fill with a value of no rank's data, so that a missing element counts as wrong."""
    result.fill_(-1)


def _differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    return int((found != wanted).sum())
