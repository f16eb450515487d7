"""FlashAttention-2 written in PyTorch, one operation a line: slow, and made to be read.

Algorithm 1 of the CS336 systems text and its backward pass by equations 13 to 19. Use it to
understand the tiles of a Triton or CUDA kernel, to debug one against it, and to see how much
memory tiling saves without any special hardware. :mod:`kernels.flash.pytorch` has the algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels.backend import DenseAttention, attention_backend
from kernels.flash import pytorch
from kernels.problem import MASKS, AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.toolchain import why_not_compile


@attention_backend("flash_torch", look=Look(colour="#999933", marker="d"))
@dataclass(kw_only=True, slots=True)
class FlashTorch(DenseAttention):
    """Tiled attention with an online softmax; supports every length, head_dim and dtype."""

    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "shift", "value_dim"))

    block_q: int = 128
    """Queries in a tile (B_q)."""
    block_k: int = 128
    """Keys in a tile (B_k)."""
    compile: bool = False
    """Run each tile through torch.compile, which fuses all but the matrix products."""

    def __post_init__(self) -> None:
        for key in ("block_q", "block_k"):
            value = getattr(self, key)
            if value < 1:
                raise ValueError(f"attention.{key}={value}: must be at least 1")

    @property
    def compiles(self) -> bool:
        return self.compile

    def supports(self, problem: AttentionProblem) -> str | None:
        if not self.compile:
            return None
        if problem.packed:
            return "attention.compile=true would compile anew for each length of a packed batch"
        return why_not_compile(problem.device)

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if spec.softcap is None:
            return pytorch.forward(q, k, v, spec, self._blocks)
        # Autocast would round scores here and not in the backward pass, which runs without it.
        # Scores that need a cap are large, so that their roundings would show in the gradients.
        with torch.autocast(q.device.type, enabled=False):
            return pytorch.forward(q, k, v, spec, self._blocks)

    def dense_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return pytorch.backward(do, q, k, v, o, lse, spec, self._blocks)

    def backward_workspace(self, problem: AttentionProblem) -> float:
        """Bytes of two numbers a row, of float32 sums of dk and dv, and of a pair of tiles.

        In float32 the sums are the results. At once there are five tiles of scores, and as wide as
        a head those of q, dq and its addition, k, and the addition to dk; as wide as v those of do,
        v, and the addition to dv. The slope of a cap takes two tiles of scores more.
        """
        heads = 4.0 * problem.batch_size * problem.num_heads
        rows, columns = min(self.block_q, problem.q_len), min(self.block_k, problem.kv_len)
        scores = 5 if problem.softcap is None else 7
        of_keys = (3 * rows + 2 * columns) * problem.head_dim
        of_values = (rows + 2 * columns) * problem.v_dim
        tiles = heads * (scores * rows * columns + of_keys + of_values)
        sums = 0.0
        if problem.dtype != "float32":
            kv_heads = 4.0 * problem.batch_size * problem.num_kv_heads
            sums = kv_heads * problem.kv_len * (problem.head_dim + problem.v_dim)
        return 2 * heads * problem.q_len + sums + tiles

    @property
    def _blocks(self) -> pytorch.Blocks:
        return pytorch.Blocks(block_q=self.block_q, block_k=self.block_k, compiled=self.compile)
