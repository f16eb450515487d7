"""Forward pass with programs of several sizes on a Hopper GPU, beside predictions.

Run as ``python -m benchmarks.program_size [--mask causal full] [--window KEYS]`` in the repository.
Sizes are consumers x query tiles. They run in turns, each as a replayed CUDA graph of several
launches; times are medians over the turns, of all but 2x1 as ratios to it. The second line is what
:mod:`kernels.flash.hopper.program_size` predicts, and ``takes`` what it chooses.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch

from kernels.flash.call.arguments import ForwardPass
from kernels.flash.call.problem import describe
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans, program_size, schedule
from kernels.flash.hopper.program_size import TILES, ProgramSize
from kernels.launching.graphs import capture

SHAPES = [
    *((8, 12, tokens, 64) for tokens in (512, 1024, 2048)),
    *((1, 16, tokens, d) for d in (64, 128) for tokens in (1024, 2048, 4096, 8192, 16384)),
    (4, 16, 4096, 128),
    (1, 32, 8192, 128),
]
"""Batch size, heads, tokens, head dim."""

SHAPES_OF_WINDOWS = [(1, 16, 65536, d) for d in (64, 128)]
"""Besides; without a window they would take minutes."""

LAUNCHES = 20
"""Launches of one graph, so that the start of a graph does not count."""

TURNS = 15


def captured(forward_pass: ForwardPass, size: ProgramSize) -> torch.cuda.CUDAGraph:
    """A graph of forward passes with programs of this size."""

    def run() -> None:
        hopper.forward(forward_pass)

    plans.FORWARD_SIZE = size
    plans.FORWARD_PLANS.clear()
    try:
        graph, _ = capture(lambda: [run() for _ in range(LAUNCHES)], warm_up=run)
    finally:
        plans.FORWARD_SIZE = None
        plans.FORWARD_PLANS.clear()
    return graph


def compare(
    batch_size: int, heads: int, tokens: int, head_dim: int, causal: bool, window: int | None
) -> str:
    """Two rows of the table."""
    shape = (batch_size, heads, tokens, head_dim)
    sizes = [
        ProgramSize(consumers, tiles)
        for consumers in ((2, 3) if head_dim == 64 else (2,))
        for tiles in TILES
    ]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    problem = describe(q, k, v, causal=causal, window=window)
    outputs = {size: (torch.empty_like(q), q.new_empty(shape[:3]).float()) for size in sizes}
    graphs = {
        size: captured(
            ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=head_dim**-0.5), size
        )
        for size, (o, lse) in outputs.items()
    }
    times: dict[ProgramSize, list[float]] = {size: [] for size in sizes}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(-2, TURNS):
        for size, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[size].append(1e3 * start.elapsed_time(end) / LAUNCHES)
    facts = {
        "q_len": tokens,
        "kv_len": tokens,
        "heads": batch_size * heads,
        "heads_at_once": schedule.forward_heads_at_once(problem),
        "block_d": head_dim,
        "causal": causal,
        "window": window,
        "processors": torch.cuda.get_device_properties(q.device).multi_processor_count,
    }
    known = program_size.sizes(head_dim, window)
    rows = {
        "measured": {size: statistics.median(times[size]) for size in sizes},
        "predicted": {size: program_size.predicted_us(**facts, size=size) for size in known},
    }
    o, lse = outputs[sizes[0]]
    agree = all(torch.equal(o, outputs[size][0]) for size in sizes)
    # Rounded differently: other kernels, whose compiler fuses other operations.
    agree = agree and all(
        torch.allclose(lse, outputs[size][1], rtol=1e-6, atol=1e-6) for size in sizes
    )
    takes = program_size.size_of_program(**facts)
    call = f"{batch_size} x {heads} x {tokens} x {head_dim:<4}{'causal' if causal else 'full':<7}"
    lines = [
        f"{call:<30}{name:<10}{us[sizes[0]]:9.1f}"
        + "".join(
            f"{us[size] / us[sizes[0]]:7.3f}" if size in us else f"{'':7}" for size in sizes[1:]
        )
        for name, us in rows.items()
    ]
    return (
        "\n".join(lines)
        + f"  takes {takes.consumers}x{takes.tiles}"
        + ("" if agree else "  RESULTS DIFFER")
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.program_size", description=__doc__)
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=["causal", "full"])
    parser.add_argument("--window", type=int, help="keys that a query sees; by default all")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("program_size: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    example = torch.empty(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    if reason := hopper.why_not(describe(example, example, example, causal=True)):
        print(f"program_size: {reason}", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    ratios = "".join(f"{f'{c}x{t}':>7}" for c in (2, 3) for t in TILES)
    print(f"{'':<40}{'us:':>4}{ratios}")
    for mask in arguments.mask:
        for shape in SHAPES + (SHAPES_OF_WINDOWS if arguments.window else []):
            print(compare(*shape, mask == "causal", arguments.window), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
