"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values from one small vector.

Each token is compressed to c of rank R and a rotary part of the key that all heads share; heads'
keys and values are up-projected from c. Of a head's width D the rotary part takes d_rope, so that
whole queries, keys and values are of one width and any attention computes the training call.
Queries are projected directly, as in DeepSeek-V2-Lite. Shape suffixes as in
:mod:`models.transformer`, and R for kv_lora_rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.problem import AttentionSpec
from kernels.rotary import rotate
from models.config import ModelConfig
from models.layers import CoreAttention, Linear


class LatentSelfAttention(nn.Module):
    """Projections, compression and RoPE around an :class:`models.layers.CoreAttention`."""

    def __init__(
        self,
        config: ModelConfig,
        attention: CoreAttention,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert config.kv_lora_rank is not None, "the model keeps latents"
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.rope_dim, self.rank = config.rope_dim, config.kv_lora_rank
        self.key_dim = self.head_dim - self.rope_dim
        self.attention = attention
        width, heads = config.d_model, config.num_heads
        self.q_proj = Linear(width, heads * self.head_dim, device=device, dtype=dtype)
        self.kv_down = Linear(width, self.rank + self.rope_dim, device=device, dtype=dtype)
        self.kv_norm = nn.RMSNorm(self.rank, config.norm_eps, device=device, dtype=dtype)
        self.k_up = Linear(self.rank, heads * self.key_dim, device=device, dtype=dtype)
        self.v_up = Linear(self.rank, heads * self.head_dim, device=device, dtype=dtype)
        self.o_proj = Linear(heads * self.head_dim, width, device=device, dtype=dtype)

    def compress(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., E] -> c [..., R], and the shared part of the key [..., d_rope], not rotated."""
        c, rope = self.kv_down(x).split((self.rank, self.rope_dim), dim=-1)
        return self.kv_norm(c), rope

    def expand(self, c: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """c [..., R] and rotated [..., d_rope] -> keys and values of all heads, [..., H, D]."""
        k = self.k_up(c).unflatten(-1, (self.num_heads, self.key_dim))
        v = self.v_up(c).unflatten(-1, (self.num_heads, self.head_dim))
        shared = rope.unsqueeze(-2).expand(*k.shape[:-1], self.rope_dim)
        return torch.cat((k, shared), dim=-1), v

    def unrotated_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., E] -> [..., H, D - d_rope], and the part [..., H, d_rope] that is rotated."""
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        plain, rope = q.split((self.key_dim, self.rope_dim), dim=-1)
        return plain, rope

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Whole queries [..., H, D]; the angles stand for all heads, [..., 1, d_rope / 2]."""
        plain, rope = self.unrotated_queries(x)
        return torch.cat((plain, rotate(rope, cos, sin, interleaved=True)), dim=-1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_k [H, D - d_rope, R] and W_v [H, D, R], views of the weights."""
        return (
            self.k_up.weight.unflatten(0, (self.num_heads, self.key_dim)),
            self.v_up.weight.unflatten(0, (self.num_heads, self.head_dim)),
        )

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c_BSR, rope = self.compress(x_BSE)
        rope = rotate(rope, cos.squeeze(-2), sin.squeeze(-2), interleaved=True)
        k_BSHD, v_BSHD = self.expand(c_BSR, rope)
        o_BHSD = self.attention.attend(
            self.queries(x_BSE, cos, sin).transpose(1, 2),
            k_BSHD.transpose(1, 2),
            v_BSHD.transpose(1, 2),
            AttentionSpec(causal=True, scale=self.head_dim**-0.5),
        )
        return self.o_proj(o_BHSD.transpose(1, 2).flatten(-2))
