"""Tile sizes: which configuration a kernel runs with, and where that choice comes from.

In this order: the table shipped with the package (``pinned.json``), rows that a search found;
the table of this machine in the user's cache, written by autotuning; a search now, if the caller
asked for autotuning; shipped rows that are predicted; and a rule by head_dim, dtype and the GPU's
shared memory, which is the prediction for every other GPU. :func:`origins` counts which it was.
A table has one row for a kernel and class of shapes, such as
``forward/bfloat16/d64/causal/many``. The shipped file says of each device's rows where they come
from: ``searched`` with date, versions and the committed record (benchmarks/tile_search.py), or
``predicted`` with by what.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.flash.call.problem import Problem, padded

ROWS = {"few": 8_192, "some": 32_768}
"""The most query rows, of all heads and sequences, of classes of calls; beyond are many. What
matters is whether tiles of a size are enough programs for a large GPU's multiprocessors: 64 or 128
rows a tile fill an H200 from 16,384 rows on (results/h200-tiles/float32.csv)."""

MANY = "many"


@dataclass(kw_only=True, slots=True, frozen=True)
class TileConfig:
    """How one kernel is cut into tiles and compiled."""

    block_q: int
    """Queries of a tile."""
    block_k: int
    """Keys of a tile."""
    num_warps: int
    num_stages: int
    """Tiles in flight between memory and the matmuls."""


Table = dict[str, TileConfig]

INTERPRETER = {
    "forward": TileConfig(block_q=32, block_k=16, num_warps=4, num_stages=1),
    "backward_dkv": TileConfig(block_q=16, block_k=32, num_warps=4, num_stages=1),
    "backward_dq": TileConfig(block_q=32, block_k=16, num_warps=4, num_stages=1),
}
"""Small, and of two sizes, so that the tests' short sequences have full and cut tiles."""

# Largest first, (block_q, block_k, num_warps, num_stages): the rule takes the first that fits
# the GPU's shared memory, and autotuning tries them all.
_CANDIDATES = {
    "forward": (
        (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 3),
        (64, 64, 4, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 32, 4, 2), (128, 128, 8, 3),
        (128, 128, 8, 2), (32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1),
    ),
    "backward_dkv": (
        (64, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2),
        (32, 128, 8, 3), (32, 128, 8, 2), (128, 64, 8, 2), (32, 64, 4, 2), (32, 64, 8, 2),
        (32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1),
    ),
    "backward_dq": (
        (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3),
        (128, 32, 8, 2), (64, 64, 8, 2), (128, 128, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2),
        (32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1),
    ),
}  # fmt: skip

# float32 in full precision has no tensor cores: every thread multiplies, from registers.
_IEEE_CANDIDATES = {
    "forward": (
        (64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 1), (32, 32, 8, 2), (32, 32, 4, 1),
        (16, 32, 8, 1), (16, 16, 8, 1),
    ),
    "backward_dkv": (
        (32, 32, 8, 2), (32, 32, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 32, 8, 1),
        (16, 16, 8, 1),
    ),
    "backward_dq": (
        (64, 32, 8, 2), (64, 32, 8, 1), (32, 32, 8, 2), (32, 32, 8, 1), (32, 32, 4, 1),
        (16, 32, 8, 1), (16, 16, 8, 1),
    ),
}  # fmt: skip

