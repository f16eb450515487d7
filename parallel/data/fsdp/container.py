"""Fully sharded data parallelism: each rank holds a shard of weights, gradients and state.

    forward    while a block is computed, the weights of the next one are all-gathered
    backward   while a block is computed, the weights of the block before it are all-gathered and
               the gradients of the block after it are reduce-scattered
    step       every rank updates its shard of each block

At most two blocks are whole at any time, and none between the passes; weights outside of blocks
are whole from the forward pass to the end of the backward pass. Where blocks run in another order
than they are registered, or again, they are gathered when they run; where several forward passes
come before a backward pass, or blocks run in another order, gradients are reduced once they are
complete, and are whole until then. ZeRO stage 3 (Rajbhandari et al.,
2020); PyTorch FSDP (Zhao et al., 2023), whose fully_shard is the peer.

Every rank asks for the same collectives in the same order, whatever modules it uses: the order
of the blocks in the forward pass, and the reverse in the backward pass. A rank that does not
use a block takes part in its collectives all the same.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from parallel.data.fsdp.blocks import Blocks, what_stays_whole
from parallel.data.fsdp.meta_device import Initialise
from parallel.data.fsdp.units import NUM_SLOTS, FullySharded

REPLICATE_BELOW = 2**15
"""Elements: above norms and biases of most models, below any matrix worth dividing."""


class ForwardPass:
    """A forward pass that made a graph, for the hooks of that graph to name it."""

    __slots__ = ("step", "trains")

    def __init__(self, step: int, *, trains: bool) -> None:
        self.trains = trains
        """Whether parameters trained: those of a GAN's judge do not while the maker learns."""
        self.step: int | None = step
        """The step that its gradients belong to; None once its backward pass has ended."""


