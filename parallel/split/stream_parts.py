"""A packed stream cut into equal parts, regardless of where its sequences begin and end.

With P ranks and T tokens rank r holds tokens [r n, (r+1) n), n = T/P rounded up: a sequence may lie
on several ranks, and a rank may hold several sequences. T is padded once, at the end of the stream;
the padding belongs to no sequence. So Llama 3 was trained (Grattafiori et al. 2024, section 3.3.2),
and so ring-flash-attention's llama3 functions cut.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import Packing
from kernels.problem import Mask
from parallel.context.blocks.layouts import Contiguous
from parallel.split.checks import Offsets
from parallel.split.offsets import LENGTHS
from parallel.split.parts import gathered
from parallel.split.session import resolved, session_of


@dataclass(kw_only=True, slots=True, frozen=True)
class StreamPart:
    """A rank's queries, and the keys of the whole stream that they see."""

    packing: Packing | None
    """Of the sequences that the part touches: its queries, and keys counted from ``keys.start``;
    causal masks are aligned to the bottom right. None for a part of padding alone."""
    queries: slice
    """The part's real tokens in the stream."""
    keys: slice
    """The keys that they see, in the stream."""


def stream_part(
    cu_seqlens: Offsets,
    *,
    causal: bool,
    window: int | None = None,
    prefix_len: int = 0,
    rank: int | None = None,
    num_ranks: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> StreamPart:
    """What a rank computes of a stream: this one in the group, unless both numbers are given.

    Args:
        cu_seqlens: offsets of the stream's sequences: 0, then the end of each.
        window, prefix_len: with ``causal``, of :func:`parallel.split.stream_attention`.
        device: that of ``cu_seqlens``, or the CPU, if not given.
    """
    if rank is None or num_ranks is None:
        group = resolved(group)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    lengths = LENGTHS.of(cu_seqlens, "cu_seqlens")
    mask = Mask(causal=causal, window=window, prefix_len=prefix_len)
    return part_of(lengths, mask, rank, num_ranks, torch.device(device))


def part_of(
    lengths: tuple[int, ...], mask: Mask, rank: int, num_ranks: int, device: torch.device
) -> StreamPart:
    """:func:`stream_part` of sequences of these lengths.

    Raises ValueError for a window without a causal mask.
    """
    if mask.window is not None and not mask.causal:
        raise ValueError(f"window={mask.window}: needs causal=True in a stream")
    total = sum(lengths)
    local = -(-total // num_ranks)
    start, stop = (min(edge * local, total) for edge in (rank, rank + 1))
    queries, keys = [], []
    for first, end in itertools.pairwise([0, *itertools.accumulate(lengths)]):
        begin, last = max(first, start), min(end, stop)
        if begin < last:
            queries.append(last - begin)
            # Keys that all queries see may lie beyond the last query, to whose position the mask
            # is not aligned then; it hides none of them.
            seen = max(last, min(end, first + mask.prefix_len)) if mask.causal else end
            unseen = first if mask.window is None else max(first, begin - mask.window + 1)
            keys.append((unseen, seen))
    if not queries:
        return StreamPart(packing=None, queries=slice(start, stop), keys=slice(start, start))
    key_lengths = [end - first for first, end in keys]
    packing = Packing(
        cu_seqlens_q=_offsets(queries, device),
        cu_seqlens_k=_offsets(key_lengths, device),
        max_q_len=max(queries),
        max_kv_len=max(key_lengths),
    )
    return StreamPart(
        packing=packing, queries=slice(start, stop), keys=slice(keys[0][0], keys[-1][1])
    )


def shard_stream(
    x: Tensor,
    *,
    dim: int = 0,
    pad_value: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """This rank's part of a stream that is whole on every rank; differentiable.

    Args:
        dim: the dimension of tokens.
        pad_value: fills up the last ranks' parts where the ranks do not divide the tokens.

    Raises:
        ValueError: they do not, and there is no ``pad_value``.
    """
    group = resolved(group)
    num_ranks = dist.get_world_size(group)
    if pad_value is None and x.shape[dim] % num_ranks:
        raise ValueError(
            f"{x.shape[dim]} tokens do not divide by {num_ranks} ranks: give pad_value="
        )
    layout = Contiguous(num_ranks=num_ranks)
    return layout.shard(x, dist.get_rank(group), dim, pad_value or 0)


def unshard_stream(
    x: Tensor, *, length: int | None = None, dim: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """The whole stream from all ranks' parts, ``length`` tokens if given; it has no gradient.

    All ranks call it together. Raises ValueError on all of them where their parts differ.
    """
    session = session_of(group)
    parts = gathered(session, x, f"unshard_stream {length}")
    whole = torch.cat(parts, dim)
    return whole if length is None else whole.narrow(dim, 0, length)


def stream_position_ids(
    cu_seqlens: Offsets,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """The position of each of this rank's tokens in its own sequence, int64 [tokens]; 0 of padding.

    Args:
        device: that of ``cu_seqlens``, or the CPU, if not given.
    """
    lengths = LENGTHS.of(cu_seqlens, "cu_seqlens")
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    whole = torch.cat([torch.arange(length) for length in lengths])
    return shard_stream(whole, pad_value=0, group=group).to(device)


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)
