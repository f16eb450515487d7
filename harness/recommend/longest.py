"""The longest sequence of each combination that fits, bisected on the predicted memory."""

from __future__ import annotations

import math
from dataclasses import replace

from harness.cases.case import Case
from harness.predictions.capacity import Machine
from harness.recommend.bisection import largest
from harness.recommend.combination import Combination
from harness.recommend.fitting import MemoryModel

LONGEST = 2**27
"""Tokens of a sequence: nobody asks for more."""

UNIT = 256
"""Lengths are multiples of this, and of what the mesh needs."""

MOST = 400
"""Combinations that are bisected: those that need the least memory at the asked length."""


def longest(fitting: list[Combination], machine: Machine, memory: MemoryModel) -> list[Combination]:
    """The same combinations with one sequence as long as fits, the longest first."""
    roomy = sorted(fitting, key=lambda item: item.memory_bytes)[:MOST]
    found = []
    known: dict[tuple[int, str, bool], int] = {}
    stretched = set()
    for item in roomy:
        keeps = memory.keeps_scores(item.base)
        key = (id(item.base.parallel), item.checkpoint_label, keeps)
        own = (id(item.base.attention), *key)
        # Combinations that differ in their micro-batches alone are one, with one sequence.
        if own in stretched:
            continue
        stretched.add(own)
        if key not in known:
            known[key] = longest_length(item, machine, memory)
        length = known[key]
        if length:
            found.append(_stretched(item, length, memory))
    return sorted(found, key=lambda item: -item.base.seq_len)


def longest_length(item: Combination, machine: Machine, memory: MemoryModel) -> int:
    """Tokens of the longest sequence, one on each data-parallel rank; 0 if none fits."""
    parallel = item.base.parallel
    unit = math.lcm(UNIT, 2 * parallel.cp * parallel.tp)

    def fits(number: int) -> bool:
        case = replace(item.base, seq_len=number * unit, batch_size=1)
        needed = memory.peak_bytes(case, 1, item.checkpoint)
        return needed <= machine.usable_of_rank(case.world_size)

    return unit * largest(fits, LONGEST // unit)


def _stretched(item: Combination, length: int, memory: MemoryModel) -> Combination:
    base: Case = replace(item.base, seq_len=length, batch_size=1)
    return replace(
        item,
        base=base,
        accumulation=1,
        memory_bytes=memory.peak_bytes(base, 1, item.checkpoint),
    )
