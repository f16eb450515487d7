"""PyTorch's scaled_dot_product_attention over split sequences, while inside a ``with``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.split import calls
from parallel.split.attention import split_attention
from parallel.split.session import session_of

_NAME = "scaled_dot_product_attention"


@contextlib.contextmanager
def split_sdpa(
    scheme: str,
    *,
    length: int | None = None,
    cu_seqlens: Any = None,
    group: dist.ProcessGroup | None = None,
    compare: str = "new",
    **options: Any,
) -> Iterator[None]:
    """While inside, ``torch.nn.functional.scaled_dot_product_attention`` attends over the group.

    Its q, k and v [B, H, S, D] are then this rank's parts of split sequences, and ``is_causal``
    means positions in the whole ones. Gradients follow, also where backward runs after the
    ``with``; but a forward pass that backward computes again (activation checkpointing) needs to be
    inside. Code that has imported the function by its name beforehand is not reached.

    Args:
        scheme, length, group, compare, options: those of :func:`parallel.split.split_attention`.
        cu_seqlens: offsets of whole sequences that are packed into a batch of one.

    What the scheme holds stays with the group, until :func:`parallel.split.release`. A call with a
    mask tensor, with dropout, or with other keys than its queries' raises ValueError on all ranks.
    """
    original: Callable[..., Tensor] = getattr(torch.nn.functional, _NAME)

    def attend(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        arguments |= {"group": group, "compare": compare, **options}
        if cu_seqlens is None:
            o: Tensor = split_attention(scheme, q, k, v, layout="bhsd", length=length, **arguments)
            return o
        packed = (as_packed(x) for x in (q, k, v))
        o = split_attention(scheme, *packed, length=length, cu_seqlens=cu_seqlens, **arguments)
        return o.transpose(0, 1).unsqueeze(0)

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if calls.is_attending():
            # A kernel that calls the function itself.
            more = {"scale": scale, "enable_gqa": enable_gqa}
            return original(query, key, value, attn_mask, dropout_p, is_causal, **more)
        reason = why_not(query, key, attn_mask, dropout_p, enable_gqa)
        if reason is not None:
            session_of(group).refuse(f"split_sdpa: {reason}")
        return attend(query, key, value, causal=is_causal, scale=scale)

    setattr(torch.nn.functional, _NAME, attention)
    try:
        yield
    finally:
        setattr(torch.nn.functional, _NAME, original)


def as_packed(x: Tensor) -> Tensor:
    """[1, H, T, D] as the packed [T, H, D]; other shapes as they are, for the checks to name."""
    return x.squeeze(0).transpose(0, 1) if x.dim() == 4 and x.shape[0] == 1 else x


def why_not(
    q: Tensor, k: Tensor, mask: Tensor | None, dropout: float, enable_gqa: bool
) -> str | None:
    """What a call asks for that attention on split sequences does not have, in one line."""
    if mask is not None:
        return "takes no mask tensor; a causal mask is is_causal=True"
    if dropout:
        return f"has no dropout; it was asked for {dropout}"
    if not enable_gqa and q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1]:
        return f"{q.shape[1]} query heads and {k.shape[1]} key heads need enable_gqa=True"
    return None
