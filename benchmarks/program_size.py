"""Forward pass with programs of several sizes on a Hopper GPU, beside predictions.

Run as ``python -m benchmarks.program_size [--shapes SHAPE ...]`` in the repository; shapes are
those of benchmarks.kernel_trees. Sizes are consumers x query tiles, or for small programs k and the
keys of a key tile. They run in turns, each as a replayed CUDA graph of several launches; times are
medians over the turns, of all but 2x1 as ratios to it. The second line is what
:mod:`kernels.flash.hopper.program_size` predicts, and ``takes`` what it chooses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import product

import torch

from benchmarks.kernel_trees import Shape, shape_of
from kernels.flash.call.arguments import ForwardPass
from kernels.flash.call.problem import describe
from kernels.flash.hopper import forward_schedule, plans, program_size, schedule
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper.program_size import RESIDENTS, TILES, ProgramSize
from kernels.launching.graphs import capture

SHAPES = (
    *(f"8x12x{tokens}x64" for tokens in (512, 1024, 2048)),
    *(f"1x16x{tokens}x{d}" for d in (64, 128) for tokens in (1024, 2048, 4096, 8192, 16384)),
    *("4x16x4096x64", "8x12x512x128", "8x12x1024x128", "4x16x4096x128", "1x32:8x8192x128"),
    *(f"1x16x65536x{d}/window={w}" for d in (64, 128) for w in (128, 1024, 4096)),
)

LAUNCHES = {4096: 20, 16384: 4}
"""Launches of one graph up to so many tokens, and then 1: the start of a graph should not count."""

TURNS = 11


def captured(forward_pass: ForwardPass, size: ProgramSize, launches: int) -> torch.cuda.CUDAGraph:
    """A graph of forward passes with programs of this size."""

    def run(launches: int = 1) -> None:
        for _ in range(launches):
            hopper.forward(forward_pass)

    plans.FORWARD_SIZE = size
    plans.FORWARD_PLANS.clear()
    try:
        graph, _ = capture(lambda: run(launches), warm_up=run)
    finally:
        plans.FORWARD_SIZE = None
        plans.FORWARD_PLANS.clear()
    return graph


def compare(shape: Shape) -> str:
    """Two rows of the table."""
    width = schedule.columns(shape.head_dim).stored
    launches = next((n for tokens, n in LAUNCHES.items() if shape.tokens <= tokens), 1)
    consumers = (2, 3) if width == 64 else (2,)
    sizes = [ProgramSize(*size) for size in product(consumers, TILES)]
    sizes += [ProgramSize(1, 1, key_tile) for stored, key_tile in RESIDENTS if stored == width]
    q, k, v = (
        torch.randn(
            *(shape.batch_size, heads, shape.tokens, shape.head_dim),
            device="cuda",
            dtype=torch.bfloat16,
        )
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    problem = describe(q, k, v, causal=shape.causal, window=shape.window)
    scale = shape.head_dim**-0.5
    outputs = {size: (torch.empty_like(q), q.new_empty(q.shape[:3]).float()) for size in sizes}
    graphs = {
        size: captured(
            ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=scale), size, launches
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
                times[size].append(1e3 * start.elapsed_time(end) / launches)
    facts = {
        "q_len": shape.tokens,
        "kv_len": shape.tokens,
        "heads": shape.batch_size * shape.heads,
        "heads_at_once": forward_schedule.heads_at_once(problem),
        "block_d": width,
        "causal": shape.causal,
        "window": shape.window,
        "processors": torch.cuda.get_device_properties(q.device).multi_processor_count,
    }
    known = program_size.sizes(width, shape.window)
    rows = {
        "measured": {size: statistics.median(times[size]) for size in sizes},
        "predicted": {size: program_size.predicted_us(**facts, size=size) for size in known},
    }
    o, lse = outputs[sizes[0]]
    agree = all(torch.equal(o, outputs[size][0]) for size in sizes if not size.is_small)
    # Small programs add in another order.
    agree = agree and all(
        torch.allclose(o, outputs[size][0], rtol=1e-2, atol=1e-2) for size in sizes
    )
    # Rounded differently: other kernels, whose compiler fuses other operations.
    agree = agree and all(
        torch.allclose(lse, outputs[size][1], rtol=1e-6, atol=1e-6) for size in sizes
    )
    takes = program_size.size_of_program(**facts)
    lines = [
        f"{shape.text:<30}{name:<10}{us[sizes[0]]:9.1f}"
        + "".join(
            f"  {size.name} {us[size] / us[sizes[0]]:.3f}" for size in sizes[1:] if size in us
        )
        for name, us in rows.items()
    ]
    return "\n".join(lines) + f"  takes {takes.name}" + ("" if agree else "  RESULTS DIFFER")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.program_size", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape_of, metavar="SHAPE")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("program_size: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    example = torch.empty(1, 1, 128, 64, device="cuda", dtype=torch.bfloat16)
    if reason := hopper.why_not(describe(example, example, example, causal=True)):
        print(f"program_size: {reason}", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    for shape in arguments.shapes or [shape_of(text) for text in SHAPES]:
        print(compare(shape), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
