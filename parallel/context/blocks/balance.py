"""Balance of a layout: FLOPs of attention on each rank, counted on the blocks that run.

Three counts of the forward pass, 4 D FLOPs (two matmuls) for each head and pair:

    chunk   every query in a half of a rank's part is charged all keys up to the end of that
            half: the count of published guides, which charges diagonals in full; in a window,
            from the first key that its first query sees
    pair    exactly the query-key pairs that the mask keeps
    tile    whole tiles of block_q x block_k with at least one such pair, which a kernel computes

A ring computes in lockstep: at step t, rank r works on the keys of rank r - t, and everybody
waits for the slowest. Its cost is the sum over steps of the largest count, relative to a
perfect split. An all-gather has one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.problem import Mask
from parallel.context.blocks.layouts import Layout, ScoreBlock

COUNTS = ("chunk", "pair", "tile")


@dataclass(kw_only=True, slots=True, frozen=True)
class Balance:
    """FLOPs of one forward pass over one causal sequence."""

    chunk: list[list[float]]
    """FLOPs by the chunk count, [rank][half of the rank's part]."""
    pair: list[list[float]]
    """FLOPs by exact pairs, [rank][ring step]."""
    tile: list[list[float]]
    """FLOPs by tiles, [rank][ring step]."""

    def per_rank(self, count: str) -> list[float]:
        """FLOPs of each rank by ``chunk``, ``pair`` or ``tile``."""
        return [sum(parts) for parts in getattr(self, count)]

    def lockstep_cost(self, count: str) -> float:
        """Sum over ring steps of the busiest rank's FLOPs, over those of a perfect split."""
        by_rank: list[list[float]] = getattr(self, count)
        busiest = sum(max(step) for step in zip(*by_rank, strict=True))
        return busiest / (sum(map(sum, by_rank)) / len(by_rank))


def count_flops(
    layout: Layout,
    length: int,
    *,
    num_heads: int,
    head_dim: int,
    block_q: int,
    block_k: int,
    window: int | None = None,
    prefix_len: int = 0,
) -> Balance:
    """Count a causal sequence of ``length`` tokens on every rank of a layout.

    Args:
        block_q, block_k: tile of the kernel, in queries and keys.
        window, prefix_len: of :class:`kernels.problem.Mask`.
    """
    mask = Mask(causal=True, window=window, prefix_len=min(prefix_len, length))
    per_pair = 4.0 * num_heads * head_dim
    ranks, local = range(layout.num_ranks), layout.local_len(length)
    chunk, pair, tile = [], [], []
    for rank in ranks:
        halves = _halves(layout, rank, length)
        chunk.append([per_pair * len(half) * _seen_by_run(half, mask) for half in halves])
        steps = [layout.blocks(rank, (rank - step) % len(ranks), local, mask) for step in ranks]
        pair.append([per_pair * sum(map(attended, blocks)) for blocks in steps])
        tile.append(
            [per_pair * sum(tiled(block, block_q, block_k) for block in blocks) for blocks in steps]
        )
    return Balance(chunk=chunk, pair=pair, tile=tile)


def attended(block: ScoreBlock) -> int:
    """Query-key pairs of a block that its mask keeps."""
    return block.mask.pairs(block.q_len, block.kv_len)


def tiled(block: ScoreBlock, block_q: int, block_k: int) -> int:
    """Pairs in the tiles of a block that hold at least one attended pair."""
    pairs, mask = 0, block.mask
    for start in range(0, block.q_len, block_q):
        stop = min(start + block_q, block.q_len)
        # The first query sees the leftmost key, and the last one the rightmost.
        begin, _ = mask.keys(start, block.q_len, block.kv_len)
        _, end = mask.keys(stop - 1, block.q_len, block.kv_len)
        width = min(block.kv_len, -(-end // block_k) * block_k) - begin // block_k * block_k
        pairs += (stop - start) * max(width, 0)
    return pairs


def _halves(layout: Layout, rank: int, length: int) -> list[range]:
    """The positions in each half of a rank's part."""
    runs = layout.runs(rank, length)
    if len(runs) == 1:
        (run,) = runs
        runs = [run[: len(run) // 2], run[len(run) // 2 :]]
    return [run for run in runs if run]


def _seen_by_run(run: range, mask: Mask) -> int:
    """Keys from the first that the run's first query sees to the last that its last one does."""
    start = 0 if mask.window is None else max(0, run[0] - mask.window + 1)
    return max(run[-1] + 1, mask.prefix_len) - start
