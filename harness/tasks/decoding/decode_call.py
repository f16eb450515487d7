"""The decoding step of ``task=decode``: its cache and inputs.

The cache is random, also behind each sequence's last token, where a wrong mask would read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Decoding
from kernels.caches import CacheChoice, CacheShape
from kernels.decoding import DecodeProblem, LatentInputs, scale_of
from kernels.rotary import Rotary, rotary_table


class DecodeCall:
    """Steps of all layers of one cache, always with the same new tokens."""

    def __init__(
        self,
        problem: DecodeProblem,
        attention: Decoding,
        choice: CacheChoice,
        shape: CacheShape,
        lengths: Sequence[int],
        device: torch.device,
        *,
        seed: int,
    ) -> None:
        self.problem = problem
        self.scale = scale_of(problem)
        self.cache = choice.allocate(shape, device, seed=seed)
        for storage in self.storages():
            storage.normal_()
        self.cache.places.fill(lengths)
        self.cache.places.reserve(shape.max_len - max(lengths))
        width = problem.rope_head_dim if problem.is_latent else problem.head_dim
        self.rotary: Rotary | None = None
        if problem.rotary != "none":
            self.rotary = rotary_table(
                self.cache.places.capacity,
                width,
                interleaved=problem.rotary == "interleaved",
                device=device,
            )
        self._dtype, self._device = getattr(torch, problem.dtype), device
        self.inputs = self._latent_inputs() if problem.is_latent else self._inputs()
        self.decoder = attention.decoder(problem, self.cache, rotary=self.rotary, scale=self.scale)

    def new_tokens(self) -> list[Tensor]:
        """The inputs of a step that are of new tokens; it reads them where they lie."""
        if self.problem.is_latent:
            inputs = self.inputs[0]
            return [inputs.q_BHTD, inputs.q_rope, inputs.c_BTR, inputs.k_rope]
        return list(self.inputs)

    def storages(self) -> list[Tensor]:
        """Latents of each layer; or the keys of each, and then the values of each."""
        if self.problem.is_latent:
            return list(self.cache.latents)
        return [*self.cache.keys, *self.cache.values]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _inputs(self) -> tuple[Any, ...]:
        problem = self.problem
        batch, new, dim = problem.batch_size, problem.new_tokens, problem.head_dim
        return (
            self._random(batch, problem.num_heads, new, dim),
            self._random(batch, problem.num_kv_heads, new, dim),
            self._random(batch, problem.num_kv_heads, new, dim),
        )

    def _latent_inputs(self) -> tuple[Any, ...]:
        problem = self.problem
        batch, new, heads = problem.batch_size, problem.new_tokens, problem.num_heads
        dim, rank, rope = problem.head_dim, problem.kv_lora_rank, problem.rope_head_dim
        inputs = LatentInputs(
            q_BHTD=self._random(batch, heads, new, dim),
            q_rope=self._random(batch, heads, new, rope),
            c_BTR=self._random(batch, new, rank),
            k_rope=self._random(batch, new, rope),
            # Scaled so that keys and values are as large as the latents.
            up_k_HDR=self._random(heads, dim, rank) * rank**-0.5,
            up_v_HDR=self._random(heads, dim, rank) * rank**-0.5,
        )
        return (inputs,)

    def step(self) -> list[Tensor]:
        """Output of every layer. Call :meth:`plan` before."""
        self.decoder.begin()
        layers = range(self.cache.shape.num_layers)
        return [self.decoder(layer, *self.inputs) for layer in layers]

    def plan(self) -> None:
        self.decoder.plan()
