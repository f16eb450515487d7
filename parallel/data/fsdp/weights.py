"""Sharded weights, and the slots of memory in which blocks are whole in turn.

A block's weights are cast to the compute dtype and all-gathered into a *slot*. Blocks take turns
in two slots, so that one is in use while the next one is gathered. A block always has the same
slot: tensors that autograd saved in the forward pass point to where the weights will be again.
Meanwhile a block's parameters are empty, and using one by mistake is an error of shapes. Between
steps they are this rank's shards, with the shards' gradients, as those of PyTorch's FSDP are with
``use_orig_params`` (Zhao et al., 2023, section 4.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import FlatLayout, start_all_gather
from parallel.data.shard_gradients import ShardedParameters
from parallel.data.shards import ShardedWeights, make_shards
from parallel.streams import SideStream, StreamEvent


class FlatWeights:
    """Parameters of one dtype in a flat buffer: this rank's shard of it, and the layout.

    Args:
        parameters: whole, with values; they are empty from here on.
        compute_dtype: what modules see; None is the parameters' own dtype.
        shards: divide them among the ranks; else each holds all.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        compute_dtype: torch.dtype | None,
        shards: bool,
    ) -> None:
        first = parameters[0]
        num_shards = group.size() if shards and group is not None else 1
        self._index = dist.get_rank(group) if num_shards > 1 else 0
        self.parameters, self.layout = tuple(parameters), FlatLayout(parameters, num_shards)
        self.compute_dtype = first.dtype
        if compute_dtype is not None and first.dtype.is_floating_point:
            self.compute_dtype = compute_dtype
        self._group, self.is_sharded = group, shards
        whole = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        for parameter, view in zip(parameters, self.layout.views(whole), strict=True):
            view.copy_(parameter.detach())
        self.master = self.layout.shard(whole, self._index).clone() if num_shards > 1 else whole
        self.shards = make_shards(parameters, self.layout, self.master, self._index, group)
        self._empty = torch.empty(0, dtype=self.compute_dtype, device=first.device)
        self._views: list[Tensor] = []
        self._memory = self._empty
        self._own = ShardedWeights(parameters, self.shards)
        self.empty()

    @property
    def sharded(self) -> ShardedParameters:
        """The parameters and their shards, for the transfer of their gradients."""
        return ShardedParameters(
            parameters=self.parameters, shards=self.shards, layout=self.layout, index=self._index
        )

    @property
    def num_bytes(self) -> int:
        """Size of all weights in the compute dtype."""
        return self.layout.size * self._empty.element_size()

    def place(self, memory: Tensor) -> None:
        """Use ``memory``, uint8 [num_bytes], for gathering from now on."""
        self._memory = memory.view(self.compute_dtype)
        self._views = self.layout.views(self._memory)

    def start_gathering(self) -> dist.Work | None:
        """Copy this rank's shard to its place, and begin to gather the others."""
        own = self.layout.shard(self._memory, self._index)
        own.copy_(self.master)
        if self.layout.num_shards == 1:
            return None
        return start_all_gather(self._memory, own, self._group)

    def show(self) -> None:
        """Point the parameters at the memory in which the gathering puts their values."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def empty(self) -> None:
        """Take the memory from the parameters."""
        for parameter in self.parameters:
            parameter.data = self._empty

    def show_shards(self) -> None:
        """Make the parameters this rank's shards, 1-D, with their gradients."""
        self._own.show()

    def hide_shards(self) -> None:
        """Empty the parameters; gradients that were set to None there are gone from the shards."""
        self._own.hide([self._empty] * len(self.parameters))

    def gather_master(self) -> Tensor:
        """All ranks' shards in their own dtype, [layout.size]; all ranks call it together."""
        if self.layout.num_shards == 1:
            return self.master.clone()
        whole = torch.empty(self.layout.size, dtype=self.master.dtype, device=self.master.device)
        own = self.layout.shard(whole, self._index)
        own.copy_(self.master)
        start_all_gather(whole, own, self._group).wait()
        return whole

    def load_master(self, values: Sequence[Tensor]) -> None:
        """Take this rank's shard of whole parameters, in the order of ``parameters``."""
        whole = torch.zeros(self.layout.size, dtype=self.master.dtype, device=self.master.device)
        for view, value in zip(self.layout.views(whole), values, strict=True):
            view.copy_(value)
        self.master.copy_(self.layout.shard(whole, self._index))


