"""Decoding in Triton: attention of a few new tokens over a cache, with rotary and append.

``dense`` attends to keys and values (flash decode), ``latent`` to compressed latents, absorbed;
``steps`` takes the steps of a model, by these kernels or by PyTorch's operators. What both kinds
of kernels share lies here: ``schedule`` divides the keys of a ragged batch into equal shares,
``pieces`` merges the partial results of shares, ``cache_tiles`` loads tiles from contiguous and
paged caches and rotates rows, ``call`` checks a call, ``configs`` has tile sizes, ``workspace``
memory for partial results, and ``plans`` what is kept from one launch to the next.
Nothing here imports torch or triton until one of the names below is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Rotary": "kernels.rotary",
    "flash_decode": "kernels.decode.dense.launch",
    "latent_append": "kernels.decode.latent.append",
    "mla_decode": "kernels.decode.latent.launch",
    "why_not": "kernels.decode.plans",
}

__all__ = ["Rotary", "flash_decode", "latent_append", "mla_decode", "why_not"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
