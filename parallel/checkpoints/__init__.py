"""Checkpoints that every rank writes its own part of, and any number of ranks load.

``save_checkpoint`` and ``load_checkpoint`` do it over ``torch.distributed.checkpoint``, and
``save_checkpoint_in_background`` while training goes on;
``sharded_state_dict`` is the state that they hand to it, by the names that PyTorch's own
``torch.distributed.checkpoint.state_dict`` uses. ``parts`` describes a rank's part of a tensor.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "load_checkpoint": "parallel.checkpoints.folders",
    "save_checkpoint": "parallel.checkpoints.folders",
    "save_checkpoint_in_background": "parallel.checkpoints.background",
    "sharded_state_dict": "parallel.checkpoints.state",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """The public functions, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
