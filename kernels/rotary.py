"""Rotary position embedding of a few new tokens, by their places in a cache (Su et al., 2021).

A table of cosines and sines holds one row per position; a token at position p has its pairs of
features rotated by row p. Interleaved pairs are neighbours (0, 1), (2, 3), ... as in RoFormer and
GPT-J; otherwise feature i goes with feature i + P, P pairs in all, as in GPT-NeoX and Llama.
Features beyond the first 2P are left as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotary(NamedTuple):
    """Cosines and sines of every position, and the pairing of features."""

    cos: torch.Tensor
    """float32 [max_positions, P], P = rotary_dim / 2."""
    sin: torch.Tensor
    interleaved: bool = False
    """Pairs are neighbours; else entry i goes with entry i + P."""

    @property
    def rotary_dim(self) -> int:
        """How many features of a head are rotated."""
        return 2 * self.cos.shape[1]


def rotary_table(
    max_positions: int,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    interleaved: bool = True,
    device: torch.device | str | None = None,
) -> Rotary:
    """Angles position * theta^(-2i / rotary_dim), i < P; equation 15 of RoFormer."""
    exponents = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float32) / rotary_dim
    positions = torch.arange(max_positions, device=device, dtype=torch.float32)
    angles = positions[:, None] * theta**-exponents
    return Rotary(cos=angles.cos(), sin=angles.sin(), interleaved=interleaved)


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the first 2P features of x [..., D] by the rows cos, sin [..., P]; keeps x's dtype.

    Computed in float32 or wider. The rows broadcast over the leading dimensions of x.
    """
    num_pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * num_pairs], x[..., 2 * num_pairs :]
    turned = turned.to(torch.promote_types(x.dtype, cos.dtype))
    if interleaved:
        first, second = turned.unflatten(-1, (num_pairs, 2)).unbind(-1)
    else:
        first, second = turned.split(num_pairs, dim=-1)
    parts = (first * cos - second * sin, first * sin + second * cos)
    rotated = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    rotated = rotated.to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def apply_rotary(x_BHTD: torch.Tensor, rotary: Rotary, positions_BT: torch.Tensor) -> torch.Tensor:
    """Rotate heads of new tokens that stand at integer positions of their sequences."""
    cos_B1TP, sin_B1TP = (x[positions_BT].unsqueeze(1) for x in (rotary.cos, rotary.sin))
    return rotate(x_BHTD, cos_B1TP, sin_B1TP, interleaved=rotary.interleaved)
