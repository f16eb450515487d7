"""Tile sizes of the decode kernels: the user's table, the table shipped here, or a rule.

A table has one row for a kernel and class of shapes, such as ``flash/16bit/d128/rows16``. The
user's is ``attnbench/decode/NAME OF THE DEVICE.json`` in the user's cache folder
(XDG_CACHE_HOME, or ~/.cache) and wins; ``python -m benchmarks.decode_kernels --save`` writes
it. The shipped one is ``pinned.json``: guesses from registers and shared memory so far, not the
outcome of a search.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.decode.call import Call


@dataclass(kw_only=True, slots=True, frozen=True)
class Tiles:
    """How a decode kernel is cut into tiles, compiled and launched."""

    block_m: int
    """Queries of a tile, at most; more become several tiles side by side."""
    block_n: int
    """Cached tokens of a tile."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    """Shares of the work for each multiprocessor, if the caller does not say how many."""
    max_registers: int = 0
    """Limit for a thread, so that more programs fit a multiprocessor; 0 for no limit."""


INTERPRETER = Tiles(block_m=16, block_n=16, num_warps=4, num_stages=1, programs_per_sm=2)
"""Small, so that the tests' short caches and few heads have several tiles each way."""

INTERPRETER_MULTIPROCESSORS = 3
"""Few and odd, so that shares end inside of lines."""


_LATENT_CANDIDATES = (
    (64, 64, 2), (64, 32, 2), (32, 64, 3), (32, 32, 3), (16, 32, 3), (16, 16, 3), (16, 16, 2),
)  # fmt: skip
"""Largest first: (block_m, block_n, num_stages). Of 64 rows two stages are two buffers."""


def choose(kernel: str, call: Call, *, interpreted: bool) -> Tiles:
    """The tiles of ``kernel`` (flash or latent) for a call."""
    if interpreted:
        return INTERPRETER
    name, _, shared_memory_bytes = device_facts(call.device)
    row = shape_class(kernel, call)
    for table in (_users(name), _pinned().get(name, {})):
        if row in table:
            return table[row]
    return (flash_rule if kernel == "flash" else latent_rule)(call, shared_memory_bytes)


def shape_class(kernel: str, call: Call) -> str:
    """The row of a table: kernel, bits of an element, padded head_dim, and rows of a tile."""
    return f"{kernel}/{8 * call.dtype.itemsize}bit/d{call.block_d}/rows{_block_m(call, 64)}"


def flash_rule(call: Call, shared_memory_bytes: int) -> Tiles:
    """Tiles of 32 KiB of keys and values, two in flight, or as much of that as fits."""
    row_bytes = call.block_d * call.dtype.itemsize
    wanted_n = min(128, max(16, 2**14 // row_bytes))
    wanted_m = _block_m(call, 64 if row_bytes > 256 else 128)
    for block_m, block_n, num_stages in (
        (wanted_m, wanted_n, 3), (min(32, wanted_m), wanted_n, 3), (16, wanted_n, 3),
        (16, max(16, wanted_n // 2), 3), (16, 16, 3), (16, 16, 2),
    ):  # fmt: skip
        if (block_m + 2 * (num_stages - 1) * block_n) * row_bytes <= shared_memory_bytes:
            break
    return Tiles(
        block_m=block_m,
        block_n=block_n,
        num_warps=4 if block_m <= 64 else 8,
        num_stages=num_stages,
        programs_per_sm=2,
    )


def latent_rule(call: Call, shared_memory_bytes: int) -> Tiles:
    """The largest tiles whose queries and two tiles of latents fit into shared memory."""
    row_bytes = (call.block_d + max(16, call.rope_dim)) * call.dtype.itemsize
    # Accumulators of float32 operands leave no registers for more rows.
    most = _block_m(call, 64 if call.dtype.itemsize == 2 else 16)
    for block_m, block_n, num_stages in _LATENT_CANDIDATES[0 if most == 64 else 2 :]:
        tiles = Tiles(
            block_m=min(block_m, most),
            block_n=block_n,
            num_warps=8 if min(block_m, most) >= 32 else 4,
            num_stages=num_stages,
            programs_per_sm=1,
        )
        if (tiles.block_m + 2 * block_n) * row_bytes <= shared_memory_bytes:
            break
    return tiles


def device_facts(device: torch.device) -> tuple[str, int, int]:
    """Name, multiprocessors, and the most shared memory that one program may use."""
    if device.type != "cuda":
        return device.type, INTERPRETER_MULTIPROCESSORS, 64 * 1024
    return _cuda_facts(device.index)


@cache
def _cuda_facts(index: int) -> tuple[str, int, int]:
    properties = torch.cuda.get_device_properties(index)
    shared_memory_bytes = getattr(properties, "shared_memory_per_block_optin", 64 * 1024)
    return properties.name, properties.multi_processor_count, shared_memory_bytes


def user_table_path(device_name: str) -> Path:
    """Path of the user's table for one kind of device."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "attnbench" / "decode" / (re.sub(r"[^\w.+-]+", "_", device_name) + ".json")


def _block_m(call: Call, most: int) -> int:
    return min(most, max(16, 1 << (call.num_rows - 1).bit_length()))


@cache
def _users(device_name: str) -> dict[str, Tiles]:
    path = user_table_path(device_name)
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path}: ignored, not a table of tile sizes: {error}", stacklevel=2)
        return {}


@cache
def _pinned() -> dict[str, dict[str, Tiles]]:
    devices = json.loads(Path(__file__).with_name("pinned.json").read_text(encoding="utf-8"))
    return {device: _parse(rows) for device, rows in devices.items()}


def _parse(rows: dict[str, dict[str, int]]) -> dict[str, Tiles]:
    return {row: Tiles(**values) for row, values in rows.items()}
