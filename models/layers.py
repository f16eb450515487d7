"""Layers of the transformer: linear, embedding and rotary position embedding.

Shape suffixes as in :mod:`models.transformer`.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from kernels.problem import AttentionSpec


class CoreAttention(Protocol):
    """How a block attends; every backend of ``kernels`` is one, and so is a ring of devices."""

    def attend(
        self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, spec: AttentionSpec, /
    ) -> Tensor:
        """softmax(spec.scale q k^T) v, o_BHSD; query head h reads key head h // (H / G)."""
        ...


def _init_truncated_normal(weight: Tensor, std: float) -> None:
    """Fill with N(0, std^2) truncated at 3 std, as CS336 assignment 1 (section 3.4.1) asks.

    Drawn in float32 whatever the dtype, so that one seed gives one model in every precision.
    """
    sample = torch.empty_like(weight, dtype=torch.float32)
    nn.init.trunc_normal_(sample, std=std, a=-3 * std, b=3 * std)
    with torch.no_grad():
        weight.copy_(sample)


class Linear(nn.Linear):
    """Bias-free linear layer, initialised once and in place: std sqrt(2 / (d_in + d_out))."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_in, d_out, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        _init_truncated_normal(
            self.weight, std=math.sqrt(2 / (self.in_features + self.out_features))
        )


class Embedding(nn.Embedding):
    """Token embedding, initialised with std 1."""

    def reset_parameters(self) -> None:
        _init_truncated_normal(self.weight, std=1.0)


def rotary_table(
    positions_S: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / D), i < P: [S, 1, P], the 1 standing for heads.

    Equation 8 of CS336 assignment 1, after RoFormer (Su et al. 2021). Positions [B, S] give
    [B, S, 1, P].
    """
    exponents_P = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=dtype) / head_dim
    angles = positions_S[..., None, None].to(dtype) * theta**-exponents_P
    return angles.cos(), angles.sin()


def rotate(x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each adjacent pair of features by its angle, in the table's dtype; keeps x's dtype."""
    even_BSHP, odd_BSHP = x_BSHD.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (even_BSHP * cos - odd_BSHP * sin, even_BSHP * sin + odd_BSHP * cos)
    return torch.stack([part.to(x_BSHD.dtype) for part in rotated], dim=-1).flatten(-2)
