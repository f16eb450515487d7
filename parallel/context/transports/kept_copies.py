"""Copies out of memory that peers write, prepared once for calls that are alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from parallel.context.transports.peer_memory import PeerMemory

T = TypeVar("T")

_KEPT = 32
"""Kinds of calls: twice as many as :data:`parallel.context.blocks.kept.MOST_KEPT`, for forward and
backward passes."""


class KeptCopies(Generic[T]):
    """What was prepared for the buffers of one purpose, by the kind of call.

    It holds views of the buffers, and goes with them: before larger ones are made.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[PeerMemory, dict[Hashable, T]]
        self._made = weakref.WeakKeyDictionary()

    def get(self, memory: PeerMemory, kind: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gave for such a call, the first time."""
        made = self._made.setdefault(memory, {})
        found = made.get(kind)
        if found is None:
            if len(made) >= _KEPT:
                made.pop(next(iter(made)))
            # An evaluation may come first, and its inference tensors are no part of a graph.
            with torch.inference_mode(False), torch.no_grad():
                found = made[kind] = make()
        return found
