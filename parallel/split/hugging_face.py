"""Split attention for models of Hugging Face transformers, which needs not be installed.

A model calls ``attention(module, query, key, value, attention_mask, scaling=..., dropout=...)``
with [B, H, S, D] and gets ([B, S, H, D], weights); the function is found in transformers'
AttentionInterface under the model's ``attn_implementation`` (transformers 4.48 and newer).
Transformers makes no mask for a name that has no mask function.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import Tensor

from parallel.split.sdpa import as_packed, why_not
from parallel.split.session import Session, session_of

AttentionFunction = Callable[..., tuple[Tensor, None]]


def register_with_transformers(
    attend: Callable[..., Any],
    *,
    name: str | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> str:
    """Make a function of :mod:`parallel.split` a choice of ``attn_implementation=``.

    Args:
        attend: such as ``zigzag_attention`` or ``stream_attention``.
        name: how models choose it; the function's own name if not given.
        options: passed to ``attend`` with each call, such as ``kernel="flash_triton"``.

    Returns:
        The name. Raises ValueError where transformers, or a version with AttentionInterface, is
        not installed.
    """
    try:
        interface = import_module("transformers").AttentionInterface
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"transformers with an AttentionInterface (4.48 or newer) is needed: {error}"
        ) from error
    name = name or str(getattr(attend, "__name__", "split_attention"))
    interface.register(name, attention_function(attend, group=group, **options))
    return name


def attention_function(
    attend: Callable[..., Any], *, group: dist.ProcessGroup | None = None, **options: Any
) -> AttentionFunction:
    """``attend`` in the form that models of transformers call.

    A model's ``cu_seq_lens_q=`` are the offsets of whole sequences over all ranks, packed into a
    batch of one; ``position_ids=`` must be those of the split tokens, which the model's rotary
    angles follow: where models tell them, positions that begin at 0 on every rank are refused, at
    each new shape. A model's ``sliding_window=``, ``softcap=`` and ``s_aux=`` are passed on,
    the last as sinks; masks and dropout are refused on all ranks.
    """

    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        session = session_of(group)
        reason = why_not(query, key, attention_mask, dropout, enable_gqa=True)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        window = more.get("sliding_window")
        if window is not None and window >= query.shape[-2] * session.num_ranks:
            window = None
        reason = reason or _why_not_more(more, window, causal)
        if reason is not None:
            session.refuse(f"attn_implementation: {reason}")
        arguments: dict[str, Any] = {"causal": causal, "scale": scaling, "group": group, **options}
        asked = {"window": window, "softcap": more.get("softcap"), "sinks": more.get("s_aux")}
        arguments |= {name: value for name, value in asked.items() if value is not None}
        if cu_seq_lens_q is None:
            _check_positions(session, more.get("position_ids"), query)
            o = attend(query, key, value, layout="bhsd", **arguments)
            return o.transpose(1, 2).contiguous(), None
        o = attend(
            *(as_packed(x) for x in (query, key, value)),
            cu_seqlens=cu_seq_lens_q,
            cu_seqlens_k=cu_seq_lens_k,
            **arguments,
        )
        return o.unsqueeze(0), None

    return attention


def _check_positions(session: Session, positions: Tensor | None, query: Tensor) -> None:
    """Raise ValueError on all ranks if one takes its part for the beginning of the sequences.

    A model that is given no positions counts from 0.
    """

    def check() -> bool:
        # Beyond the first rank no part of any layout has the first token.
        if session.rank and positions is not None and bool((positions[..., 0] == 0).all()):
            raise ValueError(
                "position_ids begin at 0: give the model those of split tokens, such as "
                "parallel.split.position_ids has"
            )
        return True

    shape = tuple(query.shape)
    kind = ("positions", shape, query.device)
    session.agreed(kind, check, lambda: f"queries {list(shape)} of a model", compare="new")


def _why_not_more(more: dict[str, Any], window: int | None, causal: bool) -> str | None:
    """What a model asks for that is not had: a bias, or a window whose meaning models differ in."""
    if window is not None and not causal:
        return f"has no sliding window without a causal mask; it was asked for {window} tokens"
    for key in ("position_bias", "head_mask"):
        if more.get(key) is not None:
            return f"has no {key}, which the model passes"
    return None
