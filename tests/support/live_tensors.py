"""Bytes of the tensors that live while a piece of code runs, and the most at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts each storage that an operation made, until it is freed.

    Args:
        inside: bytes that an operation holds in itself, given it and its arguments.
    """

    def __init__(self, inside: Callable[[Any, tuple[Any, ...]], int] = lambda op, args: 0) -> None:
        super().__init__()
        self.bytes = 0
        self.peak = 0
        self._inside = inside
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = op(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.bytes + self._inside(op, args))
        return result

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing for the storages of tensors that were there before."""
        for x in tensors:
            self._sizes[x.untyped_storage()._cdata] = 0

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)
