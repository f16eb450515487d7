"""Collective operations: what each moves, and the bandwidths that nccl-tests defines for it.

Size S and time t give the algorithm bandwidth S/t. The bus bandwidth multiplies it by what each
link has to carry for a byte of S, so that it compares with the speed of the links whatever the
number of ranks n (nccl-tests, doc/PERFORMANCE.md):

    all_reduce       2(n-1)/n   S: the buffer of one rank
    all_gather        (n-1)/n   S: what every rank has in the end
    reduce_scatter    (n-1)/n   S: what every rank has at the start
    all_to_all        (n-1)/n   S: the buffer of one rank, of which it keeps one part
    broadcast               1   S: the buffer of one rank
    send_recv               1   S: what each rank sends to the next one, round a ring
"""

from __future__ import annotations

from collections.abc import Callable


def _both_ways(num_ranks: int) -> float:
    return 2 * (num_ranks - 1) / num_ranks


def _one_way(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _whole(num_ranks: int) -> float:
    return 1.0


_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": _both_ways,
    "all_gather": _one_way,
    "reduce_scatter": _one_way,
    "broadcast": _whole,
    "all_to_all": _one_way,
    "send_recv": _whole,
}

COLLECTIVES = tuple(_FACTORS)


def bus_factor(collective: str, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth."""
    return _FACTORS[collective](num_ranks)


def num_elements(num_bytes: float, element_bytes: int, num_ranks: int) -> int:
    """Elements of size S: the most that fit into ``num_bytes`` and divide among the ranks."""
    return int(num_bytes) // element_bytes // num_ranks * num_ranks
