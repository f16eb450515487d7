"""Attention calls: the sizes of one, its mask and scale, and the packing of its batch.

Tensors are ``[batch, heads, seq, head_dim]`` (B, H, S, D); lse, the natural-log log-sum-exp of
the scaled scores, is float32 ``[B, H, S]``. Causal masks are aligned to the bottom right: with
S_q queries and S_k keys, query i sees keys 0 .. i + S_k - S_q. A query that sees no key has output
zero, lse minus infinity, and no gradient.

A packed batch has sequences of different lengths end to end, ``[tokens, heads, head_dim]``
(T, H, D) with lse ``[H, T]``, and a :class:`Packing` that says where each begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
