"""Balance of a layout: FLOPs of attention on each rank, counted on the blocks that run.

Three counts of the forward pass, 4 D FLOPs (two matmuls) for each head and pair:

    chunk   every query in a half of a rank's part is charged all keys up to the end of that
            half: the count of published guides, which charges diagonals in full
    pair    exactly the query-key pairs that the mask keeps
    tile    whole tiles of block_q x block_k with at least one such pair, which a kernel computes

A ring computes in lockstep: at step t, rank r works on the keys of rank r - t, and everybody
waits for the slowest. Its cost is the sum over steps of the largest count, relative to a
perfect split. An all-gather has one step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
) -> Balance:
    """Count a causal sequence of ``length`` tokens on every rank of a layout.

    Args:
        block_q, block_k: tile of the kernel, in queries and keys.
    """
    per_pair = 4.0 * num_heads * head_dim
    ranks, local = range(layout.num_ranks), layout.local_len(length)
    chunk, pair, tile = [], [], []
    for rank in ranks:
        ends = _ends_of_halves(layout, rank, length)
        chunk.append([per_pair * num_queries * end for num_queries, end in ends])
        blocks = [layout.block(rank, (rank - step) % len(ranks), local, True) for step in ranks]
        pair.append([per_pair * (attended(block) if block else 0) for block in blocks])
        tile.append(
            [per_pair * (tiled(block, block_q, block_k) if block else 0) for block in blocks]
        )
    return Balance(chunk=chunk, pair=pair, tile=tile)


def attended(block: ScoreBlock) -> int:
    """Query-key pairs of a block that its mask keeps."""
    if not block.causal:
        return block.q_len * block.kv_len
    # Query i sees keys 0 .. i + kv_len - q_len.
    least = block.kv_len - block.q_len + 1
    return block.q_len * least + block.q_len * (block.q_len - 1) // 2


def tiled(block: ScoreBlock, block_q: int, block_k: int) -> int:
    """Pairs in the tiles of a block that hold at least one attended pair."""
    pairs = 0
    for start in range(0, block.q_len, block_q):
        stop = min(start + block_q, block.q_len)
        seen = stop + block.kv_len - block.q_len if block.causal else block.kv_len
        pairs += (stop - start) * min(block.kv_len, -(-seen // block_k) * block_k)
    return pairs


def _ends_of_halves(layout: Layout, rank: int, length: int) -> list[tuple[int, int]]:
    """Queries in each half of a rank's part, and the keys up to the last of them."""
    runs = layout.runs(rank, length)
    if len(runs) == 1:
        (run,) = runs
        runs = [run[: len(run) // 2], run[len(run) // 2 :]]
    return [(len(run), run[-1] + 1) for run in runs if run]
