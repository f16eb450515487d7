"""attention=ring: contiguous parts, keys travelling around a ring (Liu et al. 2023).

The simplest scheme, and with a causal mask an uneven one: the first rank has nothing to do with
most of the keys that pass, and all wait for the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import RingAttention
from parallel.context.blocks.layouts import Contiguous, Layout


@attention_backend("ring", look=Look(colour="#44AA99", marker="o", place=10))
@dataclass(kw_only=True, slots=True)
class Ring(RingAttention):
    """Ring attention over contiguous parts of the sequence."""

    layout_type: ClassVar[type[Layout]] = Contiguous
