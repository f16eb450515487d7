"""The record of a search for tile sizes, and the rows of the shipped table that follow from it.

A record is a CSV file with one line for each candidate of each kernel and class of shapes: its
time, or why it has none, and the device, clock, versions and date of the measurement.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels.flash.any_gpu import configs

PINNED = Path(configs.__file__).with_name("pinned.json")

COLUMNS = (
    "device", "date", "torch", "triton", "row", "batch_size", "num_heads", "seq_len", "position",
    "block_q", "block_k", "num_warps", "num_stages", "outcome", "milliseconds", "sm_clock_mhz",
    "error",
)  # fmt: skip
"""``row`` names kernel and class as the table does; ``position`` is the candidate's among those of
the search, best guess first; ``outcome`` is timed, failed or untried; ``milliseconds`` is the
median of some runs; ``sm_clock_mhz`` was read after the row's last candidate, and is empty where
nobody did."""

TIE = 1.02
"""Times within 2% of the fastest count as equal: two searches differ by about as much."""


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a record. ValueError if the file is none, or of several devices or versions."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: the columns must be {','.join(COLUMNS)}")
        lines = list(reader)
    for column in ("device", "date", "torch", "triton"):
        if len({line[column] for line in lines}) != 1:
            raise ValueError(f"{path}: must have lines of one {column}")
    return lines


def table_of(lines: Iterable[dict[str, str]]) -> configs.Table:
    """Per row the earliest candidate within ``TIE`` of the fastest; float16 as bfloat16.

    A row whose first candidate, the rule's choice, was not tried is left out.
    """
    timed: dict[str, list[tuple[float, configs.TileConfig]]] = {}
    tried = set()
    for line in sorted(lines, key=lambda line: int(line["position"])):
        if line["position"] == "0" and line["outcome"] != "untried":
            tried.add(line["row"])
        if line["outcome"] == "timed":
            tiles = configs.TileConfig(
                block_q=int(line["block_q"]),
                block_k=int(line["block_k"]),
                num_warps=int(line["num_warps"]),
                num_stages=int(line["num_stages"]),
            )
            timed.setdefault(line["row"], []).append((float(line["milliseconds"]), tiles))
    table = {}
    for row in timed.keys() & tried:
        fastest = min(time for time, _ in timed[row])
        table[row] = next(tiles for time, tiles in timed[row] if time <= TIE * fastest)
    return with_float16(table)


def with_float16(table: configs.Table) -> configs.Table:
    """The table, and the same tiles for float16, which costs what bfloat16 costs."""
    twins = {row.replace("/bfloat16/", "/float16/"): tiles for row, tiles in table.items()}
    return {**table, **twins}


def merged(text: str, lines: list[dict[str, str]], record: str) -> str:
    """The shipped file with the searched rows of a device replaced by those of ``record``.

    Predictions of the rows that were searched are dropped, and others stay.
    """
    devices = json.loads(text)
    table = table_of(lines)
    device = devices.setdefault(lines[0]["device"], {})
    device["searched"] = {
        **{key: lines[0][key] for key in ("date", "torch", "triton")},
        "record": record,
        "rows": {row: asdict(tiles) for row, tiles in table.items()},
    }
    if "predicted" in device:
        rows = device["predicted"]["rows"]
        device["predicted"]["rows"] = {row: rows[row] for row in rows if row not in table}
        if not device["predicted"]["rows"]:
            del device["predicted"]
    return formatted(devices)


def formatted(devices: dict[str, Any]) -> str:
    """The shipped file's text, with one row of the table on each line."""
    blocks = [
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(_origin(kind, device[kind]) for kind in sorted(device, reverse=True))
        + "\n }"
        for name, device in sorted(devices.items())
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _origin(kind: str, block: dict[str, Any]) -> str:
    facts = [f"   {json.dumps(key)}: {json.dumps(block[key])}" for key in block if key != "rows"]
    rows = [
        f"    {json.dumps(row)}: {json.dumps(block['rows'][row])}" for row in sorted(block["rows"])
    ]
    lines = [*facts, '   "rows": {\n' + ",\n".join(rows) + "\n   }"]
    return f"  {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n  }"
