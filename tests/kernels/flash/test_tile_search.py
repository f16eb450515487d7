"""The search for tile sizes: its record, and what follows for the table that ships."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from triton_device import DEVICE, RUNS_TRITON

pytest.importorskip("triton")

from benchmarks import tile_record, tile_search
from benchmarks.compile_tiles import SHARED_MEMORY_BYTES, problem_of
from kernels.flash.any_gpu import configs, launch
from kernels.flash.any_gpu.configs import TileConfig

ROW = "forward/bfloat16/d64/causal/many"
SIZES = [(128, 64), (64, 64), (32, 32)]
"""Of the candidates of a made-up record, in order."""
COMPILED = ROOT / "results" / "h200-tiles" / "compiled.csv"


def line(position: int, milliseconds: float | None, row: str = ROW, outcome: str = "") -> Any:
    block_q, block_k = SIZES[position]
    values = {
        "device": "Some GPU", "date": "2026-01-02", "torch": "2.11.0", "triton": "3.6.0",
        "row": row, "position": str(position), "block_q": str(block_q), "block_k": str(block_k),
        "num_warps": "4", "num_stages": "2", "outcome": outcome or "timed",
        "milliseconds": str(milliseconds or ""),
    }  # fmt: skip
    return dict.fromkeys(tile_record.COLUMNS, "") | values


def sizes(table: configs.Table, row: str = ROW) -> tuple[int, int]:
    return table[row].block_q, table[row].block_k


class TestTable:
    def test_the_fastest_wins(self) -> None:
        lines = [line(0, 2.0), line(1, 1.0), line(2, 1.5)]
        assert sizes(tile_record.table_of(lines)) == SIZES[1]
        assert sizes(tile_record.table_of(lines[::-1])) == SIZES[1]

    def test_of_equal_times_the_better_guess_wins(self) -> None:
        assert sizes(tile_record.table_of([line(0, 1.015), line(1, 1.0)])) == SIZES[0]
        assert sizes(tile_record.table_of([line(0, 1.03), line(1, 1.0)])) == SIZES[1]

    def test_the_rules_choice_must_have_been_tried(self) -> None:
        untried, failed = line(0, None, outcome="untried"), line(0, None, outcome="failed")
        assert tile_record.table_of([untried, line(1, 1.0)]) == {}
        assert sizes(tile_record.table_of([failed, line(1, 1.0)])) == SIZES[1]

    def test_float16_gets_the_tiles_of_bfloat16(self) -> None:
        tf32 = "forward/tf32/d64/causal/many"
        table = tile_record.table_of([line(0, 1.0), line(1, 1.0, row=tf32), line(0, 2.0, row=tf32)])
        assert len(table) == 3
        assert sizes(table, ROW.replace("bfloat16", "float16")) == SIZES[0]

    def test_a_file_that_is_no_record(self, tmp_path: Path) -> None:
        path = tmp_path / "record.csv"
        path.write_text("device,date\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"record\.csv: the columns must be device,date,"):
            tile_record.read(path)
        write(path, [line(0, 1.0), {**line(1, 1.0), "device": "Another"}])
        with pytest.raises(ValueError, match=r"record\.csv: must have lines of one device"):
            tile_record.read(path)


def write(path: Path, lines: list[Any]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, tile_record.COLUMNS)
        writer.writeheader()
        writer.writerows(lines)


class TestShippedFile:
    def test_it_is_as_the_search_would_write_it(self) -> None:
        text = tile_record.PINNED.read_text(encoding="utf-8")
        assert tile_record.formatted(json.loads(text)) == text

    def test_searched_rows_follow_from_their_record(self) -> None:
        devices = json.loads(tile_record.PINNED.read_text(encoding="utf-8"))
        for device, blocks in devices.items():
            searched = blocks.get("searched")
            if searched is None:
                continue
            lines = tile_record.read(ROOT / searched["record"])
            # Those that kernels have outgrown since are predictions now.
            predicted = devices[device].get("predicted", {"rows": {}})["rows"]
            rows = tile_record.table_of(lines)
            assert {**searched, "rows": configs._parse(searched["rows"])} == {
                **{key: lines[0][key] for key in ("date", "torch", "triton")},
                "record": searched["record"],
                "rows": {row: rows[row] for row in rows if row not in predicted},
            }
            assert lines[0]["device"] == device

    def test_a_search_takes_the_place_of_predictions_of_its_rows(self) -> None:
        tiles = {"block_q": 16, "block_k": 32, "num_warps": 4, "num_stages": 1}
        other = "forward/bf16x6/d64/full/few"
        text = tile_record.formatted(
            {"Some GPU": {"predicted": {"by": "a guess", "rows": {ROW: tiles, other: tiles}}}}
        )
        merged = tile_record.merged(text, [line(0, 1.0)], "results/x.csv")
        found = configs.shipped_tables(json.loads(merged))["Some GPU"]
        assert found["predicted"] == {other: TileConfig(**tiles)}
        assert found["searched"].keys() == {ROW, ROW.replace("bfloat16", "float16")}
        assert json.loads(merged)["Some GPU"]["searched"]["record"] == "results/x.csv"
        nothing = json.loads(tile_record.merged("{}", [line(0, 1.0)], "results/x.csv"))
        assert nothing.keys() == {"Some GPU"}

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"guessed": {"rows": {}}}, "Some GPU: guessed must be one of searched, predicted"),
            ({"predicted": {"rows": {}}}, "Some GPU: predicted must have by and rows"),
            (
                {"searched": {"rows": {}, "by": "me"}},
                "Some GPU: searched must have date, torch, triton, record and rows",
            ),
        ],
    )
    def test_rows_must_say_where_they_come_from(self, block: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            configs.shipped_tables({"Some GPU": block})


class TestPrediction:
    """The rule is the prediction for a GPU that nobody searched: its tiles were compiled for it."""

    lines: list[dict[str, str]] = list(csv.DictReader(COMPILED.open(encoding="utf-8")))  # noqa: RUF012

    def test_the_record_has_every_class(self) -> None:
        keys = ("architecture", "kernel", "precision", "head_dim", "mask")
        assert len({tuple(line[key] for key in keys) for line in self.lines}) == 4 * 3 * 5 * 2

    @pytest.mark.parametrize("architecture", SHARED_MEMORY_BYTES)
    def test_the_rule_takes_what_was_compiled(self, architecture: int) -> None:
        """They fit the GPU's shared memory, and what they spill is a few dozen numbers a thread."""
        limit = SHARED_MEMORY_BYTES[architecture]
        for compiled in (x for x in self.lines if x["architecture"] == str(architecture)):
            head_dim, kernel = int(compiled["head_dim"]), compiled["kernel"]
            problem = problem_of(compiled["precision"], head_dim, compiled["mask"] == "causal")
            tiles = configs.candidates(kernel, problem, limit)[0]
            names = ("block_q", "block_k", "num_warps", "num_stages")
            assert tiles == TileConfig(**{name: int(compiled[name]) for name in names})
            assert int(compiled["shared_bytes"]) <= limit
            assert int(compiled["stack_bytes"]) <= (480 if head_dim == 256 else 160)


@pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU, and this host has one")
class TestSearch:
    pytestmark = RUNS_TRITON
    CLASS = tile_search.ShapeClass(precision="bfloat16", head_dim=16, causal=True, size="few")

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiny inputs, interpreted, whose kernels ask for tiles as compiled ones do."""
        monkeypatch.setattr(tile_search, "DEVICE", "cpu")
        monkeypatch.setattr(tile_search, "SIZES", {"few": (1, 1, 16)})
        monkeypatch.setattr(launch, "_milliseconds", lambda run: run() or 1.5)
        monkeypatch.setattr(launch, "_config", lambda *call: configs.choose(*call))
        tiles = [TileConfig(block_q=16, block_k=16, num_warps=4, num_stages=n) for n in (1, 2, 3)]
        monkeypatch.setattr(configs, "candidates", lambda *args: tiles)

    def test_lines(self) -> None:
        compiled = set()
        for direction in ("forward", "backward"):
            for position in range(2):
                compiled |= set(tile_search.compile_candidates((self.CLASS, direction, position)))
        assert len(compiled) == 6
        launch._milliseconds = lambda run: run() or 1.5
        lines = tile_search.time_class(self.CLASS, compiled, time.monotonic() + 60)
        rows = [f"{kernel}/bfloat16/d16/causal/few" for kernel in configs.INTERPRETER]
        assert [line["row"] for line in lines] == [row for row in rows for _ in range(3)]
        assert [line["outcome"] for line in lines] == ["timed", "timed", "untried"] * 3
        assert [line["num_stages"] for line in lines] == [1, 2, 3] * 3
        assert lines[0]["milliseconds"] == "1.50000"

    def test_without_time_nothing_is_tried(self) -> None:
        lines = tile_search.time_class(self.CLASS, set(), time.monotonic() - 1)
        assert [line["outcome"] for line in lines] == ["untried"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about hosts without a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.tile_search", "--record", str(tmp_path / "x.csv")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "tile_search: needs a CUDA device, and torch sees none\n"
