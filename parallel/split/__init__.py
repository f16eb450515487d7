"""Attention on split sequences, as functions for programs of one's own.

    from parallel.split import position_ids, shard, zigzag_attention

    tokens = shard(tokens, "zigzag", dim=1)                 # [B, S] -> this rank's [B, S/P]
    positions = position_ids("zigzag", length=S)            # where they stand: for rotary angles
    o = zigzag_attention(q, k, v, causal=True)              # [B, S/P, H, D] over all ranks

Every choice of ``attention=`` that splits sequences is a function ``NAME_attention`` here, also
those of plugins, and :func:`split_attention` takes the name as an argument.
:func:`stream_attention` cuts a packed stream regardless of its sequences, :func:`split_sdpa` splits
the calls of PyTorch's attention inside a ``with``, and :func:`register_with_transformers` serves
models of Hugging Face. docs/library.md has a page on all of it. Modules are imported when
one of their names is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "bound_attention": "parallel.split.attention",
    "local_cu_seqlens": "parallel.split.parts",
    "next_token_labels": "parallel.split.parts",
    "position_ids": "parallel.split.parts",
    "register_with_transformers": "parallel.split.hugging_face",
    "release": "parallel.split.session",
    "scheme_names": "parallel.split.calls",
    "shard": "parallel.split.parts",
    "shard_stream": "parallel.split.stream_parts",
    "split_attention": "parallel.split.attention",
    "split_sdpa": "parallel.split.sdpa",
    "stream_attention": "parallel.split.stream",
    "stream_part": "parallel.split.stream_parts",
    "stream_position_ids": "parallel.split.stream_parts",
    "unshard": "parallel.split.parts",
    "unshard_stream": "parallel.split.stream_parts",
}

_SUFFIX = "_attention"

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """The functions, imported when first used (PEP 562); NAME_attention is one of scheme NAME."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name.endswith(_SUFFIX) and not name.startswith("_"):
        found = import_module("parallel.split.attention").function_of(name.removesuffix(_SUFFIX))
        if found is not None:
            # The next look-up finds it without coming here.
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    schemes = import_module("parallel.split.calls").scheme_names()
    return sorted({*globals(), *_HOMES, *(name + _SUFFIX for name in schemes)})
