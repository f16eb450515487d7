"""The sizes of a decoder-only transformer; values live in ``conf/model/*.yaml``."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.registry import joined_later


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of the transformer; sizes small to 2.7B are Table 1 of the CS336 text."""

    name: str
    """The name of this size in tables."""
    vocab_size: int
    """Entries of the embedding and of the untied output head."""
    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Inner width of the SwiGLU feed-forward layer."""
    num_layers: int
    """Number of transformer blocks."""
    num_heads: int
    """Query heads; each has head_dim = d_model / num_heads."""
    num_kv_heads: int | None = None
    """Key and value heads for grouped queries; None means one per query head."""
    rope_theta: float = 10000.0
    """Base of the rotary embedding's frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square inside RMSNorm."""
    kv_lora_rank: int | None = joined_later(None)
    """Rank of the latents of multi-head latent attention; None keeps keys and values."""
    rope_head_dim: int | None = joined_later(None)
    """Width of a head's rotary part, of latent attention alone; None is half of the head."""
    full_attention_every: int | None = joined_later(None)
    """With attention.window, one layer in this many attends without it, the last of each group: 2
    in Gemma 2 and gpt-oss, 6 in Gemma 3; None gives every layer the window."""

    def __post_init__(self) -> None:
        sizes = (
            *("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads"),
            *("kv_lora_rank", "rope_head_dim"),
        )
        for field in sizes:
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"model.{field}={value}: must be at least 1")
        if self.d_model % self.num_heads:
            raise ValueError(
                f"model.num_heads={self.num_heads}: must divide model.d_model={self.d_model}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.num_heads={self.num_heads}: gives head_dim {self.head_dim}, "
                "which rotary embedding needs to be even"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads}: must divide "
                f"model.num_heads={self.num_heads}"
            )

        self._validate_latents()
        every = self.full_attention_every
        if every is not None and not 2 <= every <= self.num_layers:
            raise ValueError(
                f"model.full_attention_every={every}: must be at least 2, since attention.window "
                f"is for the other layers, and at most model.num_layers={self.num_layers}"
            )

    def _validate_latents(self) -> None:
        if self.kv_lora_rank is None:
            if self.rope_head_dim is not None:
                raise ValueError(
                    f"model.rope_head_dim={self.rope_head_dim}: is of latent attention; set "
                    "model.kv_lora_rank too, or leave it out"
                )
            return
        if self.num_kv_heads is not None:
            raise ValueError(
                f"model.num_kv_heads={self.num_kv_heads}: latent attention keeps one latent for "
                "all heads; leave it out, or model.kv_lora_rank"
            )
        if self.rope_dim % 2 or self.rope_dim >= self.head_dim:
            raise ValueError(
                f"model.rope_head_dim={self.rope_dim}: must be even and less than head_dim "
                f"{self.head_dim}"
            )

    @property
    def rope_dim(self) -> int:
        """Width of the rotated part of a head: all of it, except in latent attention."""
        if self.kv_lora_rank is None:
            return self.head_dim
        return self.head_dim // 2 if self.rope_head_dim is None else self.rope_head_dim

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads
