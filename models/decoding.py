"""The cache and the decoding step that a model needs: their shapes, without torch."""

from __future__ import annotations

from kernels.caches import CacheShape
from kernels.decoding import DecodeProblem
from models.config import ModelConfig


def decode_problem(
    config: ModelConfig,
    *,
    batch_size: int,
    max_len: int,
    dtype: str,
    device: str,
    block_size: int | None,
    cuda_graph: bool,
) -> DecodeProblem:
    """One decoding step of one token, as a block of the model attends from its cache."""
    latent = config.kv_lora_rank is not None
    return DecodeProblem(
        batch_size=batch_size,
        num_heads=config.num_heads,
        num_kv_heads=1 if latent else config.kv_heads,
        head_dim=config.head_dim - config.rope_dim if latent else config.head_dim,
        new_tokens=1,
        max_len=max_len,
        dtype=dtype,
        device=device,
        block_size=block_size,
        kv_lora_rank=config.kv_lora_rank or 0,
        rope_head_dim=config.rope_dim if latent else 0,
        rotary="interleaved",
        cuda_graph=cuda_graph,
    )


def cache_shape(config: ModelConfig, *, batch_size: int, max_len: int, dtype: str) -> CacheShape:
    """The cache of a model for ``batch_size`` sequences of up to ``max_len`` tokens."""
    latent = config.kv_lora_rank is not None
    return CacheShape(
        num_layers=config.num_layers,
        batch_size=batch_size,
        max_len=max_len,
        num_kv_heads=1 if latent else config.kv_heads,
        head_dim=1 if latent else config.head_dim,
        kv_lora_rank=config.kv_lora_rank or 0,
        rope_head_dim=config.rope_dim if latent else 0,
        dtype=dtype,
    )
