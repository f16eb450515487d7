"""Bytes of one rank's tensors, and its kernel calls with their shares of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kernels import Attention, AttentionProblem
from parallel.context.blocks.layouts import Layout, ScoreBlock

_FLOAT32_BYTES = 4


@dataclass(kw_only=True, frozen=True)
class LocalSizes:
    """Tensors of one rank, in bytes.

    A packed batch is a problem of one sequence of all its tokens: whatever a packed call holds it
    holds for each token.
    """

    problem: AttentionProblem
    layout: Layout

    @cached_property
    def local_len(self) -> int:
        """Tokens of the rank."""
        return self.layout.local_len(self.problem.q_len)

    @property
    def element(self) -> int:
        return _FLOAT32_BYTES if self.problem.dtype == "float32" else 2

    @property
    def wide(self) -> float:
        """Bytes of a float32 number for each byte of the problem's dtype."""
        return _FLOAT32_BYTES / self.element

    @cached_property
    def q(self) -> float:
        """Bytes of q, and of o."""
        problem = self.problem
        rows = problem.batch_size * self.local_len * problem.num_heads
        return float(rows * problem.head_dim * self.element)

    @cached_property
    def kv(self) -> float:
        """Bytes of k and v together."""
        return 2 * self.q * self.problem.num_kv_heads / self.problem.num_heads

    @cached_property
    def lse(self) -> float:
        problem = self.problem
        return float(_FLOAT32_BYTES * problem.batch_size * self.local_len * problem.num_heads)


@dataclass(kw_only=True, slots=True, frozen=True)
class CallSizes:
    """One kernel call of a rank: its tensors in bytes, and whether it has all rows and heads."""

    q: float
    """Of its rows of q, and so of o, do or dq."""
    kv: float
    """Of its rows of k and v together, and so of dk and dv."""
    lse: float
    workspace: float
    """Of the kernel's backward pass."""
    whole_q: bool
    whole_kv: bool
    all_heads: bool
    first: bool
    """Whether there is no result of the same queries to merge with."""
    block: ScoreBlock | None
    """What it computes; None if it joins several blocks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class CallReader:
    """Makes the sizes of kernel calls from blocks of scores."""

    sizes: LocalSizes
    kernel: Attention

    def read(
        self, blocks: Sequence[ScoreBlock], *, all_keys: bool, first: bool, num_groups: int = 1
    ) -> CallSizes:
        """One call of several blocks, which a packed call may join.

        Args:
            all_keys: whether the keys of all ranks are here, of which a packed call takes its own.
            num_groups: how many groups of heads take turns.
        """
        sizes, problem = self.sizes, self.sizes.problem
        local = sizes.local_len
        q_share = sum(block.q_len for block in blocks) / local
        kv_share = sum(block.kv_len for block in blocks) / local
        ranks = sizes.layout.num_ranks if all_keys else 1
        joined = len(blocks) > 1
        return CallSizes(
            q=sizes.q * q_share / num_groups,
            kv=sizes.kv * kv_share / num_groups,
            lse=sizes.lse * q_share / num_groups,
            workspace=self._workspace(blocks, num_groups),
            whole_q=q_share == 1 and not joined,
            # Keys that were gathered in ranks' order are not in that of their positions.
            whole_kv=kv_share == ranks and not joined and not (all_keys and problem.packed),
            all_heads=num_groups == 1,
            first=first,
            block=None if joined else blocks[0],
        )

    def _workspace(self, blocks: Sequence[ScoreBlock], num_groups: int) -> float:
        problem = self.sizes.problem
        mask = blocks[0].mask
        call = replace(
            problem,
            cp=1,
            num_heads=problem.num_heads // num_groups,
            num_kv_heads=problem.num_kv_heads // num_groups,
            q_len=sum(block.q_len for block in blocks),
            kv_len=sum(block.kv_len for block in blocks),
            causal=mask.causal,
            window=mask.window,
            prefix_len=mask.prefix_len,
            shift=mask.shift,
            sinks=False,
        )
        return self.kernel.backward_workspace(call)
