"""attention=ulysses_ring: heads exchanged among neighbours, a ring between groups of them.

A group of ``attention.ulysses`` ranks holds a contiguous part of every sequence, and so does each
of its ranks. With a causal mask it is as uneven as a ring of its groups; it takes any mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import RingAttention
from parallel.context.schemes._hybrid import HybridAttention
from parallel.context.schemes.ring import Ring


@attention_backend("ulysses_ring", look=Look(colour="#882255", marker="H", place=16))
@dataclass(kw_only=True, slots=True)
class UlyssesRing(HybridAttention):
    """Ulysses inside groups, a ring between them."""

    ring_type: ClassVar[type[RingAttention]] = Ring