# bf16x6 holds three parts of each operand, in registers but for those that Hopper's matmuls read
# from shared memory. So these are the tiles that compile without spilling much (Triton 3.6's ptxas,
# compute capability 8.0 and 9.0): under 160 bytes a thread, 300 in backward_dkv at head_dim 128,
# which keeps two tiles and two sums. Those first whose rows share the splitting of most others. At
# head_dim 128 only Hopper, whose matmuls want 64 rows, takes 128 of them well: they stand first
# with a size that fits no smaller GPU, where they would spill 1 to 50 KB. Last stand larger tiles
# for a search alone, which spill 176 to 704 bytes on Hopper and can be the fastest all the same. On
# compute capability 8.0 those that fit spill 0.2 to 8.5 KB, and take 2 to 5 s to compile.
_SPLIT_CANDIDATES = {
    ("forward", 64): (
        (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 4, 1), (64, 32, 8, 2), (128, 64, 8, 2),
        (128, 16, 8, 2), (64, 16, 4, 2), (32, 32, 4, 2), (32, 32, 4, 1), (64, 64, 4, 1),
        (32, 64, 4, 2),
    ),
    ("backward_dkv", 64): (
        (16, 64, 8, 2), (32, 32, 8, 2), (32, 128, 8, 2), (16, 128, 8, 2), (32, 64, 8, 1),
        (16, 64, 4, 1), (32, 32, 4, 2), (32, 32, 8, 1), (64, 128, 8, 1),
    ),
    ("backward_dq", 64): (
        (128, 32, 8, 2), (64, 32, 4, 2), (64, 32, 8, 2), (128, 64, 8, 2), (128, 16, 8, 2),
        (64, 16, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (64, 64, 4, 1), (32, 64, 4, 2),
    ),
    ("forward", 128): (
        (128, 32, 8, 3), (32, 32, 8, 2), (32, 32, 8, 1), (128, 32, 8, 2), (128, 16, 8, 2),
        (64, 32, 4, 1), (64, 16, 4, 2), (32, 32, 4, 1), (128, 64, 8, 1), (64, 32, 8, 2),
    ),
    ("backward_dkv", 128): (
        (32, 32, 8, 2), (32, 32, 8, 1), (32, 16, 8, 2), (32, 16, 8, 1), (16, 32, 8, 2),
        (32, 128, 8, 1), (16, 128, 8, 1), (32, 64, 8, 1), (16, 64, 8, 1),
    ),
    ("backward_dq", 128): (
        (128, 32, 8, 1), (128, 16, 8, 2), (32, 32, 8, 2), (16, 32, 4, 2), (64, 16, 4, 2),
        (32, 16, 8, 1), (64, 32, 8, 1), (64, 32, 4, 1),
    ),
}  # fmt: skip
"""By kernel and the largest padded head_dim that they are for."""

_NARROW_SPLIT_CANDIDATES = {
    "forward": ((64, 64, 4, 2), (128, 128, 8, 1)),
    "backward_dkv": ((64, 128, 8, 2), (64, 64, 4, 1)),
    "backward_dq": ((128, 64, 8, 1), (64, 64, 4, 2), (128, 128, 8, 1)),
}
"""After those for 64, at a head_dim of 32 or less, where they spill 0 to 136 bytes on Hopper, and
up to 1.9 KB on compute capability 8.0 and 8.9."""

_SOURCES = {"searched": ("date", "torch", "triton", "record"), "predicted": ("by",)}
"""What the shipped file says of rows besides them, by where they come from."""

# Values that one thread of a program may hold before the compiler (Triton 3.6 with its ptxas,
# for compute capability 8.0, 8.6 and 9.0) spills more than a few: see _values_of_a_thread.
_MAX_VALUES = 176
_MAX_IEEE_VALUES = 16

AUTOTUNE_SECONDS = 60.0
"""After so long a search for one row starts no further candidate."""

_autotune_seconds = 0.0

_origins: Counter[str] = Counter()


def choose(
    kernel: str, problem: Problem, measure: Callable[[TileConfig], float] | None = None
) -> TileConfig:
    """The configuration of ``kernel`` (forward, backward_dkv or backward_dq) for a problem.

    Args:
        measure: gives the milliseconds of a configuration, or raises if it does not compile
            or fit; used only if the problem asks for autotuning and no table has an answer.
    """
    tiles, origin = without_search(kernel, problem)
    if origin in ("predicted", "rule") and problem.autotune and measure is not None:
        device_name, shared_memory_bytes = _device_facts(problem.device)
        row, origin = shape_class(kernel, problem), "autotuned"
        tiles = _search(row, candidates(kernel, problem, shared_memory_bytes), measure)
        _cached(device_name)[row] = tiles
        _write(cache_path(device_name), _cached(device_name))
    _origins[origin] += 1
    return tiles


def without_search(kernel: str, problem: Problem) -> tuple[TileConfig, str]:
    """What :func:`choose` takes if it measures nothing, and where that comes from; not counted."""
    device_name, shared_memory_bytes = _device_facts(problem.device)
    row = shape_class(kernel, problem)
    shipped = _pinned().get(device_name, {})
    for origin, table in (
        ("searched", shipped.get("searched", {})),
        ("autotuned", _cached(device_name)),
        ("predicted", shipped.get("predicted", {})),
    ):
        if row in table:
            return table[row], origin
    if problem.value_dim is not None:
        # Tiles for values as wide as keys fit narrower ones, too.
        tiles, origin = without_search(kernel, replace(problem, value_dim=None))
        return tiles, "rule" if origin == "rule" else "predicted"
    return candidates(kernel, problem, shared_memory_bytes)[0], "rule"


def origins() -> Counter[str]:
    """How many choices of this process were ``searched`` and shipped, ``autotuned`` on this
    machine, ``predicted`` and shipped, or the ``rule``'s."""
    return _origins.copy()


def shape_class(kernel: str, problem: Problem) -> str:
    """The row of a table: kernel, dtype, padded head_dim, mask and number of query rows.

    Of values narrower than keys the padded columns as well, so that neither has the other's tiles.
    """
    dtype = str(problem.dtype).removeprefix("torch.")
    if problem.precision != "ieee":
        dtype = problem.precision
    mask = "causal" if problem.causal else "full"
    num_rows = problem.batch_size * problem.num_heads * problem.q_len
    size = next((name for name, most in ROWS.items() if num_rows <= most), MANY)
    width = f"d{problem.block_d}"
    if problem.value_dim is not None:
        width += f"v{padded(problem.value_dim)}"
    return f"{kernel}/{dtype}/{width}/{mask}/{size}"


def candidates(kernel: str, problem: Problem, shared_memory_bytes: int) -> list[TileConfig]:
    """Configurations likely to fit registers and shared memory, best guess first; never empty."""
    ieee = problem.dtype == torch.float32 and problem.precision == "ieee"
    split = problem.precision == "bf16x6"
    found = []
    for block_q, block_k, num_warps, num_stages in _sizes(kernel, problem, ieee):
        config = TileConfig(
            block_q=block_q, block_k=block_k, num_warps=num_warps, num_stages=num_stages
        )
        needs_bytes = _needs_bytes_split if split else _needs_bytes
        fits = needs_bytes(kernel, problem, config) <= shared_memory_bytes
        limit = _MAX_IEEE_VALUES if ieee else _MAX_VALUES
        if fits and (split or _values_of_a_thread(kernel, problem, config, ieee) <= limit):
            found.append(config)
    # 8 warps share the parts of a wide head_dim.
    num_warps = 8 if split else 4
    return found or [TileConfig(block_q=16, block_k=16, num_warps=num_warps, num_stages=1)]


def _sizes(kernel: str, problem: Problem, ieee: bool) -> tuple[tuple[int, int, int, int], ...]:
    if problem.precision != "bf16x6":
        return (_IEEE_CANDIDATES if ieee else _CANDIDATES)[kernel]
    sizes = _SPLIT_CANDIDATES.get((kernel, max(64, problem.block_d)), ())
    return sizes + (_NARROW_SPLIT_CANDIDATES[kernel] if problem.block_d <= 32 else ())


def autotune_seconds() -> float:
    """Time spent searching in this process, for a harness to record apart."""
    return _autotune_seconds


def cache_path(device_name: str) -> Path:
    """This machine's table for one kind of device and these versions of torch and triton."""
    name = f"{device_name}-torch{torch.__version__}-triton{triton.__version__}"
    return cache_folder() / (re.sub(r"[^\w.+-]+", "_", name) + ".json")


def cache_folder() -> Path:
    """The folder in the user's cache for tile sizes and the compiled node."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "attnbench" / "flash"


def read_table(path: Path) -> Table:
    """A table from its file; empty, with a warning, if the file is no table."""
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path}: ignored, not a table of tile sizes: {error}", stacklevel=2)
        return {}


def _search(
    row: str,
    found: list[TileConfig],
    measure: Callable[[TileConfig], float],
) -> TileConfig:
    """The fastest candidate; those that do not compile, or do not fit the device, drop out.

    Candidates come best guess first. After ``AUTOTUNE_SECONDS`` no further one is started once one
    has run, and a warning says how many were left. A candidate that hangs in the compiler cannot be
    interrupted: it holds the search, and the call that asked for it.
    """
    global _autotune_seconds
    start = time.perf_counter()
    times: dict[TileConfig, float] = {}
    failure: Exception | None = None
    for position, config in enumerate(found):
        if times and time.perf_counter() - start >= AUTOTUNE_SECONDS:
            warnings.warn(
                f"{row}: autotuning stopped after {AUTOTUNE_SECONDS:g} s, with "
                f"{len(found) - position} of {len(found)} tile sizes untried; the best so far is "
                "kept",
                stacklevel=2,
            )
            break
        try:
            times[config] = measure(config)
        except Exception as error:
            # Triton, LLVM and ptxas each have exceptions of their own for "does not fit".
            failure = error
    _autotune_seconds += time.perf_counter() - start
    if not times:
        raise RuntimeError(f"no tile size works here; the last one failed: {failure}") from failure
    return min(times, key=times.__getitem__)


def _needs_bytes(kernel: str, problem: Problem, config: TileConfig) -> int:
    """Shared memory, about: the tiles that stay, and those in flight in each stage."""
    kept, moving = config.block_q, config.block_k
    if kernel == "backward_dkv":
        kept, moving = moving, kept
    rows = kept * (1 if kernel == "forward" else 2) + 2 * moving * config.num_stages
    scores = 0 if kernel == "forward" else 2 * config.block_q * config.block_k
    return (rows * problem.block_d + scores) * problem.dtype.itemsize


def _needs_bytes_split(kernel: str, problem: Problem, config: TileConfig) -> int:
    """Shared memory of bf16x6 as compiled for compute capability 9.0, which needs the most.

    Three parts of the tiles that stay and of one that moves, and in each further stage two tiles
    in float32.
    """
    kept, moving = config.block_q, config.block_k
    if kernel == "backward_dkv":
        kept, moving = moving, kept
    parts = 6 * (kept * (1 if kernel == "forward" else 2) + moving)
    # Queries change their layout on the way to the second matmul.
    turned = 2 * moving if kernel == "backward_dkv" else 0
    stages = 2 * 4 * moving * (config.num_stages - 1)
    return (parts + turned + stages) * problem.block_d


def _values_of_a_thread(kernel: str, problem: Problem, config: TileConfig, ieee: bool) -> int:
    """Accumulators, scores and probabilities; without tensor cores only the accumulator's."""
    kept = config.block_k if kernel == "backward_dkv" else config.block_q
    values = kept * problem.block_d
    if not ieee:
        scores = config.block_q * config.block_k
        if kernel == "backward_dkv":
            values = 2 * values + scores + scores // 2
        elif kernel == "backward_dq":
            values += 2 * scores
        else:
            values += scores + scores // 2
        if problem.dtype == torch.float32:
            # tf32 operands are twice as wide.
            values *= 2
    return values // (32 * config.num_warps)


@cache
def _device_facts(device: torch.device) -> tuple[str, int]:
    """Name, and the most shared memory that one program may use."""
    if device.type != "cuda":
        return device.type, 64 * 1024
    if not torch.cuda.is_available():
        # Memory is predicted for GPUs that are not here, too.
        return "NVIDIA H200", 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return properties.name, getattr(properties, "shared_memory_per_block_optin", 64 * 1024)


@cache
def _pinned() -> dict[str, dict[str, Table]]:
    """The shipped rows by device and origin, ``searched`` or ``predicted``."""
    path = Path(__file__).with_name("pinned.json")
    return shipped_tables(json.loads(path.read_text(encoding="utf-8")))


def shipped_tables(devices: dict[str, Any]) -> dict[str, dict[str, Table]]:
    """The rows of the shipped file by device and origin; ValueError if one lacks its source."""
    for device, blocks in devices.items():
        for origin, block in blocks.items():
            facts = _SOURCES.get(origin)
            if facts is None:
                raise ValueError(f"{device}: {origin} must be one of {', '.join(_SOURCES)}")
            if block.keys() != {*facts, "rows"}:
                raise ValueError(f"{device}: {origin} must have {', '.join(facts)} and rows")
    return {
        device: {origin: _parse(block["rows"]) for origin, block in blocks.items()}
        for device, blocks in devices.items()
    }


@cache
def _cached(device_name: str) -> Table:
    """The user's table, read once; searching adds rows to it."""
    return read_table(cache_path(device_name))


def _parse(rows: dict[str, dict[str, int]]) -> Table:
    return {row: TileConfig(**values) for row, values in rows.items()}


def _write(path: Path, table: Table) -> None:
    """Write atomically: another process may read or write the same file now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Keep what another process found meanwhile.
    merged = {**read_table(path), **table}
    text = json.dumps({row: asdict(merged[row]) for row in sorted(merged)}, indent=1)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8"
    ) as file:
        file.write(text)
    os.replace(file.name, path)
