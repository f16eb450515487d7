"""FlashAttention in Triton: a public function, and two implementations under it.

Four rooms, each of which imports only those before it:

- ``call``: the arguments of a call, and the facts that follow from them.
- ``any_gpu``: FlashAttention-2 in Triton for any CUDA GPU. Read ``tiles`` (what a tile is),
  ``forward``, ``backward``, ``configs`` (tile sizes), ``chunks`` (calls of few tiles), ``launch``.
- ``hopper``: FlashAttention in Gluon for compute capability 9.0. Read ``tiles``,
  ``forward_tile`` (what both forward kernels compute of a tile), ``forward``, ``forward_small``
  (several programs on a multiprocessor), ``backward``, ``rows`` (kernels around
  the backward pass), ``program_size`` and ``schedule`` (how the work is cut up), ``plans``,
  ``launch``. docs/kernels.md has diagrams of the first and the backward one.
- this one: ``dispatch`` (chooses an implementation), ``operator`` (entry points, also for
  torch.compile), ``native`` (the compiled autograd node) and ``function`` (autograd).

``pytorch`` is the same algorithm in PyTorch, to read. Nothing here imports torch or triton until
one of the names below is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "FlashAttentionPyTorch": "kernels.flash.pytorch",
    "FlashAttentionTriton": "kernels.flash.function",
    "flash_attention": "kernels.flash.function",
    "validate": "kernels.flash.call.problem",
}

__all__ = ["FlashAttentionPyTorch", "FlashAttentionTriton", "flash_attention", "validate"]


def __getattr__(name: str) -> Any:
    """The public functions, imported when first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
