"""Searches tile sizes for the any-GPU kernels, in bounded time, and keeps every candidate's time.

Run as ``python -m benchmarks.tile_search --record FILE.csv [OPTIONS]`` in the repository on the
GPU to search for. All candidates are compiled first, by as many processes as there are cores, and
those compiled are timed, one after another; what ``--seconds`` leaves no time for is written down
as untried. ``python -m benchmarks.tile_search --from FILE.csv --write`` then puts the rows that
follow from the record into kernels/flash/any_gpu/pinned.json; it needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from multiprocessing import TimeoutError as PoolTimeoutError
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import tile_record
from kernels.flash import operator
from kernels.flash.any_gpu import configs, launch
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.flash.call.problem import Problem
from kernels.problem import AttentionSpec

ROOT = Path(__file__).parents[1]

SIZES = {"few": (1, 1, 4096), "some": (1, 1, 16384), "many": (1, 16, 4096)}
"""Batch size, heads and tokens that stand for a class of sizes."""

DEVICE = "cuda"

COMPILING_SHARE = 0.6
"""Of the time limit, for compiling."""

Choose = Callable[[str, Problem, Callable[[configs.TileConfig], float]], configs.TileConfig]
"""kernels.flash.any_gpu.configs.choose, or what stands for it."""

Compiled = tuple[str, configs.TileConfig]
"""A row of the table without its size, which kernels are not compiled for, and tiles."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ShapeClass:
    """The shapes that a row of the table is for, in all three kernels."""

    precision: str
    """bfloat16, or of float32 bf16x6, tf32 or ieee."""
    head_dim: int
    causal: bool
    size: str


