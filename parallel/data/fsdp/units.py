"""What FSDP holds: weights in units, their shards, and the transfers of their gradients.

A *unit* is gathered and reduced together: the weights of a block, or all those outside of blocks.
:mod:`parallel.data.fsdp.container` says when.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.buckets import bucket_tensors
from parallel.data.fsdp.blocks import Blocks, named_blocks, parameters_of_blocks
from parallel.data.fsdp.meta_device import (
    Initialise,
    Materialiser,
    default_device,
    is_on_meta,
)
from parallel.data.fsdp.weights import FlatWeights, Slot, Unit
from parallel.data.gradients import GradientTransfer
from parallel.data.model_blocks import blocks_of
from parallel.data.shard_gradients import ShardedDataParallel, ShardTransfer
from parallel.streams import SideStream

NUM_SLOTS = 2
"""Blocks that are whole at a time: the one in use and the next one."""


class FullySharded(ShardedDataParallel):
    """A module whose parameters are in shards; :class:`FSDP` explains the arguments."""

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None,
        blocks: Blocks | None,
        replicate_below: int,
        group: dist.ProcessGroup | None,
        replicate_group: dist.ProcessGroup | None,
        init_fn: Initialise | None,
        device: torch.device | None,
    ) -> None:
        if replicate_below < 0:
            raise ValueError(f"replicate_below={replicate_below}: must be at least 0")
        if replicate_group is not None and group is None:
            raise ValueError("replicate_group: needs group=, the ranks that share out the weights")
        self._compute_dtype, self._replicate_below = compute_dtype, replicate_below
        self._weights: list[FlatWeights] = []
        self._units: list[Unit] = []
        self._transfer_of: dict[FlatWeights, ShardTransfer] = {}
        self._meta: Materialiser | None = None
        if is_on_meta(module):
            self._meta = Materialiser(module, device or default_device(group), init_fn)
        # In a list, which does not register them as modules of their own.
        self._blocks = [blocks_of(module) if blocks is None else named_blocks(module, blocks)]
        super().__init__(module, overlap=True, group=group, replicas=replicate_group)
        self._show_shards()

    def _register_block_hooks(self, block: nn.Module, number: int) -> None:
        """Have the weights of unit ``number`` there whenever the block runs."""
        raise NotImplementedError

    def _has_work(self) -> bool:
        changes = self._compute_dtype is not None or self._meta is not None
        return changes or super()._has_work()

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        device = parameters[0].device
        gathering, self._reducing = SideStream(device), SideStream(device)
        (blocks,) = self._blocks
        inside, outside = parameters_of_blocks(self.module, blocks)
        small = [p for p in self.module.parameters() if p.numel() < self._replicate_below]
        replicated = set(small)
        # Neighbours take turns.
        slots = [Slot() for _ in range(NUM_SLOTS)]
        for block, members in zip(blocks, inside, strict=True):
            sharded = [p for p in members if p not in replicated]
            if sharded:
                slot = slots[len(self._units) % len(slots)]
                self._materialise(sharded)
                unit = Unit(self._flatten(sharded, shards=True), slot, gathering)
                self._register_block_hooks(block, len(self._units))
                self._units.append(unit)
        self._materialise([*outside, *small])
        self._finish_materialising()
        rest = self._flatten([p for p in outside if p not in replicated], shards=True)
        self._rest = Unit([*rest, *self._flatten(small, shards=False)], Slot(), gathering)
        for unit in (*self._units, self._rest):
            unit.place()
        transfers = self._list_transfers()
        for unit in (*self._units[:NUM_SLOTS], self._rest):
            # Until the first pass nothing is whole.
            unit.vacate()
        return transfers

    def _materialise(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give values to those that come from the meta device."""
        if self._meta is not None:
            found = self._meta.fill(parameters)
            self._broadcast(found)
            self._meta.require_values(found)

    def _finish_materialising(self) -> None:
        if self._meta is not None:
            self._meta.fill_rest()
            self._broadcast(self._meta.buffers)
            self._meta.require_values_of_buffers()
            self._meta = None

    def _arrange_more(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        return self._list_transfers()

    def _list_transfers(self) -> list[ShardTransfer]:
        """One for all weights that train, in the order of the backward pass."""
        transfers: list[ShardTransfer] = []
        for unit in (*reversed(self._units), self._rest):
            for weights in unit.weights:
                if weights not in self._transfer_of and any(
                    p.requires_grad for p in weights.parameters
                ):
                    self._transfer_of[weights] = ShardTransfer(
                        weights.sharded,
                        side_stream=self._reducing,
                        # Replicated parameters are few, and their gradients may be accurate.
                        dtype=weights.compute_dtype if weights.is_sharded else weights.master.dtype,
                    )
                if weights in self._transfer_of:
                    transfers.append(self._transfer_of[weights])
            unit.end_of_transfers = len(transfers)
        return transfers

    def _flatten(self, parameters: Sequence[nn.Parameter], *, shards: bool) -> list[FlatWeights]:
        """Flat weights, each of one dtype, and either all trained or all frozen."""
        trained = [p for p in parameters if p.requires_grad]
        frozen = [p for p in parameters if not p.requires_grad]
        found = [
            FlatWeights(members, self._group, compute_dtype=self._compute_dtype, shards=shards)
            for members in (*bucket_tensors(trained), *bucket_tensors(frozen))
        ]
        for weights in found:
            self._shards.update(zip(weights.parameters, weights.shards, strict=True))
        self._weights += found
        return found

    def _holders(self) -> Sequence[FlatWeights]:
        return self._weights

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, master values) of all parameters; all ranks iterate over it together.

        Holds the parameters of one block at a time. A shared parameter comes under all its names.
        """
        names: dict[Tensor, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        for weights in self._weights:
            values = weights.layout.views(weights.gather_master())
            for parameter, value in zip(weights.parameters, values, strict=True):
                for name in names.pop(parameter):
                    yield name, value
        for parameter, left in names.items():
            for name in left:
                yield name, parameter.detach()

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Whole parameters, on the CPU, and buffers; all ranks call it together."""
        with self.reading_module():
            state = super().state_dict(*arguments, **options)
        if not self._weights:
            return state
        prefix = options.get("prefix", "")
        for name, value in self.whole_parameters():
            # A view would keep its whole block.
            state[f"{prefix}module.{name}"] = value.cpu().clone()
        return state

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        """Take this rank's shards of whole parameters, and the buffers."""
        if not self._weights:
            return super().load_state_dict(state_dict, *arguments, **options)
        parameters = self.module.named_parameters(prefix="module", remove_duplicate=False)
        names = dict(parameters)
        missing = [name for name in names if name not in state_dict]
        if missing:
            raise ValueError(f"the state has no {missing[0]}: give that of the same model")
        values = {parameter: state_dict[name] for name, parameter in names.items()}
        for weights in self._weights:
            weights.load_master([values[parameter] for parameter in weights.parameters])
        rest = {name: value for name, value in state_dict.items() if name not in names}
        found = super().load_state_dict(rest, strict=False)
        if found.unexpected_keys:
            raise ValueError(f"the state has {found.unexpected_keys[0]}, which the model has not")
        return found
