"""A rank's part of whole tensors, as its scheme lays sequences out: shards, positions, labels.

``options`` are those of the scheme, where its layout depends on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.context.blocks.layouts import Layout
from parallel.split import packed_parts
from parallel.split.calls import scheme_of
from parallel.split.checks import Offsets
from parallel.split.offsets import LENGTHS
from parallel.split.session import Session, resolved, session_of

IGNORED = -100
"""The label that torch.nn.functional.cross_entropy leaves out."""


def shard(
    x: Tensor,
    scheme: str,
    *,
    dim: int,
    cu_seqlens: Offsets | None = None,
    pad_value: float | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    """This rank's part of ``x`` along ``dim``, where ``x`` is whole on every rank; differentiable.

    Args:
        scheme: the choice of ``attention=`` that will attend.
        dim: the dimension of tokens.
        cu_seqlens: offsets of the sequences of a packed batch, each of which is split by itself.
        pad_value: fills up lengths that do not divide, at the end of each sequence; such as 0 for
            tokens and -100 for labels. A dense batch's attention then needs ``length=``.

    Raises:
        ValueError: a length does not divide and there is no ``pad_value``, or lengths do not add
            up to the tokens of x.
    """
    layout, rank = _place(scheme, group, options)
    lengths = _with_tokens(x.shape[dim], cu_seqlens)
    if sum(lengths) != x.shape[dim]:
        raise ValueError(f"cu_seqlens ends at {sum(lengths)}: x has {x.shape[dim]} tokens")
    reason = packed_parts.why_padded(layout, lengths)
    if pad_value is None and reason is not None:
        raise ValueError(
            f"{reason}, as {scheme} over {layout.num_ranks} ranks needs: give pad_value="
        )
    return layout.shard_packed(x, lengths, rank, dim, pad_value or 0) if lengths else x


def unshard(
    x: Tensor,
    scheme: str,
    *,
    dim: int,
    length: int | None = None,
    cu_seqlens: Offsets | None = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> Tensor:
    """The whole tensor from all ranks' parts, without padding; the inverse of :func:`shard`.

    All ranks call it together, and all get the whole. It has no gradient.

    Args:
        length: tokens without padding of each sequence along ``dim``; all that there are if not
            given.

    Raises:
        ValueError: on all ranks, where they differ or hold other parts than those.
    """
    session = session_of(group)
    try:
        layout, _ = _place(scheme, group, options)
        whole = x.shape[dim] * layout.num_ranks if length is None else length
        lengths = _with_tokens(whole, cu_seqlens)
        expected = packed_parts.packed_len(layout, lengths)
        if x.shape[dim] != expected:
            raise ValueError(
                f"x has {x.shape[dim]} tokens along dim {dim}, and a part of {sum(lengths)} has "
                f"{expected}"
            )
    except Exception as error:
        session.refuse(error)
    parts = gathered(session, x, f"unshard {scheme} {lengths}")
    return layout.unshard_packed(parts, lengths, dim) if lengths else x


def position_ids(
    scheme: str,
    *,
    length: int | None = None,
    cu_seqlens: Offsets | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Tensor:
    """The position of each of this rank's tokens in its own sequence, int64 [tokens].

    Args:
        length: tokens of each whole sequence of a dense batch; or
        cu_seqlens: offsets of the whole sequences of a packed batch.
        device: that of ``cu_seqlens``, or the CPU, if not given.

    Those of padding run on past the end of their sequence.
    """
    layout, rank = _place(scheme, group, options)
    if (length is None) == (cu_seqlens is None):
        raise ValueError("position_ids: give length= or cu_seqlens=")
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    lengths = _with_tokens(length or 0, cu_seqlens)
    if cu_seqlens is None and lengths:
        return layout.positions(rank, lengths[0]).to(device)
    return packed_parts.packed_positions(layout, rank, lengths).to(device)


def local_cu_seqlens(
    scheme: str, cu_seqlens: Offsets, *, group: dist.ProcessGroup | None = None, **options: Any
) -> Tensor:
    """Offsets of this rank's parts, padding included, int32 [sequences + 1]; equal on all ranks."""
    layout, _ = _place(scheme, group, options)
    packed_parts.check_local_offsets(layout)
    local = [layout.local_len(length) for length in _lengths(0, cu_seqlens)]
    device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else None
    return torch.tensor([0, *itertools.accumulate(local)], dtype=torch.int32, device=device)


def next_token_labels(
    tokens: Tensor,
    *,
    dim: int = -1,
    cu_seqlens: Offsets | None = None,
    ignore_index: int = IGNORED,
) -> Tensor:
    """The token that follows each one; ``ignore_index`` for the last of each sequence.

    To be computed of the whole sequences, before they are split: a part's next token may be on
    another rank.

    Args:
        tokens: whole sequences along ``dim``.
        cu_seqlens: offsets of the sequences of a packed batch.
    """
    if not tokens.shape[dim]:
        return tokens.clone()
    labels = tokens.roll(-1, dim)
    ends = itertools.accumulate(_lengths(tokens.shape[dim], cu_seqlens))
    last = torch.tensor([end - 1 for end in ends if end > 0], device=tokens.device)
    return labels.index_fill(dim, last, ignore_index)


def gathered(session: Session, x: Tensor, what: str) -> list[Tensor]:
    """``x`` of every rank, in rank order. Raises ValueError on all ranks if their shapes differ."""
    facts = f"{what}: {list(x.shape)} {str(x.dtype)[6:]}"
    session.agreed(facts, lambda: True, lambda: facts, compare="new")
    own = x.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(session.num_ranks)]
    dist.all_gather(parts, own, group=session.group)
    return parts


def _place(
    scheme: str, group: dist.ProcessGroup | None, options: dict[str, Any]
) -> tuple[Layout, int]:
    group = resolved(group)
    layout = scheme_of(scheme, tuple(options.items())).layout(dist.get_world_size(group))
    return layout, dist.get_rank(group)


def _lengths(length: int, cu_seqlens: Offsets | None) -> Sequence[int]:
    return [length] if cu_seqlens is None else LENGTHS.of(cu_seqlens, "cu_seqlens")


def _with_tokens(length: int, cu_seqlens: Offsets | None) -> list[int]:
    """Lengths of the sequences that have tokens; not every layout expects others."""
    return [length for length in _lengths(length, cu_seqlens) if length]
