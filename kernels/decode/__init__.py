"""Attention of new tokens over a cache, in Triton: flash decode, absorbed latent attention.

Read in this order: ``rotary`` (the angles a call brings), ``schedule`` (how the keys of a ragged
batch are divided into equal shares), ``pieces`` (a share's partial results, and who merges
them), ``cache_tiles`` (loading from contiguous and paged caches, rotating), ``flash_kernel`` and
``latent_kernel`` (the two kernels), ``call`` and ``latent_call`` (what is refused), ``configs``
(tile sizes), ``workspace`` (memory for partial results), ``plans`` (what is kept from one launch
to the next) and ``launch`` (the two entry points).
Then ``hopper_latent_kernel``, in Gluon, with ``merge_kernel`` and ``hopper_latent``, which
launches them; and ``latent_append_kernel`` with ``append``, which launches it before
latent attention. Nothing here imports torch or triton until one of the names below is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "Rotary": "kernels.rotary",
    "flash_decode": "kernels.decode.launch",
    "latent_append": "kernels.decode.latent.append",
    "mla_decode": "kernels.decode.launch",
    "why_not": "kernels.decode.launch",
}

__all__ = ["Rotary", "flash_decode", "latent_append", "mla_decode", "why_not"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
