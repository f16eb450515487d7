"""Weights of which each rank holds a part, and the memory in which blocks are whole in turn.

A block's weights are cast to the compute dtype and all-gathered into a *slot*. Blocks take
turns in two slots, so that one is computed with while the next one comes, and always have the
same: what autograd has saved in the forward pass points to where the weights will be again.
Outside of that a block's parameters are empty, and using one by mistake is an error of shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.data.flat import FlatLayout, Lane, start_all_gather, wait_for
from parallel.data.parts import make_parts


class FlatWeights:
    """Parameters of one dtype in a flat buffer: this rank's part of it, and the layout.

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
        num_parts = group.size() if shards and group is not None else 1
        self.number = dist.get_rank(group) if num_parts > 1 else 0
        self.parameters, self.layout = tuple(parameters), FlatLayout(parameters, num_parts)
        self.compute_dtype = first.dtype
        if compute_dtype is not None and first.dtype.is_floating_point:
            self.compute_dtype = compute_dtype
        self._group, self.shards = group, shards
        whole = torch.zeros(self.layout.size, dtype=first.dtype, device=first.device)
        for parameter, view in zip(parameters, self.layout.views(whole), strict=True):
            view.copy_(parameter.detach())
        self.master = self.layout.part(whole, self.number).clone() if num_parts > 1 else whole
        self.parts = make_parts(parameters, self.layout, self.master, self.number, group)
        self._empty = torch.empty(0, dtype=self.compute_dtype, device=first.device)
        self._views: list[Tensor] = []
        self._room = self._empty
        self.empty()

    @property
    def num_bytes(self) -> int:
        """Of the whole in the compute dtype."""
        return self.layout.size * self._empty.element_size()

    def place(self, memory: Tensor) -> None:
        """Have the whole lie in ``memory``, uint8 [num_bytes], whenever it is there."""
        self._room = memory.view(self.compute_dtype)
        self._views = self.layout.views(self._room)

    def start_gathering(self) -> dist.Work | None:
        """Bring this rank's part to its place in the whole, and ask for the others."""
        own = self.layout.part(self._room, self.number)
        own.copy_(self.master)
        if self.layout.num_parts == 1:
            return None
        return start_all_gather(self._room, own, self._group)

    def show(self) -> None:
        """Parameters have their values, or will have when the gathering ends."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def empty(self) -> None:
        for parameter in self.parameters:
            parameter.data = self._empty

    def gather_master(self) -> Tensor:
        """All ranks' parts in their own dtype, [layout.size]; all ranks call it together."""
        if self.layout.num_parts == 1:
            return self.master.clone()
        whole = torch.empty(self.layout.size, dtype=self.master.dtype, device=self.master.device)
        own = self.layout.part(whole, self.number)
        own.copy_(self.master)
        start_all_gather(whole, own, self._group).wait()
        return whole

    def load_master(self, values: Sequence[Tensor]) -> None:
        """Take this rank's part of whole parameters, in the order of ``parameters``."""
        whole = torch.zeros(self.layout.size, dtype=self.master.dtype, device=self.master.device)
        for view, value in zip(self.layout.views(whole), values, strict=True):
            view.copy_(value)
        self.master.copy_(self.layout.part(whole, self.number))


class Slot:
    """Memory for one unit at a time, given back while none needs it.

    Views of it outlive that: they are of a storage, whose size changes.
    """

    def __init__(self) -> None:
        self.holder: Unit | None = None
        """Whose weights are there, or on their way."""
        self._num_bytes = 0
        self._memory: Tensor | None = None

    def fit(self, unit: Unit) -> None:
        self._num_bytes = max(self._num_bytes, unit.num_bytes)

    def memory(self, device: torch.device) -> Tensor:
        """uint8, of the size of the largest unit."""
        if self._memory is None:
            self._memory = torch.zeros(self._num_bytes, dtype=torch.uint8, device=device)
        return self._memory

    def take(self, unit: Unit) -> None:
        """Have memory, on the current stream, which the unit is to fill."""
        self.holder = unit
        self._resize(self._num_bytes)

    def give_back(self) -> None:
        """Nobody needs what is there; the current stream has waited for all that wrote it."""
        self.holder = None
        self._resize(0)

    def _resize(self, num_bytes: int) -> None:
        if self._memory is not None:
            storage = self._memory.untyped_storage()
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)


class Unit:
    """Weights that are gathered together: those of a block, or all outside of blocks."""

    def __init__(self, weights: Sequence[FlatWeights], slot: Slot, lane: Lane) -> None:
        self.weights, self._slot, self._lane = tuple(weights), slot, lane
        self.last_average = 0
        """How many averages of gradients there are up to the last of this unit."""
        self._works: list[dist.Work] = []
        self._mark: torch.cuda.Event | None = None
        self._shown = False
        slot.fit(self)

    @property
    def num_bytes(self) -> int:
        return sum(weights.num_bytes for weights in self.weights)

    def place(self) -> None:
        """Take a place in the slot, which by now all units have asked for theirs."""
        if not self.weights:
            return
        memory = self._slot.memory(self.weights[0].master.device)
        start = 0
        for weights in self.weights:
            weights.place(memory.narrow(0, start, weights.num_bytes))
            start += weights.num_bytes

    def vacate(self) -> None:
        """Give back the slot's memory, in which all have their places and nothing lies yet."""
        self._slot.give_back()

    @property
    def is_here(self) -> bool:
        return self._slot.holder is self

    def start_gathering(self) -> None:
        """Begin to fill the slot, when what is launched so far has ended; nothing if it is full."""
        if self.is_here:
            return
        if self._slot.holder is not None:
            self._slot.holder.wait()
        self._slot.take(self)
        with torch.no_grad(), self._lane.after_current():
            works = [weights.start_gathering() for weights in self.weights]
            self._works = [work for work in works if work is not None]
            self._mark = self._lane.mark()

    def wait(self) -> None:
        """The gathering, if any is under way, has ended for what is launched from here on."""
        for work in self._works:
            work.wait()
        wait_for(self._mark)
        self._works, self._mark = [], None

    def use(self) -> None:
        """The weights are there for what is launched from here on."""
        self.start_gathering()
        self.wait()
        if not self._shown:
            self._shown = True
            for weights in self.weights:
                weights.show()

    def release(self) -> None:
        """Not used from here on: another one may take the slot."""
        if self._shown:
            self._shown = False
            for weights in self.weights:
                weights.empty()

    def forget(self) -> None:
        """What the slot holds is not to be used again: the optimizer may have stepped."""
        self.wait()
        if self.is_here:
            self._slot.give_back()