class Attention:
    """Inputs of one class of shapes, and both passes with tiles that somebody else chooses."""

    def __init__(self, shape_class: ShapeClass) -> None:
        batch_size, num_heads, seq_len = SIZES[shape_class.size]
        half = shape_class.precision == "bfloat16"
        shape = (batch_size, num_heads, seq_len, shape_class.head_dim)
        dtype = torch.bfloat16 if half else torch.float32
        q, k, v, self.do = (torch.randn(shape, device=DEVICE, dtype=dtype) for _ in range(4))
        self.call = FlashCall(
            q=q,
            k=k,
            v=v,
            spec=AttentionSpec(causal=shape_class.causal, scale=shape_class.head_dim**-0.5),
            options=FlashOptions(
                precision="ieee" if half else shape_class.precision, implementation="plain"
            ),
        )
        self.o = torch.zeros_like(q)
        self.lse = torch.zeros(shape[:-1], device=DEVICE)

    def forward(self, choose: Choose) -> None:
        self._run(choose, lambda: operator.forward(self.call))

    def backward(self, choose: Choose) -> None:
        self._run(choose, lambda: operator.backward(self.call, self.do, self.o, self.lse))

    def _run(self, choose: Choose, run: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        launch._configs.clear()
        chooses = configs.choose
        configs.choose = choose
        try:
            results = run()
            _wait()
        finally:
            configs.choose = chooses
        if len(results) == 2:
            self.o, self.lse = results


def candidates(kernel: str, problem: Problem) -> list[configs.TileConfig]:
    """What a search tries on this device, the rule's choice first."""
    return configs.candidates(kernel, problem, configs._device_facts(problem.device)[1])


def compile_candidates(job: tuple[ShapeClass, str, int]) -> list[Compiled]:
    """Compile one candidate of a pass's kernels, and say which, also if they do not run."""
    shape_class, direction, position = job
    done: list[Compiled] = []

    def choose(
        kernel: str, problem: Problem, measure: Callable[[configs.TileConfig], float]
    ) -> configs.TileConfig:
        found = candidates(kernel, problem)
        tiles = found[min(position, len(found) - 1)]
        row = configs.shape_class(kernel, problem)
        done.append((row.rpartition("/")[0], tiles))
        try:
            measure(tiles)
        except Exception:
            # Does not fit; the timing will say so. The last candidate is small.
            return found[-1]
        return tiles

    launch._milliseconds = _run_once
    try:
        attention = Attention(shape_class)
        attention.forward(choose) if direction == "forward" else attention.backward(choose)
    except Exception as error:
        print(f"{job}: {error}", file=sys.stderr)
    return done


def _run_once(run: Callable[[], None]) -> float:
    run()
    _wait()
    return 0.0


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compile_all(classes: list[ShapeClass], deadline: float) -> set[Compiled]:
    """Compile in many processes until ``deadline``, of time.monotonic(), best guesses first."""
    shapes = list(dict.fromkeys(_small(shape_class) for shape_class in classes))
    most = max(len(sizes) for sizes in configs._CANDIDATES.values())
    jobs = [
        (shape_class, direction, position)
        for position in range(most)
        for shape_class in shapes
        for direction in ("backward", "forward")
    ]
    done: set[Compiled] = set()
    with get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        results = pool.imap_unordered(compile_candidates, jobs)
        for _ in jobs:
            try:
                done.update(results.next(max(0.0, deadline - time.monotonic())))
            except PoolTimeoutError:
                print("tile_search: no more time to compile", file=sys.stderr)
                break
    # Leaving the pool ends its processes, also one that hangs in a compiler.
    return done


def _small(shape_class: ShapeClass) -> ShapeClass:
    return ShapeClass(
        precision=shape_class.precision,
        head_dim=shape_class.head_dim,
        causal=shape_class.causal,
        size="few",
    )


def time_class(
    shape_class: ShapeClass, compiled: set[Compiled], deadline: float
) -> list[dict[str, Any]]:
    """Lines of the record, for all candidates of the three kernels on one class of shapes."""
    lines: list[dict[str, Any]] = []

    def choose(
        kernel: str, problem: Problem, measure: Callable[[configs.TileConfig], float]
    ) -> configs.TileConfig:
        row = configs.shape_class(kernel, problem)
        times: dict[configs.TileConfig, float] = {}
        first = len(lines)
        for position, tiles in enumerate(candidates(kernel, problem)):
            line = {
                "row": row,
                "batch_size": problem.batch_size,
                "num_heads": problem.num_heads,
                "seq_len": problem.q_len,
                "position": position,
                **asdict(tiles),
                "outcome": "untried",
            }
            lines.append(line)
            if time.monotonic() > deadline or (row.rpartition("/")[0], tiles) not in compiled:
                continue
            try:
                times[tiles] = measure(tiles)
                line |= {"outcome": "timed", "milliseconds": f"{times[tiles]:.5f}"}
            except Exception as error:
                line |= {"outcome": "failed", "error": " ".join(str(error).split())[:120]}
        if not times:
            raise RuntimeError(f"{row}: no candidate was timed")
        clock_mhz = _sm_clock_mhz()
        for line in lines[first:]:
            line["sm_clock_mhz"] = clock_mhz
        return min(times, key=times.__getitem__)

    attention = Attention(shape_class)
    try:
        attention.forward(choose)
        attention.backward(choose)
    except RuntimeError as error:
        print(f"tile_search: {error}", file=sys.stderr)
    return lines


def _sm_clock_mhz() -> str:
    """The clock of the first GPU that nvidia-smi names; empty if it does not say."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits"]
    try:
        return subprocess.check_output(command, text=True, timeout=5).split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return ""


def measure(classes: list[ShapeClass], path: Path, seconds: float) -> None:
    """Search in at most about ``seconds``, and write the record as it grows."""
    start = time.monotonic()
    compiled = compile_all(classes, start + COMPILING_SHARE * seconds)
    print(f"compiled {len(compiled)} kernels in {time.monotonic() - start:.0f} s", flush=True)
    common = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, tile_record.COLUMNS, lineterminator="\n")
        writer.writeheader()
        for shape_class in classes:
            for line in time_class(shape_class, compiled, start + seconds):
                writer.writerow({**common, **line})
            file.flush()
    print(f"compiled and timed in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile_search", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--record", type=Path, help="search, and write every time to this CSV file")
    what.add_argument("--from", type=Path, dest="source", help="search nothing: read this record")
    precisions = ["bfloat16", "bf16x6", "tf32", "ieee"]
    parser.add_argument("--precision", nargs="+", default=precisions[:2], choices=precisions)
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--mask", nargs="+", default=["causal", "full"], choices=["causal", "full"])
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=150.0, help="about, for the whole search")
    parser.add_argument("--write", action="store_true", help="put the rows into pinned.json")
    arguments = parser.parse_args()
    if arguments.record is not None:
        if not torch.cuda.is_available():
            print("tile_search: needs a CUDA device, and torch sees none", file=sys.stderr)
            return 2
        classes = [
            ShapeClass(precision=precision, head_dim=head_dim, causal=mask == "causal", size=size)
            for mask, head_dim, precision, size in product(
                arguments.mask, arguments.head_dim, arguments.precision, arguments.size
            )
            # A wide head_dim has one candidate in bf16x6.
            if precision != "bf16x6" or head_dim <= 128
        ]
        measure(classes, arguments.record, arguments.seconds)
    path = arguments.record or arguments.source
    lines = tile_record.read(path)
    table = tile_record.table_of(lines)
    for row in sorted(table):
        print(row, *asdict(table[row]).values())
    if arguments.write:
        record = path.resolve().relative_to(ROOT).as_posix()
        text = tile_record.merged(tile_record.PINNED.read_text(encoding="utf-8"), lines, record)
        tile_record.PINNED.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
