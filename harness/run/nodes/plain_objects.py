"""What torch.distributed's collectives of Python objects may bring: plain values and tensors.

They send pickles, and a pickle runs any function that it names. Whoever joins a group in a rank's
place could so run code in all others. Workers therefore read them with :class:`PlainUnpickler`,
which knows the few names that dictionaries of tensors need and refuses every other.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d


def restrict_object_collectives() -> None:
    """Have every collective of objects in this process read plain values and tensors alone."""
    if not hasattr(c10d, "_unpickler"):
        raise RuntimeError(
            f"torch {torch.__version__} reads objects of other ranks in a way that attnbench does "
            "not know how to restrict; use a version that attnbench is tested with"
        )
    c10d._unpickler = PlainUnpickler


def _load_storage(data: bytes) -> Any:
    """torch.storage._load_from_bytes, which loads any pickle."""
    return torch.load(io.BytesIO(data), weights_only=True)


_KNOWN: dict[tuple[str, str], Any] = {
    ("builtins", "complex"): complex,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _load_storage,
}


class PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, tuples, sets, numbers, text, bytes and tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(
            f"a rank sent an object of {module}.{name}; ranks exchange plain values and tensors"
        )
