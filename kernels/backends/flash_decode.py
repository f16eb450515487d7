"""Flash decoding: rotary, append and attention over split keys, in as few kernels as possible.

Written in Triton for this project (:mod:`kernels.decode`). Keys are split over the device, so that
one long sequence fills it too, and the last program of a sequence merges their parts by the
log-sum-exp (Dao et al., Flash-Decoding, 2023). Contiguous and paged caches; a group's query heads
share a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from kernels import decode
from kernels.backend import Decoding, attention_backend
from kernels.decode.available import why_not_here
from kernels.decoding import DecodeProblem, Decoder
from kernels.ranges import named_range
from kernels.registry import Look
from kernels.rotary import Rotary

MAX_HEAD_DIM = 256


@attention_backend("flash_decode", look=Look(colour="#D55E00", marker="s"))
@dataclass(kw_only=True, slots=True)
class FlashDecode(Decoding):
    """The fused kernel of this project."""

    num_splits: int | None = None
    """Parts that the keys of a sequence are split into; null leaves it to the kernel."""

    def __post_init__(self) -> None:
        if self.num_splits is not None and self.num_splits < 1:
            raise ValueError(f"attention.num_splits={self.num_splits}: must be at least 1")

    def version(self) -> str | None:
        try:
            return f"triton {metadata.version('triton')}"
        except metadata.PackageNotFoundError:
            return None

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports_decode(self, problem: DecodeProblem) -> str | None:
        if problem.is_latent:
            return "takes keys and values, not latents"
        if problem.head_dim > MAX_HEAD_DIM:
            return f"head_dim is at most {MAX_HEAD_DIM}, not {problem.head_dim}"
        return why_not_here(problem)

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> FusedDecoder:
        return FusedDecoder(cache, rotary=rotary, scale=scale, num_splits=self.num_splits)


class FusedDecoder(Decoder):
    """Rotary, append and attention in one call a layer."""

    def __init__(
        self, cache: Any, *, rotary: Rotary | None, scale: float, num_splits: int | None
    ) -> None:
        self._cache = cache
        self._rotary = rotary
        self._options = {"scale": scale, "num_splits": num_splits}

    def __call__(
        self, layer: int, q: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor
    ) -> torch.Tensor:
        cache, places = self._cache, self._cache.places
        with named_range("fused"):
            return decode.flash_decode(
                q,
                k_new,
                v_new,
                cache.keys[layer],
                cache.values[layer],
                places.lengths,
                block_table=places.block_table,
                rotary=self._rotary,
                **self._options,
            )
