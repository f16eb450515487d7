"""Forward pass with single query tiles against pairs, on a Hopper GPU, beside what was predicted.

Run as ``python -m benchmarks.pairing_ab [--mask causal full] [--window KEYS]`` in the repository.
Both schedules run in turns, each as a replayed CUDA graph of several launches; times are medians
over the turns.
``model`` is what :mod:`kernels.flash.hopper.pairing` predicts, and ``takes`` what it chooses.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from kernels.flash.call.arguments import ForwardPass
from kernels.flash.call.problem import describe
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import pairing, plans
from kernels.launching.graphs import capture

SHAPES = [
    *((8, 12, tokens, 64) for tokens in (512, 1024, 2048)),
    *((1, 16, tokens, d) for d in (64, 128) for tokens in (1024, 2048, 4096, 16384)),
    (4, 16, 4096, 128),
]
"""Batch size, heads, tokens, head dim."""

SHAPES_OF_WINDOWS = [(1, 16, 65536, d) for d in (64, 128)]
"""Besides; without a window they would take minutes."""

LAUNCHES = 20
"""Launches of one graph, so that the start of a graph does not count."""

TURNS = 15


def captured(forward_pass: ForwardPass, tiles: int) -> torch.cuda.CUDAGraph:
    """A graph of forward passes whose programs take this many query tiles."""

    def run() -> None:
        hopper.forward(forward_pass)

    plans.FORWARD_TILES = tiles
    plans.FORWARD_PLANS.clear()
    try:
        graph, _ = capture(lambda: [run() for _ in range(LAUNCHES)], warm_up=run)
    finally:
        plans.FORWARD_TILES = None
        plans.FORWARD_PLANS.clear()
    return graph


def compare(
    batch_size: int, heads: int, tokens: int, head_dim: int, causal: bool, window: int | None
) -> str:
    """One row of the table."""
    shape = (batch_size, heads, tokens, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem = describe(q, k, v, causal=causal, window=window)
    outputs = {t: (torch.empty_like(q), q.new_empty(shape[:3]).float()) for t in (1, 2)}
    graphs = {
        t: captured(
            ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=head_dim**-0.5), t
        )
        for t, (o, lse) in outputs.items()
    }
    times: dict[int, list[float]] = {1: [], 2: []}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(-2, TURNS):
        for tiles, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[tiles].append(1e3 * start.elapsed_time(end) / LAUNCHES)
    single, pairs = (statistics.median(times[tiles]) for tiles in (1, 2))
    facts = {
        "q_len": tokens,
        "kv_len": tokens,
        "heads": batch_size * heads,
        "block_d": head_dim,
        "causal": causal,
        "window": window,
        "processors": torch.cuda.get_device_properties(q.device).multi_processor_count,
    }
    predicted = [pairing.predicted_us(**facts, tiles=tiles) for tiles in (1, 2)]
    chosen = "pairs" if pairing.tiles_of_program(**facts) == 2 else "single"
    agree = torch.equal(outputs[1][0], outputs[2][0])
    # Rounded differently: two kernels, whose compiler fuses other operations.
    agree = agree and torch.allclose(outputs[1][1], outputs[2][1], rtol=1e-6, atol=1e-6)
    differ = "" if agree else "  RESULTS DIFFER"
    return (
        f"{batch_size} x {heads} x {tokens} x {head_dim:<4} {'causal' if causal else 'full':<7}"
        f"{single:9.1f} {pairs:9.1f} {pairs / single:6.3f}   "
        f"{predicted[0]:9.1f} {predicted[1]:9.1f} {predicted[1] / predicted[0]:6.3f}  "
        f"{chosen:<7}{differ}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairing_ab", description=__doc__)
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=["causal", "full"])
    parser.add_argument("--window", type=int, help="keys that a query sees; by default all")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("pairing_ab: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    example = torch.empty(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    if reason := hopper.why_not(describe(example, example, example, causal=True)):
        print(f"pairing_ab: {reason}", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    print(
        f"{'':<29}{'single us':>10} {'pairs us':>9}  ratio   model: single    pairs  ratio  takes"
    )
    for mask in arguments.mask:
        for shape in SHAPES + (SHAPES_OF_WINDOWS if arguments.window else []):
            print(compare(*shape, mask == "causal", arguments.window), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
