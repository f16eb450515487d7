"""Blocks of scores: some queries against some keys, under a part of the mask of whole sequences.

Between queries at positions a, a + P, a + 2P, ... and keys at b, b + P, ... a mask is a mask again,
in the indices of the two. With d = a - b, e = floor(d / P), query i sees key j

    under a causal mask     where  j <= i + e
    in a window of w        where  i - j < ceil((w - d) / P)
    in a prefix of n        where  j < ceil((n - b) / P)

so that query i stands at local position i + e, with a local window of e + ceil((w - d) / P).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kernels.problem import Mask


@dataclass(kw_only=True, slots=True, frozen=True)
class ScoreBlock:
    """A rectangle of scores: some of the queries against some of the keys."""

    q: slice
    """Local queries, as indices into the rank's part of one sequence."""
    kv: slice
    """Keys, as indices into the tensor that holds them."""
    causal: bool
    """Whether a causal mask applies, aligned to the bottom right of the rectangle but for
    :attr:`shift`."""
    window: int | None = None
    """Of :class:`kernels.problem.Mask` in the block's own indices, like the next two."""
    prefix_len: int = 0
    shift: int = 0

    @property
    def q_len(self) -> int:
        return self.q.stop - self.q.start

    @property
    def kv_len(self) -> int:
        return self.kv.stop - self.kv.start

    @property
    def mask(self) -> Mask:
        return Mask(
            causal=self.causal,
            window=self.window,
            prefix_len=self.prefix_len,
            shift=self.shift,
        )

    def moved(self, q: int, kv: int) -> ScoreBlock:
        """The same block where its rows begin so much later."""
        return replace(
            self,
            q=slice(self.q.start + q, self.q.stop + q),
            kv=slice(self.kv.start + kv, self.kv.stop + kv),
        )


EMPTY = ScoreBlock(q=slice(0, 0), kv=slice(0, 0), causal=False)


def hides_more(mask: Mask, length: int) -> Mask:
    """``mask`` without what changes nothing in sequences of ``length``."""
    window = mask.window if mask.window is not None and mask.window < length else None
    # The first key is seen by every query as it is.
    prefix_len = mask.prefix_len if mask.prefix_len > 1 else 0
    return replace(mask, window=window, prefix_len=prefix_len)


def visible(queries: range, keys: range, mask: Mask) -> ScoreBlock | None:
    """The least block, in indices of the two runs, that holds every pair which ``mask`` keeps.

    Args:
        queries, keys: positions, of one step.
        mask: of the whole sequence, without a shift.

    None where it keeps no pair. Raises ValueError for a window without a causal mask between runs
    with gaps, which is no window again.
    """
    num_queries, num_keys, step = len(queries), len(keys), queries.step
    if not num_queries or not num_keys:
        return None
    offset = queries.start - keys.start
    ahead = offset // step
    window = None
    if mask.window is not None:
        if step > 1 and not mask.causal:
            raise ValueError("a window without a causal mask needs runs of neighbouring tokens")
        window = ahead - (offset - mask.window) // step
        if window < 1:
            return None
    prefix_len = min(max(-((keys.start - mask.prefix_len) // step), 0), num_keys)
    # Queries [first, last] see keys, the others none.
    first, last = 0, num_queries - 1
    if mask.causal and not prefix_len:
        first = max(0, -ahead)
    elif window is not None:
        first = max(0, 1 - ahead - window)
    if window is not None:
        last = min(last, num_keys - 1 + window - 1 - ahead)
    local = Mask(
        causal=mask.causal,
        window=window,
        prefix_len=prefix_len,
        shift=ahead - num_keys + num_queries,
    )
    if last < first:
        return None
    begin, _ = local.keys(first, num_queries, num_keys)
    _, end = local.keys(last, num_queries, num_keys)
    if end <= begin:
        return None
    q_len, kv_len = last + 1 - first, end - begin
    # No key left of ``begin`` is in a prefix, since no window has one.
    shift = first + ahead - begin - kv_len + q_len
    return _simplified(
        ScoreBlock(
            q=slice(first, last + 1),
            kv=slice(begin, end),
            causal=mask.causal,
            window=window,
            prefix_len=prefix_len,
            shift=shift,
        )
    )


def _simplified(block: ScoreBlock) -> ScoreBlock:
    """The block without the parts of its mask that hide nothing in it, or show nothing."""
    q_len, kv_len = block.q_len, block.kv_len
    first_position = kv_len - q_len + block.shift
    if block.window is not None and first_position + q_len - 1 < block.window:
        right = block.causal or first_position + block.window >= kv_len
        block = replace(block, window=None) if right else block
    if block.prefix_len <= first_position + 1:
        block = replace(block, prefix_len=0)
    if block.mask.pairs(q_len, kv_len) == q_len * kv_len:
        return ScoreBlock(q=block.q, kv=block.kv, causal=False)
    return block


def begins(blocks: Sequence[ScoreBlock]) -> list[bool]:
    """For each block, whether none before it has any of its queries."""
    return [
        all(
            block.q.stop <= other.q.start or other.q.stop <= block.q.start
            for other in blocks[:index]
        )
        for index, block in enumerate(blocks)
    ]


def keys_of(blocks: Sequence[ScoreBlock]) -> list[slice]:
    """The keys that any of the blocks reads, in disjoint, ascending slices."""
    found: list[slice] = []
    for part in sorted((block.kv for block in blocks), key=lambda part: part.start):
        if found and part.start <= found[-1].stop:
            found[-1] = slice(found[-1].start, max(found[-1].stop, part.stop))
        else:
            found.append(part)
    return [part for part in found if part.start < part.stop]


def disjoint(parts: Iterable[slice]) -> bool:
    """Whether no row is in two of the parts."""
    bounds = sorted((part.start, part.stop) for part in parts if part.start < part.stop)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))
