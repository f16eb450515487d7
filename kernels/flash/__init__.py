"""FlashAttention in Triton: kernels, their configurations, and what chooses between them.

Read in this order: ``tiles`` (what a tile is), ``forward_kernel`` and ``backward_kernels``
(FlashAttention-2 for any CUDA GPU), ``problem`` (one call in facts, and what is refused),
``configs`` (tile sizes), ``plain`` (launches those kernels), ``dispatch`` (chooses an
implementation), ``operator`` (the entry points, also for torch.compile) and ``function``
(autograd). Then the Hopper kernels, in Gluon: ``hopper_tiles`` (what they share),
``hopper_forward``, ``pairing`` (how many query tiles its programs take), ``hopper_backward`` and
``hopper_rows`` (what runs around it), and ``hopper``, which launches them; ``native`` and
``native.cpp``, their gradients without Python. Nothing here imports torch or triton until one of
the names below is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "FlashTriton": "kernels.flash.function",
    "flash_attention": "kernels.flash.function",
    "validate": "kernels.flash.problem",
}

__all__ = ["FlashTriton", "flash_attention", "validate"]


def __getattr__(name: str) -> Any:
    """The public functions, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
