"""attention=llama3: keys gathered once, contiguous parts (Grattafiori et al. 2024, section 3.3.2).

One kernel call per pass and no merging, at the price of memory for all keys; with a causal mask
the last rank computes for nearly twice the time of the average one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import attention_backend
from kernels.registry import Look
from parallel.context.attention import GatherAttention
from parallel.context.blocks.layouts import Contiguous, Layout


@attention_backend("llama3", look=Look(colour="#CC6677", marker="^", place=13))
@dataclass(kw_only=True, slots=True)
class Llama3(GatherAttention):
    """All-gathered keys over contiguous parts of the sequence."""

    layout_type: ClassVar[type[Layout]] = Contiguous
