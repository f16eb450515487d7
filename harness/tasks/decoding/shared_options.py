"""Options that decoding tasks share: cache, lengths, rotary embedding, attention of prompts."""

from __future__ import annotations

from collections.abc import Iterable

from harness.cases.case import Case
from harness.cases.requirements import require_choice
from kernels import BACKENDS, Attention, Decoding
from kernels.caches import CacheChoice
from kernels.decoding import ROTARY, DecodeProblem

LENGTHS = ("equal", "ragged")
"""Lengths of the sequences in a cache: all the same, or different ones of the same mean."""


def cache_of(case: Case) -> CacheChoice:
    assert case.cache is not None, "the task uses a cache"
    return case.cache


def prompt_attention(name: str) -> Attention:
    """The attention backend of this name, with its preset options."""
    entry = BACKENDS[name]
    return entry.target(name=entry.name, **entry.preset).role(Attention)


def require_rotary(rotary: str, key: str, width: int) -> None:
    """Raise ValueError unless ``task.rotary`` exists and can rotate a width of ``task.{key}``."""
    require_choice("task.rotary", rotary, ROTARY)
    if rotary != "none" and width % 2:
        raise ValueError(
            f"task.{key}={width}: rotary embedding needs it to be even; or use task.rotary=none"
        )


def require_blocks(case: Case, lengths: Iterable[int]) -> None:
    """Raise ValueError unless a paged cache has blocks for sequences of these lengths."""
    cache = cache_of(case)
    num_blocks, size = getattr(cache, "num_blocks", None), cache.tokens_per_block
    if num_blocks is not None and size is not None:
        needed = sum(-(-length // size) for length in lengths)
        if needed > num_blocks:
            raise ValueError(
                f"cache.num_blocks={num_blocks}: the batch needs {needed} blocks of "
                f"cache.block_size={size}"
            )


def require_block_size(case: Case) -> None:
    """Raise ValueError if the attention reads latents in blocks of another size."""
    cache, attention = cache_of(case), case.attention
    needed = attention.latent_block_size if isinstance(attention, Decoding) else None
    if cache.is_latent and needed is not None and cache.tokens_per_block != needed:
        size = "null" if cache.tokens_per_block is None else cache.tokens_per_block
        raise ValueError(
            f"cache.block_size={size}: attention={attention.name} reads latents in blocks of "
            f"{needed} tokens; use cache.block_size={needed}"
        )


def decode_workspace(case: Case, problem: DecodeProblem) -> float:
    """Predicted bytes that decoding steps need beside the cache; 0 for other attention."""
    attention = case.attention
    return attention.decode_workspace(problem) if isinstance(attention, Decoding) else 0.0
