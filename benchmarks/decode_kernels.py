"""Times the decode kernels at the sizes they are made for, and searches their tiles.

Run as ``python -m benchmarks.decode_kernels [OPTIONS]`` in the repository on a GPU. Prints, for
each shape, the time of a call in a replayed CUDA graph, the bytes of cache that it reads each
second and their share of what a copy moves here (:mod:`harness.bench.copy_bandwidth`), TFLOP/s,
and the error against float64 attention of one sequence. ``--search`` tries a grid of tiles,
compiled beforehand by as many processes as there are cores; ``--save`` keeps the fastest of each
shape in the user's table, which :mod:`kernels.decode.configs` reads first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from harness.bench.copy_bandwidth import measured_gb_s
from kernels.decode import Rotary, flash_decode, mla_decode
from kernels.decode.configs import Tiles, choose, shape_class, user_table_path
from kernels.decode.dense.call import describe_flash
from kernels.decode.latent import hopper as hopper_latent
from kernels.decode.latent.call import describe_latent
from kernels.launching.graphs import capture

CALLS = 10
"""Steps of one graph: enough for the launch of a graph not to count."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """One decoding step with caches of equal lengths, bfloat16."""

    kernel: str
    """flash or latent."""
    batch_size: int
    tokens: int
    num_heads: int
    num_kv_heads: int = 1
    head_dim: int = 512
    rope_dim: int = 0
    page: int = 0

    @property
    def read_bytes(self) -> int:
        if self.kernel == "latent":
            return 2 * self.batch_size * self.tokens * (self.head_dim + self.rope_dim)
        return 4 * self.batch_size * self.tokens * self.num_kv_heads * self.head_dim

    @property
    def flops(self) -> int:
        widths = 2 * self.head_dim + self.rope_dim
        return 2 * self.batch_size * self.num_heads * self.tokens * widths


_BATCH_16 = Shape(
    kernel="flash", batch_size=16, tokens=32768, num_heads=32, num_kv_heads=8, head_dim=128
)
_LATENT = Shape(kernel="latent", batch_size=32, tokens=16384, num_heads=128, rope_dim=64)

SHAPES = {
    "batch16": _BATCH_16,
    "batch16_paged64": replace(_BATCH_16, page=64),
    "batch16_paged16": replace(_BATCH_16, page=16),
    "batch1": replace(_BATCH_16, batch_size=1, tokens=131072),
    "mla": _LATENT,
    "mla_paged64": replace(_LATENT, page=64),
    "mla_16_heads": replace(_LATENT, num_heads=16),
}


@dataclass(slots=True)
class Step:
    """A call, ready to be made again and again, and the result it should have."""

    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    """Output of the last sequence and all its heads, [H, D] in float64."""
    row: str
    tiles: Tiles


def prepare(shape: Shape, tiles: Tiles | None, implementation: str = "auto") -> Step:
    """Fills caches with random numbers; the last of the tokens is the new one."""
    s = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

    table = None
    if s.page:
        each = s.tokens // s.page
        order = torch.randperm(s.batch_size * each, generator=generator, device="cuda")
        table = order.view(s.batch_size, each).int()
    rows = s.tokens if table is None else s.page
    first = s.batch_size if table is None else table.numel()
    if s.kernel == "latent":
        cache = randn(first, rows, s.head_dim + s.rope_dim)
        q = randn(s.batch_size, s.num_heads, 1, s.head_dim)
        q_rope = randn(s.batch_size, s.num_heads, 1, s.rope_dim)
        lengths = torch.full((s.batch_size,), s.tokens, dtype=torch.int32, device="cuda")
        scale = 192**-0.5
        call = describe_latent(q, q_rope, cache, lengths, table, None)

        def run_latent() -> Tensor:
            return mla_decode(
                q, q_rope, cache, lengths, block_table=table, scale=scale, tiles=tiles,
                implementation=implementation,
            )  # fmt: skip

        def expected_latent() -> Tensor:
            keys = (cache[-1] if table is None else cache[table[-1]].flatten(0, 1)).double()
            queries = torch.cat([q[-1, :, 0], q_rope[-1, :, 0]], dim=-1).double()
            return (queries @ keys.mT * scale).softmax(-1) @ keys[:, : s.head_dim]

        return Step(
            run_latent, expected_latent, shape_class("latent", call),
            tiles or choose("latent", call, interpreted=False),
        )  # fmt: skip

    caches = [randn(first, s.num_kv_heads, rows, s.head_dim) for _ in range(2)]
    q = randn(s.batch_size, s.num_heads, 1, s.head_dim)
    k_new, v_new = (randn(s.batch_size, s.num_kv_heads, 1, s.head_dim) for _ in range(2))
    lengths = torch.full((s.batch_size,), s.tokens - 1, dtype=torch.int32, device="cuda")
    # Angles of zero: the reference below need not rotate, and the kernel cannot know.
    turn = torch.zeros(s.tokens, s.head_dim // 2, device="cuda")
    rotary = Rotary(turn.cos(), turn.sin())
    call_flash = describe_flash(q, k_new, v_new, *caches, lengths, table, rotary, None)

    def run() -> Tensor:
        return flash_decode(
            q, k_new, v_new, *caches, lengths, block_table=table, rotary=rotary, tiles=tiles
        )

    def expected() -> Tensor:
        k, v = (
            x[-1] if table is None else x[table[-1]].transpose(0, 1).flatten(1, 2) for x in caches
        )
        queries = q[-1, :, 0].unflatten(0, (s.num_kv_heads, -1)).double()
        p = (queries @ k.double().mT * s.head_dim**-0.5).softmax(-1)
        return (p @ v.double()).flatten(0, 1)

    return Step(
        run, expected, shape_class("flash", call_flash),
        tiles or choose("flash", call_flash, interpreted=False),
    )  # fmt: skip


def milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """Median time of a call, over replays of a graph of several."""
    graph, _ = capture(lambda: [run() for _ in range(CALLS)], warm_up=run)
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    return statistics.median(times) / CALLS


def candidates(shape: Shape) -> list[Tiles]:
    """The tiles that a search tries; programs_per_sm needs no other kernel."""
    if shape.kernel == "latent":
        rows = min(64, max(16, shape.num_heads))
        grid = product((rows,), (32, 64), (4, 8), (2, 3), (1, 2), (0,))
    else:
        grid = product((16,), (32, 64, 128), (4, 8), (3, 4), (2, 3, 4, 8, 16), (0, 168))
    return [
        Tiles(
            block_m=m, block_n=n, num_warps=warps, num_stages=stages, programs_per_sm=programs,
            max_registers=registers,
        )
        for m, n, warps, stages, programs, registers in grid
        if n < 128 or stages == 3
    ]  # fmt: skip


def compile_tiles(shape: Shape, tiles: Tiles) -> None:
    """Runs the kernel once on a small cache, which leaves it in Triton's cache on disk."""
    try:
        prepare(replace(shape, tokens=4096), tiles).run()
        torch.cuda.synchronize()
    except Exception:
        # Says so again, with its reason, when it is timed.
        return


