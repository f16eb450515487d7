"""``flash_attn_with_kvcache`` of the FlashAttention libraries: rotary, append, attention at once.

Versions 2 and 3 name the block table differently, ``block_table`` and ``page_table``; both take
caches [batch, seq, heads, head_dim], which is a transposed view of this project's. Their rotary
tables are of the queries' dtype, and have to be as long as the cache.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kernels.decoding import DecodeProblem, Decoder
from kernels.libraries.adapter import DTYPES, call_by_name, parameters_of, why_not_head_dim
from kernels.ranges import named_range
from kernels.rotary import Rotary

FUNCTION = "flash_attn_with_kvcache"
TABLES = ("page_table", "block_table")
NEEDED = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "softmax_scale", "causal"),
    *("rotary_cos", "rotary_sin", "rotary_interleaved"),
)

LARGEST_HEAD_DIM = 256


def why_not(problem: DecodeProblem) -> str | None:
    """None if the libraries take such a step, whichever is installed, else the reason."""
    if problem.is_latent:
        return "takes keys and values, not latents"
    if problem.device != "cuda":
        return "runs on CUDA devices only"
    if problem.dtype not in DTYPES:
        return f"takes {' and '.join(DTYPES)}, not {problem.dtype}"
    if problem.rotary != "none" and problem.head_dim % 16:
        return f"rotates a head_dim that is a multiple of 16, not {problem.head_dim}"
    return why_not_head_dim(problem.head_dim, LARGEST_HEAD_DIM)


def why_no_function(module: ModuleType, name: str) -> str | None:
    """None if this version's function takes what is needed here, else the reason."""
    found = parameters_of(getattr(module, FUNCTION, None))
    if not found:
        return f"{name} has no {FUNCTION}"
    missing = [item for item in NEEDED if item not in found]
    if missing:
        return f"{name} is of another version: its {FUNCTION} takes no {missing[0]}"
    if not any(table in found for table in TABLES):
        return f"{name} is of another version: its {FUNCTION} takes no {' or '.join(TABLES)}"
    return None


class KvCacheDecoder(Decoder):
    """One call of the library a layer."""

    def __init__(
        self, module: ModuleType, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> None:
        self._function: Any = getattr(module, FUNCTION)
        self._cache = cache
        self._scale = scale
        self._tables: dict[torch.dtype, dict[str, Any]] = {}
        self._rotary = rotary

    def _rotary_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """The rotary table in the queries' dtype, converted once."""
        if self._rotary is None:
            return {}
        if dtype not in self._tables:
            self._tables[dtype] = {
                "rotary_cos": self._rotary.cos.to(dtype).contiguous(),
                "rotary_sin": self._rotary.sin.to(dtype).contiguous(),
                "rotary_interleaved": self._rotary.interleaved,
            }
        return self._tables[dtype]

    def __call__(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor
    ) -> torch.Tensor:
        cache, places = self._cache, self._cache.places
        pages = {}
        if places.block_table is not None:
            pages = dict.fromkeys(TABLES, places.block_table)
        with named_range("fused"):
            o = call_by_name(
                self._function,
                q=q.transpose(1, 2),
                k_cache=cache.keys[layer].transpose(1, 2),
                v_cache=cache.values[layer].transpose(1, 2),
                k=k_new.transpose(1, 2),
                v=v_new.transpose(1, 2),
                cache_seqlens=places.lengths,
                softmax_scale=self._scale,
                causal=True,
                **pages,
                **self._rotary_arguments(q.dtype),
            )
        o = o[0] if isinstance(o, tuple) else o
        return o.transpose(1, 2)
