"""How much a model keeps of each token, by type of attention: a calculator of cache bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.caches.choice import CacheShape

ATTENTION_TYPES = ("mha", "gqa", "mqa", "mla")


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """The dimensions of a model that decide the size of its cache."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_lora_rank: int = 512
    """Rank of the latents that it keeps, or would keep."""
    rope_head_dim: int = 64

    def cache_shape(
        self, attention_type: str, *, batch_size: int, max_len: int, dtype: str
    ) -> CacheShape:
        """The cache of this model with keys and values for every head, a group, one, or none."""
        heads = {"mha": self.num_heads, "gqa": self.num_kv_heads, "mqa": 1}
        latent = attention_type == "mla"
        return CacheShape(
            num_layers=self.num_layers,
            batch_size=batch_size,
            max_len=max_len,
            num_kv_heads=1 if latent else heads[attention_type],
            head_dim=1 if latent else self.head_dim,
            kv_lora_rank=self.kv_lora_rank if latent else 0,
            rope_head_dim=self.rope_head_dim if latent else 0,
            dtype=dtype,
        )


MODEL_SHAPES = {
    # Table 3 of Grattafiori et al. 2024, The Llama 3 Herd of Models (arXiv:2407.21783).
    "llama3_8b": ModelShape(num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128),
    "llama3_70b": ModelShape(num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128),
    "llama3_405b": ModelShape(num_layers=126, num_heads=128, num_kv_heads=8, head_dim=128),
    # Section 4.2 of DeepSeek-AI 2024, DeepSeek-V3 (arXiv:2412.19437). Its heads would keep 128
    # numbers of a key and of a value each, without the shared rotary part.
    "deepseek_v3": ModelShape(num_layers=61, num_heads=128, num_kv_heads=128, head_dim=128),
}
