"""attention=ulysses_zigzag: heads exchanged among neighbours, a balanced ring between groups.

A group of ``attention.ulysses`` ranks holds an early and a late chunk of every sequence, which its
ranks cut contiguously.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import RingAttention
from parallel.context.schemes._hybrid import HybridAttention
from parallel.context.schemes.zigzag import ZigzagRing


@attention_backend("ulysses_zigzag", look=Look(colour="#AA4499", marker="d", place=17))
@dataclass(kw_only=True, slots=True)
class UlyssesZigzag(HybridAttention):
    """Ulysses inside groups, zigzag between them."""

    ring_type: ClassVar[type[RingAttention]] = ZigzagRing
