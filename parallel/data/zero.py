"""ZeRO stages 1 and 2: whole parameters on every rank, which updates its shard of them.

    backward   gradients are reduce-scattered bucket by bucket, as they come
    step       every rank updates its shard of each bucket
    forward    buckets are all-gathered, and each block waits for its own

Reduce-scatter and all-gather together send what one all-reduce sends, so that a step
communicates as much as plain data parallelism does (Rajbhandari et al., 2020, section 7.1).
Stage 2 frees a bucket's gradients once they are reduced; each rank keeps those of its shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel.data.buckets import bucket_tensors
from parallel.data.containers import bucket_bytes
from parallel.data.flat import FlatLayout, start_all_gather
from parallel.data.gradients import GradientTransfer, buckets_of
from parallel.data.model_blocks import waiting_points
from parallel.data.shard_gradients import ShardedDataParallel, ShardedParameters, ShardTransfer
from parallel.data.shards import ShardedWeights, make_shards
from parallel.streams import SideStream


class ZeroBucket(ShardTransfer):
    """Parameters that live in one flat buffer, and the transfer of their gradients."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        side_stream: SideStream,
        keeps_buffer: bool,
    ) -> None:
        layout, index = FlatLayout(parameters, group.size()), dist.get_rank(group)
        first = parameters[0]
        self._whole = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
        self._views = layout.views(self._whole)
        for parameter, view in zip(parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            parameter.data = view
        self._shard = layout.shard(self._whole, index)
        shards = make_shards(parameters, layout, self._shard, index, group)
        super().__init__(
            ShardedParameters(parameters=parameters, shards=shards, layout=layout, index=index),
            side_stream=side_stream,
            dtype=first.dtype,
            keeps_buffer=keeps_buffer,
        )
        self._own = ShardedWeights(parameters, shards)
        self._group = group
        self._gathering: dist.Work | None = None

    def start_gathering(self) -> None:
        self.wait_for_parameters()
        self._gathering = start_all_gather(self._whole, self._shard, self._group)

    def wait_for_parameters(self) -> None:
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def show_shards(self) -> None:
        self._own.show()

    def hide_shards(self) -> None:
        self._own.hide(self._views)


class Zero(ShardedDataParallel):
    """Base of both stages; used as the other containers, with an optimizer over shards::

        model = Zero1(module, bucket_size_mb=25)
        optimizer = optimizer_of_shards(model.parameters(), torch.optim.AdamW, lr=1e-3)
        loss_of(model(x)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    ``parameters()`` gives this rank's shards, by the names of the whole parameters.
    :meth:`finish_gradient_synchronization` gives them their gradients, and takes those of the
    whole parameters. Backward passes in ``no_sync()`` add to whole gradients on each rank.

    A forward pass gathers the whole parameters, and waits for each where it uses it; passes in
    ``no_sync()`` that make a graph gather once, unless shards are written to in between. From
    :meth:`finish_gradient_synchronization` to the next pass the module's own parameters are the
    shards, with their gradients; :meth:`state_dict` is whole, and :meth:`wait_for_parameters` makes
    the module so.

    Raises:
        ValueError: as :class:`BucketedDDP` says.
    """

    KEEPS_GRADIENTS: bool

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 25.0,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._max_bytes = bucket_bytes(bucket_size_mb)
        self._buckets: list[ZeroBucket] = []
        self._stale = False
        """Whether shards may have changed although the module does not show them."""
        self._gathered_version = -1
        """The version of the shards that were gathered last."""
        super().__init__(module, overlap=True, group=group)
        self._waited: list[list[ZeroBucket]] = []
        self._called: set[int] = set()
        if self._buckets:
            self._wait_in_forward()
            self._show_shards()

    def _arrange(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        side_stream = SideStream(parameters[0].device)
        for members in bucket_tensors(parameters, self._max_bytes):
            bucket = ZeroBucket(
                members,
                self._group,
                side_stream=side_stream,
                keeps_buffer=self.KEEPS_GRADIENTS,
            )
            self._shards.update(zip(bucket.parameters, bucket.shards, strict=True))
            self._buckets.append(bucket)
        return self._buckets

    def _arrange_more(self, parameters: Sequence[nn.Parameter]) -> Sequence[GradientTransfer]:
        # Optimizers may have them already: they stay whole, and every rank updates them.
        return [*self._transfers, *buckets_of(parameters, self._max_bytes)]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        was_shown = self._shows_shards
        self._begin_forward()
        outputs = self.module(*inputs, **kwargs)
        self._end_forward(outputs, was_shown=was_shown)
        return outputs

    @torch.compiler.disable
    def _begin_forward(self) -> None:
        self._take_in_thawed()
        self._make_whole()
        # A module that has not been called may be one whose parameters others use.
        for number, buckets in enumerate(self._waited):
            if number not in self._called:
                _wait(buckets)
        self._called.clear()

    @torch.compiler.disable
    def _end_forward(self, outputs: Any, *, was_shown: bool) -> None:
        if not torch.is_grad_enabled():
            self._stale = True
            if was_shown:
                # An optimizer is yet to step, or has.
                self.wait_for_gathering()
                self._show_shards()
            return
        # A loss that was only looked at has no backward pass, and an optimizer steps after it.
        # Passes in no_sync() come one after another, and gather once.
        self._stale = self._synchronizes
        this = weakref.ref(self)

        def hide(_: Tensor) -> None:
            container = this()
            if container is not None:
                # A backward pass whose forward pass came before the last step's end.
                container._hide_shards()

        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(hide)

    def _make_whole(self) -> None:
        """Begin to gather the whole parameters, if shards may have changed.

        While they are shown, anybody may have written to them, and not optimizers alone.
        """
        if self._shows_shards or self._stale or self._gathered_version != self._version:
            self._hide_shards()
            self._stale, self._gathered_version = False, self._version
            self._gather()

    @property
    def _version(self) -> int:
        """Grows when optimizers or others write into shards, with elements or without."""
        return sum(shard._version for shard in self._shards.values())

    def finish_gradient_synchronization(self) -> None:
        # Parameters that no forward pass waited for must not arrive while the optimizer writes.
        self.wait_for_gathering()
        if not self._buckets or not self._synchronizes:
            return
        self._hide_shards()
        super().finish_gradient_synchronization()
        self._show_shards()

    def _gather(self) -> None:
        # In the order of the forward pass.
        for bucket in reversed(self._buckets):
            bucket.start_gathering()

    def wait_for_parameters(self) -> None:
        """Make whole parameters ready to be read; all ranks call it together."""
        self._stale = bool(self._buckets)
        self._make_whole()
        self.wait_for_gathering()
        self._stale = bool(self._buckets)

    def shards_have_changed(self) -> None:
        self._stale = bool(self._buckets)

    def wait_for_gathering(self) -> None:
        """Wait for all gathering that has begun."""
        _wait(self._buckets)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """The whole parameters; all ranks call it together."""
        was_shown = self._shows_shards
        self.wait_for_parameters()
        state = super().state_dict(*arguments, **options)
        if was_shown:
            self._show_shards()
        return state

    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Load whole parameters, on every rank."""
        was_shown = self._shows_shards
        self.wait_for_parameters()
        found = super().load_state_dict(*arguments, **options)
        if was_shown:
            self._show_shards()
        return found

    def _holders(self) -> Sequence[ZeroBucket]:
        return self._buckets

    def _wait_in_forward(self) -> None:
        """Make each block wait for its own parameters only."""
        buckets = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        this = weakref.ref(self)
        for number, (module, parameters) in enumerate(waiting_points(self.module)):
            needed = list(dict.fromkeys(buckets[p] for p in parameters if p in buckets))
            self._waited.append(needed)

            known = weakref.ref(module)

            def wait(
                called: nn.Module,
                _: Any,
                number: int = number,
                known: weakref.ref[nn.Module] = known,
            ) -> None:
                container = this()
                # Copies of a module have its hooks.
                if container is not None and called is known():
                    if container._shows_shards:
                        # The module is called in place of the container.
                        container._make_whole()
                        container._stale = True
                    container._called.add(number)
                    _wait(container._waited[number])

            module.register_forward_pre_hook(torch.compiler.disable(wait))


def _wait(buckets: Sequence[ZeroBucket]) -> None:
    for bucket in buckets:
        bucket.wait_for_parameters()


class Zero1(Zero):
    """Sharded optimizer state; memory for whole gradients, in buckets, is kept."""

    KEEPS_GRADIENTS = True


class Zero2(Zero):
    """Sharded optimizer state and gradients."""

    KEEPS_GRADIENTS = False
    IN_FLIGHT = 4
