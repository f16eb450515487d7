"""Shards: the elements of a parameter that one rank trains.

The module computes with whole parameters. A *shard* is a parameter of its own, 1-D, that holds
the elements of a whole parameter within this rank's part of a flat buffer; it may be empty.
Optimizers step the shards, so that optimizer state exists for them alone. An optimizer must
therefore update each element by itself, as Adam and SGD do (Rajbhandari et al., 2020, section 5;
Zhao et al., 2023, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import FlatLayout


class ShardOwner(Protocol):
    """A container that keeps whole parameters beside the shards."""

    def start_parameter_gathering(self) -> None:
        """Begin to copy the shards that ranks have updated into every rank's whole parameters."""

    def wait_for_gathering(self) -> None:
        """Wait for all gathering that has begun."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardOrigin:
    """The whole parameter of a shard, and the shard's elements of it in memory order."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int
    group: dist.ProcessGroup | None
    owner: Callable[[], ShardOwner | None]
    is_part: bool
    """Whether other ranks hold other elements; else every rank holds all of them."""

    @property
    def num_elements(self) -> int:
        return self.shape.numel()

    def cut(self, whole: Tensor) -> Tensor:
        """The shard's elements, 1-D, of a tensor that is shaped as the whole parameter."""
        laid_out = torch.empty_strided(
            self.shape, self.stride, dtype=whole.dtype, device=whole.device
        ).copy_(whole)
        flat = laid_out.as_strided((self.num_elements,), (1,))
        return flat[self.start : self.stop].clone()

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole tensor from all ranks' shards; the first of them where all hold copies."""
        flat = torch.cat(list(shards))[: self.num_elements]
        return flat.as_strided(self.shape, self.stride)


def make_shards(
    parameters: Sequence[nn.Parameter],
    layout: FlatLayout,
    values: Tensor,
    index: int,
    group: dist.ProcessGroup | None,
    owner: Callable[[], ShardOwner | None] = lambda: None,
) -> list[nn.Parameter]:
    """A shard of each parameter: views of ``values``, shard ``index`` of a flat buffer."""
    found = []
    for place, (whole, elements) in enumerate(
        zip(parameters, layout.split_shard(values, index), strict=True)
    ):
        start, stop = layout.held(place, index)
        shard = nn.Parameter(elements, requires_grad=whole.requires_grad)
        shard.origin = ShardOrigin(
            shape=layout.shapes[place],
            stride=layout.strides[place],
            start=start,
            stop=stop,
            group=group,
            owner=owner,
            is_part=layout.num_shards > 1,
        )
        found.append(shard)
    return found
