"""Work of the busiest rank of a split sequence, for which the others wait."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kernels import AttentionProblem
from kernels.problem import Mask
from parallel.context.attention import SequenceParallelAttention
from parallel.context.blocks.balance import attended
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


def head_ranks(attention: object, problem: AttentionProblem) -> int:
    """How many neighbours of the ranks of a sequence exchange heads; 1 if none do."""
    if problem.cp == 1 or not isinstance(attention, SplitsHeads):
        return 1
    return attention.head_split(problem.cp, problem.num_heads, problem.num_kv_heads).num_ranks


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
    causal = Mask(
        causal=True,
        window=None if mask.window is None else max(1, round(mask.window * length)),
        prefix_len=round(mask.prefix * length),
    )
    ranks, local = range(layout.num_ranks), layout.local_len(length)

    def pairs_at(rank: int, step: int) -> int:
        source = (rank - step) % len(ranks)
        return sum(map(attended, layout.blocks(rank, source, local, causal)))

    pairs = [[pairs_at(rank, step) for step in ranks] for rank in ranks]
    of_ranks = [sum(steps) for steps in pairs]
    mean = sum(of_ranks) / len(ranks)
    if gathers:
        return max(of_ranks) / mean
    # At each step of a ring all wait for the busiest.
    return sum(max(step) for step in zip(*pairs, strict=True)) / mean
