"""The decoder-only transformer that attention backends and parallel strategies are plugged into.

Pre-norm blocks of causal self-attention and SwiGLU, with RMSNorm and rotary position
embedding (RoPE), no biases and an untied output head: the language model of CS336 assignments
1 and 2, with grouped queries besides. It knows neither where its tokens sit in the sequence
nor how attention is computed: positions are an argument, so that a layout may hand each rank any
tokens in any order, and attention is an object with :meth:`models.layers.CoreAttention.attend`.

Shape suffixes of tensors:

    B  batch            S  tokens held here         V  vocab_size
    E  d_model          F  d_ff                     D  head_dim, E = H * D
    H  query heads      G  key and value heads      P  pairs of rotated features, D / 2

A window, a prefix, a cap of scores and sinks are a layer's :mod:`models.variants`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.latent_attention import LatentSelfAttention
from models.layers import CoreAttention, Embedding, Linear, rotary_table, rotate
from models.variants import PLAIN, AttentionVariant


class SelfAttention(nn.Module):
    """Projections and RoPE around an :class:`models.layers.CoreAttention`.

    Head counts are read off the projections' outputs, so that tensor parallelism may shard them.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: CoreAttention,
        *,
        variant: AttentionVariant = PLAIN,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention = attention
        self.variant = variant
        self.sinks: nn.Parameter | None = None
        if variant.sinks:
            self.sinks = nn.Parameter(torch.empty(config.num_heads, device=device, dtype=dtype))
            self.reset_parameters()
        d_q, d_kv = config.d_model, config.kv_heads * config.head_dim
        self.q_proj = Linear(config.d_model, d_q, device=device, dtype=dtype)
        self.k_proj = Linear(config.d_model, d_kv, device=device, dtype=dtype)
        self.v_proj = Linear(config.d_model, d_kv, device=device, dtype=dtype)
        self.o_proj = Linear(d_q, config.d_model, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Initialise this module's own parameters, its sinks."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., E] -> q [..., H, D], k and v [..., G, D], not rotated."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q_BSHD, k_BSGD, v_BSGD = self.heads(x_BSE)
        o_BHSD = self.attention.attend(
            rotate(q_BSHD, cos, sin).transpose(1, 2),
            rotate(k_BSGD, cos, sin).transpose(1, 2),
            v_BSGD.transpose(1, 2),
            self.variant.spec(self.head_dim**-0.5, self.sinks),
        )
        return self.o_proj(o_BHSD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): w2(silu(w1 x) * w3 x)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w1 = Linear(config.d_model, config.d_ff, device=device, dtype=dtype)
        self.w2 = Linear(config.d_ff, config.d_model, device=device, dtype=dtype)
        self.w3 = Linear(config.d_model, config.d_ff, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSE)) * self.w3(x_BSE))


class Block(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x)."""

    def __init__(
        self,
        config: ModelConfig,
        attention: CoreAttention,
        *,
        variant: AttentionVariant = PLAIN,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        width, eps = config.d_model, config.norm_eps
        self.attention_norm = nn.RMSNorm(width, eps, device=device, dtype=dtype)
        self.attention: SelfAttention | LatentSelfAttention
        if config.kv_lora_rank is None:
            self.attention = SelfAttention(
                config, attention, variant=variant, device=device, dtype=dtype
            )
        else:
            self.attention = LatentSelfAttention(config, attention, device=device, dtype=dtype)
        self.feed_forward_norm = nn.RMSNorm(width, eps, device=device, dtype=dtype)
        self.feed_forward = FeedForward(config, device=device, dtype=dtype)

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSE = x_BSE + self.attention(self.attention_norm(x_BSE), cos, sin)
        return x_BSE + self.feed_forward(self.feed_forward_norm(x_BSE))


class Transformer(nn.Module):
    """Tokens and their positions in, logits out.

    Args:
        config: the size.
        attention: how every block attends.
        variant: what attention does beside a causal mask; ``config.full_attention_every`` leaves
            the window out of some layers.
        device: where parameters are created and initialised; ``meta`` leaves them without data.
        dtype: of the parameters; None is torch's default.

    Raises ValueError for a variant of latent attention, of which there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: CoreAttention,
        *,
        variant: AttentionVariant = PLAIN,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if config.kv_lora_rank is not None and variant != PLAIN:
            raise ValueError(
                f"{variant.words()}: latent attention, model.kv_lora_rank={config.kv_lora_rank}, "
                "takes none of these; leave one of the two out"
            )
        self.config, self.variant = config, variant
        self.embedding = Embedding(config.vocab_size, config.d_model, device=device, dtype=dtype)
        self.blocks = nn.ModuleList(
            Block(config, attention, variant=of_layer, device=device, dtype=dtype)
            for of_layer in variant.of_layers(config)
        )
        self.final_norm = nn.RMSNorm(config.d_model, config.norm_eps, device=device, dtype=dtype)
        self.head = Linear(config.d_model, config.vocab_size, device=device, dtype=dtype)

    def forward(self, tokens_BS: Tensor, positions_S: Tensor) -> Tensor:
        """logits_BSV of int64 tokens_BS standing at integer positions, [S] or [B, S]."""
        x_BSE = self.embedding(tokens_BS)
        cos, sin = rotary_table(
            positions_S,
            self.config.rope_dim,
            self.config.rope_theta,
            torch.promote_types(x_BSE.dtype, torch.float32),
        )
        for block in self.blocks:
            x_BSE = block(x_BSE, cos, sin)
        return self.head(self.final_norm(x_BSE))


NO_TARGET = -100
"""A target that the loss ignores, such as that of padding."""


def cross_entropy(
    logits_BSV: Tensor, targets_BS: Tensor, num_targets: float | None = None
) -> Tensor:
    """Mean negative log-likelihood of the targets in nats, computed in float32 or wider.

    Args:
        num_targets: divisor of the sum over targets, where these are a part of all that the mean
            is over; None is the number of these.
    """
    wide = torch.promote_types(logits_BSV.dtype, torch.float32)
    logits, targets = logits_BSV.flatten(0, 1).to(wide), targets_BS.flatten()
    if num_targets is None:
        return F.cross_entropy(logits, targets, ignore_index=NO_TARGET)
    return F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum") / num_targets
