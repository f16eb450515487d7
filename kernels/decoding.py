"""Decoding: attention of a few new tokens over a cache, as a problem and as steps.

Decoding moves far more bytes than it computes, so what counts is how often the cache is read and
how many kernels are launched around it. One step rotates the new queries and keys, appends keys
and values behind each sequence's last token, and attends to all of them; a new token sees the
whole cache, itself, and the new tokens before it. Lengths are only read here: the owner of the
cache reserves places before the step and advances lengths after it.

Latent attention (DeepSeek-V2, section 2.1) keeps a compressed c of each token. A head's keys and
values are W_k c and W_v c; *materialised* they are computed for all tokens at every step,
*absorbed* W_k is applied to the query and W_v to the result, and the cache is attended to as it is.

    B  batch         T  new tokens of a sequence     R  kv_lora_rank
    H  query heads   G  key and value heads          D  head_dim (of a latent's keys: without
    C  R + rotary part of a latent                      their rotary part)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROTARY = ("interleaved", "halves", "none")
"""Pairs of features that are rotated together: neighbours, i and i + D/2, or none."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DecodeProblem:
    """The sizes of one decoding step, by which a backend says whether it supports it."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    new_tokens: int
    """Tokens that each sequence gains (T): one, or a few that were guessed."""
    max_len: int
    """Tokens of the longest sequence after the step."""
    dtype: str
    device: str
    """``cpu`` or ``cuda``."""
    block_size: int | None = None
    """Tokens in a block of a paged cache; None for a contiguous one."""
    kv_lora_rank: int = 0
    """Rank of the latents that the cache keeps; 0 where it keeps keys and values."""
    rope_head_dim: int = 0
    """Width of the rotary part of a latent."""
    rotary: str = "interleaved"
    cuda_graph: bool = False
    """Whether the step is captured once and replayed, while lengths change."""

    @property
    def is_latent(self) -> bool:
        return self.kv_lora_rank > 0


class Decoder:
    """Steps of one batch over one cache, for all layers that the cache has.

    In each step :meth:`plan`, then :meth:`begin`, then one call for each layer.
    """

    def plan(self) -> None:
        """Host work that depends on the step's lengths; never part of a CUDA graph."""

    def begin(self) -> None:
        """Device work that all layers of a step share, from the lengths on the device."""

    def __call__(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor
    ) -> torch.Tensor:
        """q [B, H, T, D] and k, v [B, G, T, D], not rotated yet -> o [B, H, T, D]."""
        raise NotImplementedError(
            f"{type(self).__module__}.{type(self).__name__} must define __call__()"
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class LatentInputs:
    """Projections of new tokens in one layer of latent attention, not rotated yet."""

    q_BHTD: torch.Tensor
    q_rope: torch.Tensor
    """[B, H, T, d_rope]."""
    c_BTR: torch.Tensor
    k_rope: torch.Tensor
    """[B, T, d_rope], shared by all heads."""
    up_k_HDR: torch.Tensor
    """W_k, from a latent to a head's key."""
    up_v_HDR: torch.Tensor
    """W_v, from a latent to a head's value."""


class LatentDecoder:
    """A :class:`Decoder` over a cache of latents."""

    def plan(self) -> None: ...

    def begin(self) -> None: ...

    def __call__(self, layer: int, inputs: LatentInputs) -> torch.Tensor:
        """o [B, H, T, D]."""
        raise NotImplementedError(
            f"{type(self).__module__}.{type(self).__name__} must define __call__()"
        )


def gathered_bytes(problem: DecodeProblem) -> float:
    """Bytes of the copy that PyTorch's operators make of a paged cache; 0 for a contiguous one."""
    if problem.block_size is None:
        return 0.0
    tokens = problem.batch_size * problem.max_len * (4 if problem.dtype == "float32" else 2)
    if problem.is_latent:
        return float(tokens * (problem.kv_lora_rank + problem.rope_head_dim))
    return float(2 * tokens * problem.num_kv_heads * problem.head_dim)


def operator_workspace(problem: DecodeProblem) -> float:
    """Bytes of attention by operators: scores before and after the softmax, and gathered keys."""
    size = 4 if problem.dtype == "float32" else 2
    rows = problem.batch_size * problem.num_heads * problem.new_tokens
    return rows * problem.max_len * (4 + 2 * size) + gathered_bytes(problem)


def scale_of(problem: DecodeProblem) -> float:
    """1 / sqrt of the width of a whole query."""
    return float((problem.head_dim + problem.rope_head_dim) ** -0.5)
