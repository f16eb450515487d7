"""What calls of one kind have in common, kept from one call to the next.

A packing is told by the identity of its offsets, since comparing lengths would wait for the device
in every call. The offsets are kept with what is known of them, so that no others get their id.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

MOST_KEPT = 16
"""Kinds of calls: a training run packs each batch anew, and its layers share the packing."""

T = TypeVar("T")


def identity_of(offsets: Tensor) -> Hashable:
    """A key that is another one for other offsets, and for the same ones after a change in place.

    Tensors made in inference mode count no changes; their values are looked at, which waits for
    the device.
    """
    if offsets.is_inference():
        return tuple(offsets.tolist())
    return id(offsets), offsets._version


class Kept(Generic[T]):
    """The values of the last kinds of calls, and of all that a CUDA graph was captured with."""

    def __init__(self) -> None:
        self._values: dict[Hashable, tuple[Tensor | None, T]] = {}
        self._in_graphs: dict[int, tuple[Tensor | None, T]] = {}
        """A replay reads tensors of these, such as places of tokens, wherever they were."""

    def get(self, kind: Hashable, device: torch.device) -> T | None:
        """The value of this kind of call on a device, if it is kept."""
        found = self._values.get(kind)
        if found is None:
            return None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._in_graphs[id(found)] = found
        return found[1]

    def put(self, kind: Hashable, value: T, offsets: Tensor | None) -> T:
        """Keep the value of a kind of call, with the offsets of its packing."""
        if len(self._values) >= MOST_KEPT:
            self._values.pop(next(iter(self._values)))
        self._values[kind] = offsets, value
        return value
