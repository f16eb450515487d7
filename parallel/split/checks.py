"""Checks of a call before any rank communicates: shapes, dtypes, offsets, padding.

Each raises ValueError in one line, which :class:`parallel.split.session.Session` makes all ranks
raise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kernels.problem import Mask
from parallel.context.blocks.layouts import Layout
from parallel.split import packed_parts

TENSOR_LAYOUTS = ("bshd", "bhsd")
"""Orders of the dimensions of dense tensors: batch, sequence, heads, head_dim."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Offsets: TypeAlias = Tensor | Sequence[int]
"""cu_seqlens: 0, then the end of each sequence."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Sizes:
    """The sizes of q, k and v on this rank."""

    batch_size: int
    num_tokens: int
    """This rank's tokens: of each sequence of a dense batch, or of the packed batch."""
    num_heads: int
    num_kv_heads: int
    head_dim: int


def sizes_of(q: Tensor, k: Tensor, v: Tensor, *, layout: str, packed: bool) -> Sizes:
    """Raises ValueError unless q, k and v fit together."""
    if layout not in TENSOR_LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be one of {', '.join(TENSOR_LAYOUTS)}")
    form = "[T, H, D], packed" if packed else f"[{', '.join(layout.upper())}], layout={layout}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != (3 if packed else 4):
            raise ValueError(f"{name} has shape {list(x.shape)}: must be {form}")
        if x.dtype not in DTYPES:
            raise ValueError(
                f"{name} is {_name(x.dtype)}: must be one of {', '.join(map(_name, DTYPES))}"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v are {_name(q.dtype)}, {_name(k.dtype)} and {_name(v.dtype)}: must be of "
            "one dtype, or under torch.autocast, which casts them"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}: must be on one")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {list(k.shape)}, v {list(v.shape)}: must be the same")
    tokens, heads = (0, 1) if packed else (layout.index("s"), layout.index("h"))
    found = Sizes(
        batch_size=1 if packed else q.shape[0],
        num_tokens=q.shape[tokens],
        num_heads=q.shape[heads],
        num_kv_heads=k.shape[heads],
        head_dim=q.shape[-1],
    )
    if q.shape[tokens] != k.shape[tokens]:
        raise ValueError(
            f"q has {q.shape[tokens]} tokens, k {k.shape[tokens]}: queries and keys of split "
            "sequences are the same tokens"
        )
    if q.shape[-1] != k.shape[-1] or (not packed and q.shape[0] != k.shape[0]):
        raise ValueError(f"q has shape {list(q.shape)}, k {list(k.shape)}: must be {form}")
    if not found.num_kv_heads or found.num_heads % found.num_kv_heads:
        raise ValueError(
            f"q has {found.num_heads} heads, k and v {found.num_kv_heads}: must divide those of q"
        )
    if not q.numel():
        raise ValueError(f"q has shape {list(q.shape)}: no tokens to attend with")
    return found


def check_mask(*, causal: bool, window: int | None, prefix_len: int, softcap: float | None) -> None:
    """Raise ValueError unless what a call asks for makes sense."""
    Mask(causal=causal, window=window, prefix_len=prefix_len)
    is_number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if softcap is not None and not (is_number and 0 < softcap < float("inf")):
        raise ValueError(f"softcap={softcap}: must be a positive number")


def check_sinks(sinks: Tensor | None, num_heads: int, device: torch.device) -> None:
    """Raise ValueError unless there is a logit for each query head, where there are any."""
    if sinks is None:
        return
    if not sinks.is_floating_point() or sinks.shape != (num_heads,):
        raise ValueError(
            f"sinks is {_name(sinks.dtype)} {list(sinks.shape)}: must be a number for each of the "
            f"{num_heads} query heads, on all ranks"
        )
    if sinks.device != device:
        raise ValueError(f"sinks is on {sinks.device}, q on {device}: must be on one")


