"""attention=zigzag_llama3: keys gathered once, an early and a late chunk per rank.

Chunk i of 2P sees keys [0, (i+1) c), c tokens a chunk, so rank r makes two calls, for its chunks
r and 2P-1-r. In a packed batch every sequence is cut into its own 2P chunks, and the two calls
can be fused into one of twice as many sequences, whose keys are repeated where both chunks see
them: fewer launches for more memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels import AttentionProblem, attention_backend
from kernels.registry import Look
from parallel.context import bound
from parallel.context.attention import GatherAttention
from parallel.context.blocks.layouts import Layout, Zigzag

MODES = ("two_kernels", "fused")


@attention_backend("zigzag_llama3", look=Look(colour="#117733", marker="v", place=14))
@dataclass(kw_only=True, slots=True)
class ZigzagLlama3(GatherAttention):
    """All-gathered keys over the zigzag layout."""

    forward_mode: str = "two_kernels"
    """``two_kernels``, or ``fused`` into one call, which a packed batch can be."""
    backward_mode: str = "two_kernels"
    """The mode of the backward pass; all four combinations work."""

    layout_type: ClassVar[type[Layout]] = Zigzag
    needs_causal: ClassVar[bool] = True

    def __post_init__(self) -> None:
        GatherAttention.__post_init__(self)
        for key in ("forward_mode", "backward_mode"):
            value = getattr(self, key)
            if value not in MODES:
                raise ValueError(f"attention.{key}={value}: must be one of {', '.join(MODES)}")

    def why_not_split(self, problem: AttentionProblem) -> str | None:
        for key in ("forward_mode", "backward_mode"):
            if getattr(self, key) == "fused" and not problem.packed:
                return (
                    f"attention.{key}=fused: needs a packed batch, such as task.packing=equal; "
                    "the two chunks of a dense one see different numbers of keys"
                )
        return GatherAttention.why_not_split(self, problem)

    def _fusion(self) -> bound.Fusion:
        return bound.Fusion(
            forward=self.forward_mode == "fused", backward=self.backward_mode == "fused"
        )