def report(name: str, shape: Shape, what: str, step: Step, copy: float) -> float | None:
    """Prints one line; the time, or None if these tiles do not work."""
    try:
        got = step.run()[-1, :, 0].double()
        time_ms = milliseconds(step.run)
    except Exception as error:
        print(f"{name:<16} {what:<64} {str(error).splitlines()[0][:80]}", flush=True)
        return None
    wanted = step.expected()
    error = float((got - wanted).norm() / wanted.norm())
    gb_s = shape.read_bytes / time_ms / 1e6
    print(
        f"{name:<16} {what:<64} {1e3 * time_ms:8.1f} us "
        f"{gb_s:6.0f} GB/s {gb_s / copy:6.1%} of copy "
        f"{shape.flops / time_ms / 1e9:6.1f} TFLOP/s  error {error:.1e}",
        flush=True,
    )
    return time_ms if error < 2e-2 else None


def describe(tiles: Tiles) -> str:
    return (
        f"{tiles.block_m} x {tiles.block_n}, {tiles.num_warps} warps, {tiles.num_stages} stages, "
        f"{tiles.programs_per_sm} per SM, {tiles.max_registers or 'any'} registers"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode_kernels", description=__doc__
    )
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--search", action="store_true", help="try a grid of tiles")
    parser.add_argument("--save", action="store_true", help="keep the fastest in the user's table")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("decode_kernels: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    copy = measured_gb_s("cuda", torch.cuda.current_device())
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy:.0f} GB/s", flush=True)
    table: dict[str, Tiles] = {}
    for name in arguments.shape:
        shape = SHAPES[name]
        for implementation in ("hopper", "plain") if shape.kernel == "latent" else ("auto",):
            try:
                step = prepare(shape, None, implementation)
            except ValueError as error:
                print(f"{name:<16} {error}")
                continue
            tiles = hopper_latent.TILES if implementation == "hopper" else step.tiles
            report(name, shape, f"{implementation}, {describe(tiles)}", step, copy)
            del step
        if not arguments.search:
            continue
        tried = candidates(shape)
        kernels = {replace(tiles, programs_per_sm=1): tiles for tiles in tried}
        processes = min(len(kernels), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_tiles, [shape] * len(kernels), kernels.values()))
        times: dict[Tiles, float] = {}
        for tiles in tried:
            step = prepare(shape, tiles)
            time_ms = report(name, shape, describe(tiles), step, copy)
            if time_ms is not None:
                times[tiles] = time_ms
                if times[tiles] == min(times.values()):
                    table[step.row] = tiles
            del step
        for tiles in sorted(times, key=times.__getitem__)[:3]:
            print(f"{name:<16} fastest: {1e3 * times[tiles]:8.1f} us  {describe(tiles)}")
    if arguments.save and table:
        path = user_table_path(torch.cuda.get_device_name())
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {row: asdict(tiles) for row, tiles in table.items()}
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