class Slot:
    """Memory for one unit at a time, freed while none needs it.

    Views outlive that: they are views of a storage, whose size changes.
    """

    def __init__(self) -> None:
        self.holder: Unit | None = None
        """The unit whose weights are in the slot, or being gathered into it."""
        self._num_bytes = 0
        self._memory: Tensor | None = None

    def fit(self, unit: Unit) -> None:
        """Grow to the size of the unit; before :meth:`memory` is called."""
        self._num_bytes = max(self._num_bytes, unit.num_bytes)

    def memory(self, device: torch.device) -> Tensor:
        """uint8 memory of the size of the largest unit."""
        if self._memory is None:
            self._memory = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        return self._memory

    def take(self, unit: Unit) -> None:
        """Allocate the memory, on the current stream, for the unit to fill."""
        self.holder = unit
        self._resize(self._num_bytes)

    def give_back(self) -> None:
        """Free the memory; the current stream has waited for all that wrote it."""
        self.holder = None
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        if self._memory is not None:
            storage = self._memory.untyped_storage()
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)


class Unit:
    """Weights that are gathered together: those of a block, or all those outside of blocks."""

    def __init__(self, weights: Sequence[FlatWeights], slot: Slot, side_stream: SideStream) -> None:
        self.weights, self._slot, self._side_stream = tuple(weights), slot, side_stream
        self.end_of_transfers = 0
        """Number of gradient transfers up to the last one of this unit."""
        self._works: list[dist.Work] = []
        self._gathered: StreamEvent | None = None
        self._shown = False
        slot.fit(self)

    @property
    def num_bytes(self) -> int:
        return sum(weights.num_bytes for weights in self.weights)

    def place(self) -> None:
        """Place the weights in the slot, once all its units have called :meth:`Slot.fit`."""
        if not self.weights:
            return
        memory = self._slot.memory(self.weights[0].master.device)
        start = 0
        for weights in self.weights:
            weights.place(memory.narrow(0, start, weights.num_bytes))
            start += weights.num_bytes

    def vacate(self) -> None:
        """Free the slot's memory, after all units have been placed and before any is gathered."""
        self._slot.give_back()

    @property
    def is_here(self) -> bool:
        return self._slot.holder is self

    def start_gathering(self) -> None:
        """Begin to fill the slot, after all that has been launched; no-op if it holds this unit."""
        if self.is_here:
            return
        if self._slot.holder is not None:
            self._slot.holder.wait()
        self._slot.take(self)
        with torch.no_grad(), self._side_stream.after_current():
            works = [weights.start_gathering() for weights in self.weights]
            self._works = [work for work in works if work is not None]
            self._gathered = StreamEvent(self._side_stream.device)

    def wait(self) -> None:
        """Make the current stream wait for the gathering, if one is under way."""
        for work in self._works:
            work.wait()
        if self._gathered is not None:
            self._gathered.wait()
        self._works, self._gathered = [], None

    def use(self) -> None:
        """Gather the weights if need be, and show them to the parameters."""
        self.start_gathering()
        self.wait()
        if not self._shown:
            self._shown = True
            for weights in self.weights:
                weights.show()

    def release(self) -> None:
        """Take the weights from the parameters: another unit may have the slot."""
        if self._shown:
            self._shown = False
            for weights in self.weights:
                weights.empty()

    def forget(self) -> None:
        """Free the gathered weights, which are stale once the optimizer steps."""
        self.wait()
        if self.is_here:
            self._slot.give_back()