def form_of_sinks(sinks: Tensor | None) -> tuple[Any, ...] | None:
    """What tells calls with different sinks apart; ValueError if they are no tensor."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor):
        raise ValueError(
            f"sinks is {type(sinks).__name__}: must be a tensor with a number for each query head"
        )
    return tuple(sinks.shape), _name(sinks.dtype), sinks.device


def lengths_of(offsets: Offsets, name: str) -> tuple[int, ...]:
    """Lengths of sequences from their offsets; waits for the device that holds a tensor."""
    if isinstance(offsets, Tensor):
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name} is {_name(offsets.dtype)} {list(offsets.shape)}: must be int32 or int64 "
                "[sequences + 1]"
            )
        offsets = offsets.tolist()
    ends = [int(end) for end in offsets]
    lengths = tuple(end - start for start, end in itertools.pairwise(ends))
    if len(ends) < 2 or ends[0] != 0 or min(lengths) < 0:
        raise ValueError(f"{name} is {_short(ends)}: must begin at 0 and not decrease")
    return lengths


def check_keys(
    lengths: tuple[int, ...], cu_seqlens_k: Offsets | None, name: str = "cu_seqlens"
) -> None:
    """Raise ValueError if the offsets of keys are given and differ from those of queries."""
    if cu_seqlens_k is None:
        return
    of_keys = lengths_of(cu_seqlens_k, "cu_seqlens_k")
    if of_keys != lengths:
        raise ValueError(
            f"cu_seqlens_k has sequences of {_short(of_keys)}, {name} of {_short(lengths)}: "
            "queries and keys of split sequences are the same tokens"
        )


def whole_lengths(local: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Lengths of whole sequences from those of this rank's parts, which hold no padding."""
    packed_parts.check_local_offsets(layout)
    for length in local:
        _check_chunks(length, layout, "local_cu_seqlens has a part of")
    return tuple(length * layout.num_ranks for length in local)


def check_packed_part(
    num_tokens: int, lengths: tuple[int, ...], layout: Layout, *, causal: bool
) -> None:
    """Raise ValueError unless a rank holds its part of sequences of these lengths."""
    expected = packed_parts.packed_len(layout, lengths)
    if num_tokens != expected:
        raise ValueError(_wrong_tokens(num_tokens, expected, lengths, layout.num_ranks))
    padded = [length for length in lengths if length % layout.multiple]
    if padded and not causal:
        raise ValueError(
            f"causal=False: a sequence of {padded[0]} tokens does not divide by {layout.multiple}, "
            "and without a causal mask its padding would be attended to"
        )


def check_stream_part(num_tokens: int, lengths: tuple[int, ...], num_ranks: int) -> None:
    """Raise ValueError unless a rank holds an equal part of the whole stream."""
    expected = -(-sum(lengths) // num_ranks)
    if num_tokens != expected:
        raise ValueError(_wrong_tokens(num_tokens, expected, lengths, num_ranks))


def _wrong_tokens(found: int, expected: int, lengths: Sequence[int], num_ranks: int) -> str:
    if sum(lengths) == found:
        return (
            f"cu_seqlens ends at {found}, the tokens of one rank's part: must count those of whole "
            "sequences, over all ranks"
        )
    return (
        f"q has {found} tokens, and one of {num_ranks} parts of sequences of {_short(lengths)} has "
        f"{expected}: lengths must add up"
    )


def check_dense_part(num_tokens: int, length: int | None, layout: Layout) -> int:
    """The length of whole sequences. Raises ValueError unless a rank holds its part of them."""
    _check_chunks(num_tokens, layout, "q has")
    if length is None:
        return num_tokens * layout.num_ranks
    if length < 1 or layout.local_len(length) != num_tokens:
        raise ValueError(
            f"length={length}: its part on one of {layout.num_ranks} ranks has "
            f"{layout.local_len(length)} tokens, and q has {num_tokens}"
        )
    return length


def _check_chunks(num_tokens: int, layout: Layout, what: str) -> None:
    """Raise ValueError unless a rank can hold so many tokens of a sequence without padding."""
    if layout.local_len(num_tokens * layout.num_ranks) != num_tokens:
        chunks = layout.multiple // layout.num_ranks
        raise ValueError(
            f"{what} {num_tokens} tokens: a {layout.name} part is made of {chunks} equal chunks"
        )


def _short(values: Sequence[int]) -> str:
    """A list in words, its middle left out."""
    words = [str(value) for value in values]
    return ", ".join(words if len(words) <= 8 else [*words[:6], "...", words[-1]])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
