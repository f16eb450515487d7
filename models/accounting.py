"""Parameters and FLOPs of the transformer, by formula, without torch.

MFU divides by these FLOPs, and plans show them before anything runs.

One matmul of M x K by K x N is 2MKN FLOPs. Model FLOPs never count recomputation, so the
backward pass, two matmuls for each one of the forward pass, is twice the forward pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kernels.accounting import attended_pairs
from models.config import ModelConfig
from models.variants import PLAIN, AttentionVariant

BACKWARD_OVER_FORWARD = 2


@dataclass(kw_only=True, slots=True, frozen=True)
class ParameterCount:
    """Parameters of the whole model by role."""

    embedding: int
    attention: int
    feed_forward: int
    norms: int
    head: int
    sinks: int = 0
    """Logits of query heads, one a head of each layer."""

    @property
    def total(self) -> int:
        return self.embedding + self.linear + self.norms + self.sinks

    @property
    def linear(self) -> int:
        """Weights that multiply every token: all but embedding, norms and sinks."""
        return self.attention + self.feed_forward + self.head


def count_parameters(config: ModelConfig, variant: AttentionVariant = PLAIN) -> ParameterCount:
    """The parameters of :class:`models.transformer.Transformer`, by part."""
    d_kv = config.kv_heads * config.head_dim
    attention, rank = config.d_model * (2 * config.d_model + 2 * d_kv), config.kv_lora_rank
    if rank is not None:
        # Down to the latent and its rotary part, and up to heads' keys and values.
        up = config.num_heads * (2 * config.head_dim - config.rope_dim)
        attention = config.d_model * (2 * config.d_model + rank + config.rope_dim) + rank * up
    return ParameterCount(
        embedding=config.vocab_size * config.d_model,
        attention=config.num_layers * attention,
        feed_forward=config.num_layers * 3 * config.d_model * config.d_ff,
        norms=(2 * config.num_layers + 1) * config.d_model + config.num_layers * (rank or 0),
        head=config.vocab_size * config.d_model,
        sinks=config.num_layers * config.num_heads if variant.sinks else 0,
    )


def parameter_sizes(
    config: ModelConfig, tp: int = 1, variant: AttentionVariant = PLAIN
) -> list[int]:
    """Elements of each parameter of :class:`models.transformer.Transformer`, in its order.

    On one of ``tp`` tensor-parallel ranks, each of which holds an equal part of all but the norms.
    """
    width, d_ff = config.d_model, config.d_ff // tp
    d_kv = config.kv_heads * config.head_dim
    q, k, v, o = (size // tp for size in (width**2, width * d_kv, width * d_kv, width**2))
    sinks = [config.num_heads // tp] if variant.sinks else []
    block = [width, *sinks, q, k, v, o, width, *[width * d_ff] * 3]
    vocabulary = config.vocab_size * width // tp
    return [vocabulary, *block * config.num_layers, width, vocabulary]


def num_parameters(config: ModelConfig, variant: AttentionVariant = PLAIN) -> int:
    """All parameters; the output head is not tied to the embedding."""
    return count_parameters(config, variant).total


def residual_stream_bytes(
    config: ModelConfig, *, batch_size: int, seq_len: int, element_bytes: int
) -> int:
    """Bytes of one tensor of the residual stream, B S E elements (problem memory_profiling d)."""
    return batch_size * seq_len * config.d_model * element_bytes


def matmul_flops_per_token(config: ModelConfig) -> float:
    """Forward FLOPs of the linear layers, head included: 2 a weight; the embedding is a lookup."""
    return 2 * count_parameters(config).linear


def visible_pairs(
    config: ModelConfig, seq_len: int, *, causal: bool = True, variant: AttentionVariant = PLAIN
) -> float:
    """Query-key pairs of one head, summed over layers: of each layer those that its mask keeps.

    A causal mask alone keeps half of the square, as papers count it; windows and prefixes are
    counted exactly. Without a causal mask the variant is not asked.
    """
    if not causal:
        return config.num_layers * attended_pairs(seq_len, seq_len, causal=False)
    return sum(
        num_layers
        * (
            attended_pairs(seq_len, seq_len, causal=True)
            if kind.mask.is_plain
            else kind.mask.pairs(seq_len, seq_len)
        )
        for kind, num_layers in Counter(variant.of_layers(config)).items()
    )


def forward_flops(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    causal: bool = True,
    variant: AttentionVariant = PLAIN,
) -> float:
    """Linear layers and attention, 4 B H S^2 D a block, halved when causal, less with a window."""
    pairs = visible_pairs(config, seq_len, causal=causal, variant=variant)
    attention = 4 * batch_size * config.num_heads * pairs * config.head_dim
    return batch_size * seq_len * matmul_flops_per_token(config) + attention


def backward_flops(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    causal: bool = True,
    variant: AttentionVariant = PLAIN,
) -> float:
    """Twice the forward pass."""
    forward = forward_flops(config, batch_size, seq_len, causal=causal, variant=variant)
    return BACKWARD_OVER_FORWARD * forward


def train_step_flops(
    config: ModelConfig,
    batch_size: int,
    seq_len: int,
    *,
    causal: bool = True,
    variant: AttentionVariant = PLAIN,
) -> float:
    """Forward and backward; the optimizer's are a few per parameter and not counted."""
    forward = forward_flops(config, batch_size, seq_len, causal=causal, variant=variant)
    return (1 + BACKWARD_OVER_FORWARD) * forward
