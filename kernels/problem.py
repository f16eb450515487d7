"""Attention calls: the sizes of one, its mask and scale, and the packing of its batch.

Tensors are ``[batch, heads, seq, head_dim]`` (B, H, S, D); lse, the natural-log log-sum-exp of
the scaled scores, is float32 ``[B, H, S]``. Values, and o and its gradient, may have fewer columns
than keys. Masks are aligned to the bottom right: with S_q
queries and S_k keys, a causal mask shows query i the keys 0 .. i + S_k - S_q (:class:`Mask`). A
query that sees no key has output zero, lse minus infinity, and no gradient.

A packed batch has sequences of different lengths end to end, ``[tokens, heads, head_dim]``
(T, H, D) with lse ``[H, T]``, and a :class:`Packing` that says where each begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MASKS = ("window", "prefix_len", "softcap", "sinks")
"""What a call may ask for besides a causal mask, as fields and options are named."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Mask:
    """The keys that each query sees: one range of them, whose ends never move to the left.

    Of S_q queries and S_k keys, query i stands at position p = i + S_k - S_q + shift among the
    keys. Without a mask it sees all keys; with a causal one those up to p.
    """

    causal: bool
    window: int | None = None
    """Keys at a distance of at least this many positions from p are hidden: with a causal mask a
    query sees its own key and window - 1 before."""
    prefix_len: int = 0
    """With a causal mask, the first keys that every query sees (prefix-LM); not with a window."""
    shift: int = 0
    """Positions by which the queries stand later than at the bottom right; for parts of
    sequences, whose keys may lie elsewhere."""

    def __post_init__(self) -> None:
        for name, value in (("window", self.window or 0), ("prefix_len", self.prefix_len)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value}: must be a whole number")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: must be at least 1")
        if self.prefix_len < 0:
            raise ValueError(f"prefix_len={self.prefix_len}: must be at least 0")
        if self.prefix_len and self.window is not None:
            raise ValueError(
                f"prefix_len={self.prefix_len}: cannot be combined with window={self.window}"
            )
        if self.prefix_len and not self.causal:
            raise ValueError(
                f"prefix_len={self.prefix_len}: needs a causal mask, since without one every "
                "query sees all keys"
            )

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than a causal mask aligned to the bottom right, or none."""
        return self.window is None and not self.prefix_len and not (self.causal and self.shift)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Keys left and right of the diagonal that a query sees, as libraries name a window.

        The diagonal is aligned to the bottom right, without the shift; None is all keys of a side.
        A negative number leaves out the diagonal too. A prefix is no such band.
        """
        left = None if self.window is None else self.window - 1 - self.shift
        if self.causal:
            return left, self.shift
        return left, None if self.window is None else self.window - 1 + self.shift

    def keys(self, query: int, q_len: int, kv_len: int) -> tuple[int, int]:
        """The keys [start, stop) that a query sees; empty ranges have stop <= start."""
        position = query + kv_len - q_len + self.shift
        start, stop = 0, kv_len
        if self.causal:
            stop = min(kv_len, max(position + 1, self.prefix_len))
        elif self.window is not None:
            stop = min(kv_len, position + self.window)
        if self.window is not None:
            start = max(0, position - self.window + 1)
        return start, max(stop, 0)

    def leaves_empty_rows(self, q_len: int, kv_len: int) -> bool:
        """Whether a query sees no key; where any does not, the first or the last does not."""
        ends = (self.keys(query, q_len, kv_len) for query in (0, q_len - 1))
        return any(stop <= start for start, stop in ends)

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Query-key pairs that the mask keeps."""
        first = kv_len - q_len + self.shift
        starts, stops = 0, q_len * kv_len
        if self.causal:
            stops = _clamped_sum(first + 1, q_len, min(self.prefix_len, kv_len), kv_len)
        elif self.window is not None:
            stops = _clamped_sum(first + self.window, q_len, 0, kv_len)
        if self.window is not None:
            starts = _clamped_sum(first - self.window + 1, q_len, 0, kv_len)
        return stops - starts


def _clamped_sum(first: int, count: int, low: int, high: int) -> int:
    """The sum of ``count`` consecutive integers from ``first`` on, each clamped to [low, high]."""
    below = min(max(low - first, 0), count)
    above = min(max(first + count - high, 0), count - below)
    between = count - below - above
    middle = between * (first + below) + between * (between - 1) // 2
    return below * low + middle + above * high


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionProblem:
    """The sizes of one attention call, by which a backend says whether it supports it."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: what the kernel sees, after autocast."""
    device: str
    """``cpu`` or ``cuda``."""
    causal: bool
    needs_grad: bool
    packed: bool = False
    """Sequences of different lengths end to end; q_len and kv_len are then the longest."""
    cp: int = 1
    """Ranks that the sequence is split over; lengths are those of the whole sequence."""
    autocast: bool = False
    """Whether the call runs under torch.autocast, which on CUDA takes softmax in float32."""
    window: int | None = None
    """Of :class:`Mask`, like ``prefix_len``."""
    prefix_len: int = 0
    shift: int = 0
    softcap: float | None = None
    """Of :class:`AttentionSpec`."""
    sinks: bool = False
    """Whether each query head has a logit besides those of its keys."""
    value_dim: int | None = None
    """Columns of v and o where they are fewer than head_dim, as latent attention has them."""

    @property
    def v_dim(self) -> int:
        """Columns of v and o."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def mask(self) -> Mask:
        """The keys that each query sees; raises ValueError where that makes no sense."""
        return Mask(
            causal=self.causal,
            window=self.window,
            prefix_len=self.prefix_len,
            shift=self.shift,
        )

    def asks_for(self) -> list[str]:
        """The names of ``MASKS`` that this problem needs, and ``shift`` and ``value_dim``."""
        names = (*MASKS, "shift", "value_dim")
        return [name for name in names if getattr(self, name) not in (None, 0, False)]


@dataclass(kw_only=True, slots=True, frozen=True)
class Packing:
    """The offsets of a packed batch's sequences, as FlashAttention's ``cu_seqlens``."""

    cu_seqlens_q: torch.Tensor
    """int32 [N + 1] on the tensors' device: sequence n has query tokens [n] up to [n + 1]."""
    cu_seqlens_k: torch.Tensor
    """The same for keys; causal masks are aligned to the bottom right of each sequence."""
    max_q_len: int
    """Length of the longest sequence of queries, known to the host without a copy."""
    max_kv_len: int

    def slices(self) -> list[tuple[slice, slice]]:
        """Query and key tokens of each sequence; waits for the device."""
        q_ends, k_ends = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        return [
            (slice(q_ends[n], q_ends[n + 1]), slice(k_ends[n], k_ends[n + 1]))
            for n in range(len(q_ends) - 1)
        ]


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionSpec:
    """The arguments of an attention call beside its tensors."""

    causal: bool
    scale: float
    """Factor of the scores, usually 1/sqrt(D)."""
    packing: Packing | None = None
    """None for a dense batch; else tensors are [T, H, D] and lse is [H, T]."""
    window: int | None = None
    """Of :class:`Mask`, like ``prefix_len`` and ``shift``; in a packed batch of each sequence."""
    prefix_len: int = 0
    shift: int = 0
    softcap: float | None = None
    """Scores s become softcap tanh(s / softcap), after the scale and before the mask."""
    sinks: torch.Tensor | None = None
    """A logit for each query head, [H], that takes part in the softmax and has no value
    (gpt-oss): lse is over the keys and the sink. Learned, so that it may need a gradient."""

    @property
    def mask(self) -> Mask:
        """The keys that each query sees; raises ValueError where that makes no sense."""
        return Mask(
            causal=self.causal,
            window=self.window,
            prefix_len=self.prefix_len,
            shift=self.shift,
        )
