"""attention=striped: a ring over every P-th token (Striped Attention, Brandon et al. 2023).

All blocks are causal squares of one size, so that each step is balanced almost exactly; the
diagonals cost a kernel more half-empty tiles than zigzag's full rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import RingAttention
from parallel.context.blocks.layouts import Layout, Striped


@attention_backend("striped", look=Look(colour="#AA7744", marker="D", place=12))
@dataclass(kw_only=True, slots=True)
class StripedRing(RingAttention):
    """Ring attention over the striped layout."""

    layout_type: ClassVar[type[Layout]] = Striped
    needs_causal: ClassVar[bool] = True
