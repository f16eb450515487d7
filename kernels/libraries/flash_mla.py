"""Steps of absorbed latent attention by FlashMLA's kernel."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from kernels.decode.steps.latent import AbsorbedSteps
from kernels.libraries.adapter import call_by_name


class FlashMlaSteps(AbsorbedSteps):
    """Splits are planned once a step, attention is one call a layer and its merge."""

    needs_mask = False

    def plan(self) -> None:
        super().plan()
        problem = self.problem
        self._library: Any = importlib.import_module("flash_mla")
        self._lengths = self.cache.places.lengths + problem.new_tokens
        self._metadata, self._num_splits = call_by_name(
            self._library.get_mla_metadata,
            cache_seqlens=self._lengths,
            num_heads_per_head_k=problem.new_tokens * problem.num_heads,
            num_q_tokens_per_head_k=problem.new_tokens * problem.num_heads,
            num_heads_k=1,
        )

    def attend_latents(self, layer: int, q_BHTR: Tensor, q_rope: Tensor) -> Tensor:
        latents = self.cache.latents[layer]
        o_BTHR, _ = call_by_name(
            self._library.flash_mla_with_kvcache,
            q=torch.cat((q_BHTR, q_rope), dim=-1).transpose(1, 2).contiguous(),
            k_cache=latents.unsqueeze(2),
            block_table=self.cache.places.block_table,
            cache_seqlens=self._lengths,
            head_dim_v=self.problem.kv_lora_rank,
            tile_scheduler_metadata=self._metadata,
            num_splits=self._num_splits,
            softmax_scale=self.scale,
            causal=True,
        )
        return o_BTHR.transpose(1, 2)
