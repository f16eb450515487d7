"""Work of the busiest rank of a split sequence, for which the others wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kernels import AttentionProblem
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.balance import count_flops
from parallel.context.blocks.layouts import Layout
from parallel.context.heads.nested import SplitsGroups
from parallel.context.heads.split import SplitsHeads

UNITS = 64
"""Times the tokens that a layout needs at least, on which it is counted."""

MOST_RANKS = 64
"""Ranks on which blocks are counted: more differ by less than 1% (of a ring's, 2 - 1 / ranks)."""


def busiest(attention: SequenceParallelAttention, problem: AttentionProblem) -> float:
    """Work of the busiest rank over the mean of ranks, at each step of a ring; 1 is balanced.

    Args:
        problem: a causal one, perhaps with a window or a prefix, of ``problem.cp`` ranks.
    """
    ranks = problem.cp
    mask = _Share.of(problem)
    heads = 1.0
    if isinstance(attention, SplitsHeads):
        heads = attention.head_split(ranks, problem.num_heads, problem.num_kv_heads).imbalance
    if isinstance(attention, SplitsGroups):
        return heads * _of_layout(attention.group_layout(ranks), mask, gathers=False)
    if isinstance(attention, SplitsHeads):
        return heads
    gathers = getattr(attention, "gathers", False)
    return _of_layout(attention.layout(ranks), mask, gathers=gathers)


def in_turns(attention: object) -> bool:
    """Whether ranks attend to each other's keys one part after another."""
    splits_heads = isinstance(attention, SplitsHeads) and not isinstance(attention, SplitsGroups)
    return not splits_heads and not getattr(attention, "gathers", False)


@dataclass(kw_only=True, slots=True, frozen=True)
class _Share:
    """A mask's window and prefix, as shares of the sequence."""

    window: float | None = None
    prefix: float = 0.0

    @classmethod
    def of(cls, problem: AttentionProblem) -> _Share:
        window = None if problem.window is None else problem.window / problem.kv_len
        return cls(window=window, prefix=problem.prefix_len / problem.kv_len)


@cache
def _of_layout(layout: Layout, mask: _Share = _Share(), *, gathers: bool) -> float:
    if layout.num_ranks > MOST_RANKS:
        layout = replace(layout, num_ranks=MOST_RANKS)
    length = UNITS * layout.multiple
    counted = count_flops(
        layout,
        length,
        num_heads=1,
        head_dim=1,
        block_q=length,
        block_k=length,
        window=None if mask.window is None else max(1, round(mask.window * length)),
        prefix_len=round(mask.prefix * length),
    )
    if not gathers:
        return counted.lockstep_cost("pair")
    flops = counted.per_rank("pair")
    return max(flops) * len(flops) / sum(flops)
