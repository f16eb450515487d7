"""Terms of a matrix product's time: waves of tiles over the device's multiprocessors, and bytes.

A product [M, K] x [K, N] is cut into tiles of its result. Tiles run in waves, one on each
multiprocessor, and a last wave of few tiles takes as long as a full one (wave quantisation); at
the edges, tiles compute more than is wanted (tile quantisation). A library picks among tiles, small
ones of which use the multiprocessors worse, and splits long sums of results with few tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.forecast.law import Features, Shape

TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 64, 0.6))
"""Rows, columns, and rate relative to the largest tile; rates as in NVIDIA's guide Matrix
Multiplication Background, section 3.2, which draws them for the A100."""

SPLITS = (1, 2, 4, 8)
"""Parts of a long sum that different multiprocessors add up, so that a small result fills them
(split-K; CUTLASS, Efficient GEMM in CUDA, "Parallelized Reductions")."""

FLOPS_A_BYTE = {2: 206, 4: 14}
"""Of the H200 (data sheet: 989 and 67 teraFLOP/s beside 4.8 TB/s), by bytes of an element: what a
byte of partial results costs."""


def matmul_features(num_sms: int, element_bytes: int) -> Features:
    """Terms of shapes (M, N, K): launch, FLOPs with quantisation, waves, bytes.

    Units that keep coefficients of order one: 1e9 FLOPs, waves, MB.
    """

    def features(shape: Shape) -> Sequence[float]:
        m, n, k = shape
        flops, waves = min(
            quantised(m, n, k, num_sms, parts=parts, partial_flops=FLOPS_A_BYTE[element_bytes])
            for parts in SPLITS
        )
        moved = element_bytes * (m * k + k * n + m * n)
        return 1.0, flops / 1e9, waves, moved / 1e6

    return features


def quantised(
    m: float, n: float, k: float, num_sms: int, *, parts: int = 1, partial_flops: float = 0.0
) -> tuple[float, float]:
    """FLOPs that the device is busy for with the best tile, and waves of that tile.

    A quarter of the loss in a last wave remains, since persistent kernels fill it: full
    quantisation of the waves and none are weighted 1 to 3.

    Args:
        parts: of the sums, whose partial results are float32 and written and read once.
        partial_flops: what a byte of these costs.
    """
    best = math.inf
    best_waves = 1.0
    for rows, columns, rate in TILES:
        tiles = parts * math.ceil(m / rows) * math.ceil(n / columns)
        waves = max(1.0, 0.75 * tiles / num_sms + 0.25 * math.ceil(tiles / num_sms))
        flops = 2 * rows * columns * k / parts * waves * num_sms / rate
        if parts > 1:
            flops += 8 * parts * m * n * partial_flops
        if flops < best:
            best, best_waves = flops, waves
    return best, best_waves
