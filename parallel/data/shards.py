"""Shards: the elements of a parameter that one rank trains.

The module computes with whole parameters. A *shard* is a parameter of its own, 1-D, that holds
the elements of a whole parameter within this rank's part of a flat buffer; it may be empty.
Optimizers step the shards, so that optimizer state exists for them alone. An optimizer must
therefore update each element by itself, as Adam and SGD do (Rajbhandari et al., 2020, section 5;
Zhao et al., 2023, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import FlatLayout


@dataclass(kw_only=True, slots=True, frozen=True)
class ShardOrigin:
    """The whole parameter of a shard, and the shard's elements of it in memory order."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int
    group: dist.ProcessGroup | None
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


def origin_of_shard(parameter: Tensor) -> ShardOrigin | None:
    """Where a shard's elements belong, also of a module's own parameter that is one between steps.

    None for a parameter that is whole.
    """
    shard = getattr(parameter, "shard_of_it", parameter)
    found: ShardOrigin | None = getattr(shard, "origin", None)
    return found


class ShardedWeights:
    """Whole parameters and this rank's shards of them, which they are between steps.

    A user who reads the module's own parameters then sees what an optimizer steps, with its
    gradient, as with PyTorch's FSDP under ``use_orig_params`` (Zhao et al., 2023, section 4.2);
    whole values would be out of date, and without gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shards: Sequence[nn.Parameter]) -> None:
        self._pairs = tuple(zip(parameters, shards, strict=True))
        self._had_gradient: list[bool] = []
        """Whether each shard had a gradient when its parameter became the shard."""

    def show(self) -> None:
        """Make the parameters the shards, 1-D, with their gradients."""
        for parameter, shard in self._pairs:
            parameter.data = shard.data
            parameter.grad = shard.grad
        self._had_gradient = [shard.grad is not None for _, shard in self._pairs]

    def hide(self, values: Iterable[Tensor]) -> None:
        """Give the parameters other values; gradients set to None are gone from the shards."""
        for (parameter, shard), had, value in zip(
            self._pairs, self._had_gradient, values, strict=True
        ):
            if had and parameter.grad is None:
                shard.grad = None
            parameter.grad = None
            parameter.data = value


def make_shards(
    parameters: Sequence[nn.Parameter],
    layout: FlatLayout,
    values: Tensor,
    index: int,
    group: dist.ProcessGroup | None,
) -> list[nn.Parameter]:
    """A shard of each parameter: views of ``values``, shard ``index`` of a flat buffer."""
    found = []
    for place, (whole, elements) in enumerate(
        zip(parameters, layout.split_shard(values, index), strict=True)
    ):
        start, stop = layout.held(place, index)
        # Not a view of the buffer: its version counts writes into the shard, and no gathering's.
        shard = nn.Parameter(elements.data, requires_grad=whole.requires_grad)
        shard.origin = ShardOrigin(
            shape=layout.shapes[place],
            stride=layout.strides[place],
            start=start,
            stop=stop,
            group=group,
            is_part=layout.num_shards > 1,
        )
        # Autograd knows the whole parameters alone, and would never call one of the shards.
        shard.register_hook = _refuse_hook
        shard.register_post_accumulate_grad_hook = _refuse_hook
        found.append(shard)
    return found


def _refuse_hook(hook: Any) -> NoReturn:
    raise RuntimeError(
        "a hook on a shard would never be called, since autograd knows whole parameters alone: "
        "change gradients after finish_gradient_synchronization()"
    )
