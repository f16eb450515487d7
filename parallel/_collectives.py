"""Runs one collective operation, out of place, on data whose result every rank can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

LARGEST_VALUE = 7
"""Small integers, so that sums over 36 ranks are exact in every dtype, bfloat16 included."""


@dataclass(kw_only=True, slots=True)
class Exchange:
    """One operation, ready to run again and again.

    ``reset`` makes the buffers what they were, ``run`` communicates, and ``wrong_elements``
    counts what is not as it should be in this rank's result.
    """

    reset: Callable[[], None]
    run: Callable[[], None]
    wrong_elements: Callable[[], int]


@dataclass(kw_only=True, slots=True)
class Setting:
    """What the operations have in common."""

    group: dist.ProcessGroup
    num_elements: int
    """Of size S, as :mod:`parallel.collectives` defines it; a multiple of the ranks."""
    dtype: torch.dtype
    device: torch.device
    seed: int = 0

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return self.group.size()

    @property
    def part(self) -> slice:
        """This rank's n-th of size S."""
        length = self.num_elements // self.num_ranks
        return slice(self.rank * length, (self.rank + 1) * length)

    def data(self, rank: int) -> Tensor:
        """What ``rank`` starts with, [num_elements]; any rank can make it."""
        generator = torch.Generator(self.device).manual_seed(self.seed + rank)
        values = torch.randint(
            LARGEST_VALUE + 1, (self.num_elements,), generator=generator, device=self.device
        )
        return values.to(self.dtype)

    def total(self) -> Tensor:
        """The sum over ranks of what they start with."""
        total = self.data(0)
        for rank in range(1, self.num_ranks):
            total += self.data(rank)
        return total


def exchange(collective: str, setting: Setting) -> Exchange:
    """The operation named ``collective``, with buffers of its own."""
    return _MAKERS[collective](setting)


def _all_reduce(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)
    buffer = source.clone()

    def run() -> None:
        dist.all_reduce(buffer, group=setting.group)

    return Exchange(
        # Else sums of sums would grow until they are infinite.
        reset=lambda: _copy(source, buffer),
        run=run,
        wrong_elements=lambda: _differing(buffer, setting.total()),
    )


def _broadcast(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)
    buffer = source.clone()

    def run() -> None:
        dist.broadcast(buffer, group=setting.group, group_src=0)

    return Exchange(
        reset=lambda: _copy(source, buffer),
        run=run,
        wrong_elements=lambda: _differing(buffer, setting.data(0)),
    )


def _all_gather(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)[setting.part].clone()
    result = torch.full((setting.num_elements,), -1, dtype=setting.dtype, device=setting.device)

    def run() -> None:
        dist.all_gather_into_tensor(result, source, group=setting.group)

    def wrong() -> int:
        parts = zip(_chunks(result, setting), range(setting.num_ranks), strict=True)
        return sum(
            _differing(part, _chunks(setting.data(rank), setting)[rank]) for part, rank in parts
        )

    return Exchange(reset=lambda: _spoil(result), run=run, wrong_elements=wrong)


def _reduce_scatter(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)
    result = torch.full_like(source[setting.part], -1)

    def run() -> None:
        dist.reduce_scatter_tensor(result, source, group=setting.group)

    return Exchange(
        reset=lambda: _spoil(result),
        run=run,
        wrong_elements=lambda: _differing(result, setting.total()[setting.part]),
    )


def _all_to_all(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)
    result = torch.full_like(source, -1)

    def run() -> None:
        dist.all_to_all_single(result, source, group=setting.group)

    def wrong() -> int:
        parts = zip(_chunks(result, setting), range(setting.num_ranks), strict=True)
        return sum(_differing(part, setting.data(rank)[setting.part]) for part, rank in parts)

    return Exchange(reset=lambda: _spoil(result), run=run, wrong_elements=wrong)


def _send_recv(setting: Setting) -> Exchange:
    source = setting.data(setting.rank)
    result = torch.full_like(source, -1)
    following = (setting.rank + 1) % setting.num_ranks
    before = (setting.rank - 1) % setting.num_ranks

    def run() -> None:
        group = setting.group
        sends = dist.P2POp(dist.isend, source, group=group, group_peer=following)
        receives = dist.P2POp(dist.irecv, result, group=group, group_peer=before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return Exchange(
        reset=lambda: _spoil(result),
        run=run,
        wrong_elements=lambda: _differing(result, setting.data(before)),
    )


_MAKERS: dict[str, Callable[[Setting], Exchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}


def _chunks(tensor: Tensor, setting: Setting) -> tuple[Tensor, ...]:
    return tensor.chunk(setting.num_ranks)


def _copy(source: Tensor, buffer: Tensor) -> None:
    buffer.copy_(source)


def _spoil(result: Tensor) -> None:
    """No value of any rank's data, so that what does not arrive is wrong."""
    result.fill_(-1)


def _differing(found: Tensor, wanted: Tensor) -> int:
    return int((found != wanted).sum())
