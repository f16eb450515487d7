"""Searches tile sizes for the any-GPU kernels, and writes them to the table that ships with them.

Run as ``python -m benchmarks.tile_search [OPTIONS]`` in the repository on the GPU to search for;
``--write`` puts the rows into kernels/flash/any_gpu/pinned.json, in place of those of the same
device and class. Without it they are printed. All candidates are compiled first, by as many
processes as there are cores; then they are timed, one after another. float16 gets the rows of
bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from kernels.flash import operator
from kernels.flash.any_gpu import configs
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.problem import AttentionSpec

PINNED = Path(configs.__file__).with_name("pinned.json")

LENGTHS = {"short": (8, 1024), "long": (1, 8192)}
"""Batch size and tokens of the sequences that stand for a class of lengths."""

NUM_HEADS = 16


@dataclass(kw_only=True, slots=True, frozen=True)
class ShapeClass:
    """The shapes that a row of the table is for, in all three kernels."""

    precision: str
    """bfloat16, or of float32 bf16x6, tf32 or ieee."""
    head_dim: int
    causal: bool
    length: str


def search(shape_class: ShapeClass) -> configs.Table:
    """The fastest tiles of forward, dK and dV, and dQ: rows of a table."""
    # What is shipped now must not answer.
    configs._pinned().clear()
    batch_size, seq_len = LENGTHS[shape_class.length]
    dtype = torch.bfloat16 if shape_class.precision == "bfloat16" else torch.float32
    shape = (batch_size, NUM_HEADS, seq_len, shape_class.head_dim)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(4))
    options = FlashOptions(
        precision="ieee" if shape_class.precision == "bfloat16" else shape_class.precision,
        implementation="plain",
        autotune=True,
    )
    call = FlashCall(
        q=q,
        k=k,
        v=v,
        spec=AttentionSpec(causal=shape_class.causal, scale=shape_class.head_dim**-0.5),
        options=options,
    )
    o, lse = operator.forward(call)
    operator.backward(call, do, o, lse)
    torch.cuda.synchronize()
    return dict(configs._cached(torch.cuda.get_device_name()))


def with_float16(table: configs.Table) -> configs.Table:
    """The table, and the same tiles for float16, which costs what bfloat16 costs."""
    twins = {row.replace("/bfloat16/", "/float16/"): tiles for row, tiles in table.items()}
    return {**table, **twins}


def merged(text: str, device_name: str, table: configs.Table) -> str:
    """The shipped file with a device's rows added or replaced, one row on each line."""
    devices = json.loads(text)
    rows = devices.get(device_name, {}) | {row: asdict(tiles) for row, tiles in table.items()}
    devices[device_name] = rows
    blocks = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(row)}: {json.dumps(rows[row])}" for row in sorted(rows))
        + "\n }"
        for name, rows in sorted(devices.items())
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tile_search", description=__doc__)
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["bfloat16"],
        choices=["bfloat16", "bf16x6", "tf32", "ieee"],
    )
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--mask", nargs="+", default=["causal"], choices=["causal", "full"])
    parser.add_argument("--length", nargs="+", default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--write", action="store_true", help=f"put the rows into {PINNED.name}")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("tile_search: needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    classes = [
        ShapeClass(precision=precision, head_dim=head_dim, causal=mask == "causal", length=length)
        for precision, head_dim, mask, length in product(
            arguments.precision, arguments.head_dim, arguments.mask, arguments.length
        )
    ]
    with tempfile.TemporaryDirectory() as scratch:
        # Each search starts from an empty table of this machine; compiled kernels are kept.
        os.environ["XDG_CACHE_HOME"] = scratch
        processes = min(len(classes), os.cpu_count() or 1)
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(search, classes))
        configs.cache_path(torch.cuda.get_device_name()).unlink(missing_ok=True)
        table: configs.Table = {}
        for shape_class in classes:
            table |= search(shape_class)
    table = with_float16(table)
    for row in sorted(table):
        print(row, asdict(table[row]))
    if arguments.write:
        text = merged(PINNED.read_text(encoding="utf-8"), torch.cuda.get_device_name(), table)
        PINNED.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
