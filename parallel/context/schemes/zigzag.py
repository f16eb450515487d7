"""attention=zigzag: a ring over an early and a late chunk per rank, which balances causal work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import RingAttention
from parallel.context.blocks.layouts import Layout, Zigzag


@attention_backend("zigzag", look=Look(colour="#6699CC", marker="s", place=11))
@dataclass(kw_only=True, slots=True)
class ZigzagRing(RingAttention):
    """Ring attention over the zigzag layout."""

    layout_type: ClassVar[type[Layout]] = Zigzag
    needs_causal: ClassVar[bool] = True
