"""Attention variants of layers: what they ask of attention beside a causal mask.

Layers of one model may differ. Gemma 2 and gpt-oss give every second layer full attention and the
others a sliding window, Gemma 3 every sixth (``model.full_attention_every``). Gemma 2 caps
scores, gpt-oss has sinks, and a prefix language model reads a prompt in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.problem import AttentionSpec, Mask
from models.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionVariant:
    """What attention does beside a causal mask; fields as in :mod:`kernels.problem`."""

    window: int | None = None
    prefix_len: int = 0
    softcap: float | None = None
    sinks: bool = False
    """Whether each query head of each layer learns a logit."""

    @property
    def mask(self) -> Mask:
        return Mask(causal=True, window=self.window, prefix_len=self.prefix_len)

    def spec(self, scale: float, sinks: Tensor | None) -> AttentionSpec:
        """The arguments of a layer's call."""
        return AttentionSpec(
            causal=True,
            scale=scale,
            window=self.window,
            prefix_len=self.prefix_len,
            softcap=self.softcap,
            sinks=sinks,
        )

    def of_layer(self, config: ModelConfig, layer: int) -> AttentionVariant:
        """The variant of one layer: this one, or without its window where attention is full.

        Full attention has the last layer of each group of ``config.full_attention_every``.
        """
        every = config.full_attention_every
        if every is None or layer % every != every - 1:
            return self
        return replace(self, window=None)

    def of_layers(self, config: ModelConfig) -> list[AttentionVariant]:
        """The variant of each layer, from the first to the last."""
        return [self.of_layer(config, layer) for layer in range(config.num_layers)]

    def words(self) -> str:
        """The options that differ from plain attention, as a command line has them."""
        found = {
            "window": self.window,
            "prefix_len": self.prefix_len,
            "softcap": self.softcap,
            "sinks": self.sinks,
        }
        return ", ".join(
            f"attention.{key}={str(value).lower()}" for key, value in found.items() if value
        )


PLAIN = AttentionVariant()
"""A causal mask and nothing else."""
