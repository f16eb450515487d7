"""The search for tile sizes: what it writes into the table that ships with the kernels."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

pytest.importorskip("triton")

from benchmarks.tile_search import PINNED, merged, with_float16
from kernels.flash.any_gpu.configs import TileConfig

ROW = "forward/bfloat16/d64/causal/long"
TILES = TileConfig(block_q=16, block_k=32, num_warps=4, num_stages=1)


def test_rows_replace_those_of_their_device_and_class_alone() -> None:
    text = PINNED.read_text(encoding="utf-8")
    before, after = json.loads(text), json.loads(merged(text, "NVIDIA H200", {ROW: TILES}))
    assert before["NVIDIA H200"][ROW] != after["NVIDIA H200"][ROW]
    assert after["NVIDIA H200"][ROW] == {
        "block_q": 16,
        "block_k": 32,
        "num_warps": 4,
        "num_stages": 1,
    }
    del before["NVIDIA H200"][ROW], after["NVIDIA H200"][ROW]
    assert before == after


def test_the_shipped_file_is_as_the_search_would_write_it() -> None:
    text = PINNED.read_text(encoding="utf-8")
    assert merged(text, "NVIDIA H200", {}) == text


def test_a_new_device() -> None:
    assert json.loads(merged("{}", "Some GPU", {ROW: TILES})).keys() == {"Some GPU"}


def test_float16_gets_the_tiles_of_bfloat16() -> None:
    table = with_float16({ROW: TILES, "forward/tf32/d64/causal/long": TILES})
    assert len(table) == 3
    assert table["forward/float16/d64/causal/long"] == TILES


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about hosts without a GPU")
def test_without_a_gpu() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.tile_search"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stderr == "tile_search: needs a CUDA device, and torch sees none\n"