class FSDP(FullySharded):
    """Any module, with its parameters in shards; used as :class:`Zero` is.

    ``parameters()`` gives this rank's shards, in the dtype that the module had: master weights.
    Modules compute in ``compute_dtype``, gradients travel in it, and the shards' gradients have
    the dtype of the shards. Inputs of the module that are floats are cast; those of blocks are
    not. In ``no_sync()`` whole gradients add up on each rank; without it, those of several
    backward passes, each finished, add up in the shards.

    :meth:`state_dict` gathers whole parameters, and :meth:`whole_parameters` does so a few at a
    time. From :meth:`finish_gradient_synchronization` to the next forward pass the module's own
    parameters are the shards too, with their gradients; through the passes they are empty where
    they are not used.

    Args:
        module: on its device already, whole; or built under ``torch.device("meta")``.
        compute_dtype: None leaves parameters as they are.
        blocks: modules that are gathered one after another, in the order in which they run,
            each once a pass; or their classes, by themselves or by name; :func:`blocks_of` the
            module if None. A parameter that is also used
            outside of its block is gathered with what is outside of blocks.
        replicate_below: parameters of fewer elements are whole on every rank, and their
            gradients are all-reduced.
        group: the ranks; the world if None, and one where there is no process group.
        replicate_group: hybrid sharding, with weights sharded over ``group`` alone, such as the
            ranks of one host: the ranks that hold the same shards in other such groups. Gradients
            are reduce-scattered in ``group`` and all-reduced here.
        init_fn: gives a module from the meta device the values of its own parameters and buffers;
            calls its ``reset_parameters()`` if None. The first rank's values count.
        device: where such a module goes; this rank's if None.

    Raises:
        ValueError: nothing in the module trains, it lies on several devices, a block is not in
            it, or in another one, ``replicate_below`` is negative, ``replicate_group`` is given
            without ``group``, or a module on the meta device cannot be initialised.
    """

    IN_FLIGHT = 1
    """While one block's gradients travel, the next one's are computed."""

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        blocks: Blocks | None = None,
        replicate_below: int = REPLICATE_BELOW,
        group: dist.ProcessGroup | None = None,
        replicate_group: dist.ProcessGroup | None = None,
        init_fn: Initialise | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            module,
            compute_dtype=compute_dtype,
            blocks=blocks,
            replicate_below=replicate_below,
            group=group,
            replicate_group=replicate_group,
            init_fn=init_fn,
            device=device,
        )
        self._next = 0
        """The first block that the forward pass has not gathered."""
        self._level = len(self._units)
        """The block that the backward pass is at; their number before it begins."""
        self._step = self._num_open = 0
        """Forward passes of this step whose backward pass has not ended: all ranks count alike,
        which they might not if they looked at which graphs are still there."""
        self._forward_pass = ForwardPass(self._step, trains=True)
        """The last one that made a graph."""
        self._in_order = True
        """Whether all open passes ran blocks in their order, each once."""
        self._last_block: int | None = None
        """The block that the forward pass has run last; None outside of a forward pass."""
        self._at: int | None = None
        """The block that the backward pass is at, where blocks ran in another order."""
        self._backward_of: ForwardPass | None = None
        """The forward pass that the backward pass is in."""
        self._is_last = True
        """Whether gradients come now, and no other forward pass is open whose will."""
        is_first = all(dist.get_rank(g) == 0 for g in (self._group, replicate_group) if g)
        if self.world_size > 1 and is_first:
            whole = self._rest.weights
            warning = what_stays_whole(
                [w.layout.sizes for w in self._weights],
                outside=[w.layout.sizes for w in whole if w.is_sharded],
                replicate_below=replicate_below,
                names_blocks=blocks is not None,
            )
            if warning is not None:
                warnings.warn(warning, stacklevel=2)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if not self._weights:
            return self.module(*inputs, **kwargs)
        if self._backward_of is not None:
            # The last backward pass was in no_sync().
            self._end_backward(reduces=False)
        self._take_in_thawed()
        was_shown = self._shows_shards
        self._begin_forward()
        inputs, kwargs = tree_map(self._cast, (inputs, kwargs))
        outputs = self._run(inputs, kwargs)
        self._gather_before(len(self._units))
        if torch.is_grad_enabled():
            # The last blocks come again when the backward pass does. Until then their memory is the
            # loss's, where a step has its peak.
            for unit in self._units[-NUM_SLOTS:]:
                unit.forget()
        elif self._num_open:
            # A graph from before has saved the weights outside of blocks.
            for unit in self._units:
                unit.forget()
        else:
            self._rest.release()
            self._forget()
            if was_shown:
                self._show_shards()
        return outputs

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        """The module's forward pass, noted if it makes a graph."""
        if torch.is_grad_enabled():
            trains = any(parameter.requires_grad for parameter in self._trained)
            self._forward_pass = ForwardPass(self._step, trains=trains)
            # Of all open passes, whose backward passes may come in any order.
            self._in_order |= self._num_open == 0
            self._num_open += 1
        self._last_block = -1
        try:
            return self.module(*inputs, **kwargs)
        finally:
            self._last_block = None

    def finish_gradient_synchronization(self) -> None:
        if not self._weights or not self._synchronizes:
            return
        self._hide_shards()
        # Ranks that have used other blocks wait for this one.
        self._end_backward(reduces=True)
        super().finish_gradient_synchronization()
        self._show_shards()

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._compute_dtype) if is_float and self._compute_dtype else value

    def _begin_forward(self) -> None:
        """Gather everything anew, since the optimizer may have stepped."""
        self._hide_shards()
        self._forget()
        self._next = 0
        self._rest.start_gathering()
        self._gather_before(1)
        self._rest.use()

    def _forget(self) -> None:
        for unit in (*self._units, self._rest):
            unit.forget()

    def _gather_before(self, number: int) -> None:
        """Start to gather the blocks before ``number`` that the forward pass has not gathered."""
        while self._next < min(number, len(self._units)):
            self._units[self._next].start_gathering()
            self._next += 1

    def _before_block(self, number: int) -> None:
        if self._last_block is not None:
            if number <= self._last_block and torch.is_grad_enabled():
                self._in_order = False
            self._last_block = number
        self._gather_before(number + 1)
        if self._next == number + 1:
            self._gather_before(number + 2)
        self._units[number].use()

    def _after_block(self, number: int, outputs: Any) -> None:
        if self._last_block is None and (self._level <= number or self._at == number):
            # Activations are made again, and the backward pass is about to use them.
            return
        self._units[number].release()
        this = weakref.ref(self)
        # In the backward pass, activations are made again for the pass that it is in.
        now = self._backward_of if self._last_block is None else None
        forward_pass = now or self._forward_pass

        def enter(_: Tensor) -> None:
            container = this()
            if container is not None:
                container._enter_backward(forward_pass, number)

        leaves = tree_leaves(outputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and not tensors and any(x is not None for x in leaves):
            raise RuntimeError(
                f"FSDP: blocks[{number}] returned a {type(leaves[0]).__name__}, in which it finds "
                "no tensors: return tensors in tuples, lists or dictionaries, or register the "
                "class with torch.utils._pytree.register_pytree_node"
            )
        for output in tensors:
            if output.requires_grad:
                output.register_hook(enter)

    def _enter_backward(self, forward_pass: ForwardPass, number: int) -> None:
        """The backward pass reaches a block, and has left the blocks after it."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "FSDP: the pass after one with create_graph=True would need weights of blocks that "
                "are no longer whole: use BucketedDDP or Zero2"
            )
        self._hide_shards()
        again = self._in_order and number > self._level
        if forward_pass is not self._backward_of or again:
            self._begin_backward(forward_pass)
        if self._in_order:
            self._go_back_to(number, reduces=self._synchronizes and self._is_last)
        elif self._at != number:
            self._leave_any()
            self._at = number
        self._units[number].use()

    def _begin_backward(self, forward_pass: ForwardPass) -> None:
        """Begin with the blocks of a forward pass; those of others may have come before."""
        if self._backward_of is not None:
            self._leave_any()
            if self._level < len(self._units):
                # Up to the first, as a rank does that uses other blocks.
                self._go_back_to(0, reduces=False)
                self._leave(reduces=False)
            self._close(self._backward_of)
        self._backward_of = forward_pass
        others = self._num_open - int(forward_pass.step == self._step)
        self._is_last = others == 0 and forward_pass.trains
        self._level = len(self._units)

    def _close(self, forward_pass: ForwardPass) -> None:
        if forward_pass.step == self._step:
            self._num_open -= 1
        forward_pass.step = None

    def _leave_any(self) -> None:
        if self._at is not None:
            self._units[self._at].release()
            self._at = None

    def _go_back_to(self, number: int, *, reduces: bool) -> None:
        while self._level > number:
            self._leave(reduces=reduces)
            self._level -= 1
            self._units[self._level].start_gathering()
            if self._level > 0:
                self._units[self._level - 1].start_gathering()

    def _leave(self, *, reduces: bool) -> None:
        """The backward pass has left a block: no further gradients of it will come."""
        if self._level < len(self._units):
            unit = self._units[self._level]
            # First, since the gradients are to travel in memory that this gives back.
            unit.release()
            if self._level < NUM_SLOTS:
                # No block is left that takes this slot.
                unit.forget()
            if reduces:
                self._start_up_to(unit.end_of_transfers)

    def _end_backward(self, *, reduces: bool) -> None:
        """Release and reduce the blocks that the backward pass did not reach."""
        self._leave_any()
        if self._in_order:
            self._go_back_to(0, reduces=reduces)
            self._leave(reduces=reduces)
        self._level = len(self._units)
        if self._backward_of is not None:
            self._close(self._backward_of)
            self._backward_of = None
        if reduces:
            self._step, self._num_open = self._step + 1, 0
        self._rest.release()
        self._forget()

    def _complete(self, index: int) -> None:
        if index < self._progress.num_started and self._progress.missing[index]:
            raise RuntimeError(
                "a gradient of a block came after the backward pass had gone on to the block "
                "before it: FSDP's blocks must be called, and not their weights used by others; "
                "give it as blocks those that are"
            )
        super()._complete(index)

    def _register_block_hooks(self, block: nn.Module, number: int) -> None:
        this, known = weakref.ref(self), weakref.ref(block)

        def before(called: nn.Module, _: Any) -> None:
            container = this()
            # Copies of a block have its hooks.
            if container is not None and called is known():
                container._before_block(number)

        def after(called: nn.Module, _: Any, outputs: Any) -> None:
            container = this()
            if container is not None and called is known():
                container._after_block(number, outputs)

        block.register_forward_pre_hook(torch.compiler.disable(before))
        block.register_forward_hook(torch.compiler.disable(after))
