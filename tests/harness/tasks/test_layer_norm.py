"""Layer normalisation in low precision, against numpy, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from profiles import case_of, row_of, run, table_of

from harness.render.table import finding_of
from harness.request.compose import compose_request
from harness.store.record import Record
from harness.tasks.precision.layer_norm import normalised

SMALL = ("task=layer_norm", "task.rows=8", "task.width=512")


def record_of(*arguments: str, artifacts: Path) -> Record:
    return run(case_of(*SMALL, *arguments), artifacts)


def test_float64_is_layer_norm() -> None:
    x = 3 + torch.randn(4, 32, dtype=torch.float64)
    found, variance = normalised(x, torch.float64, 1e-5)
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(x, (32,), eps=1e-5))
    torch.testing.assert_close(variance, x.var(1, correction=0))


def test_sums_round_after_each_element_as_numpy_does() -> None:
    """numpy's float16 scalars; a sum of squares of 1 in bfloat16 stays at 256."""
    x = torch.randn(2, 64).half()
    found, variance = normalised(x, torch.float16, 1e-5)
    for row, expected in zip(x.numpy(), variance, strict=True):
        mean = np.float16(0)
        for value in row:
            mean = np.float16(mean + value)
        mean = np.float16(mean / np.float16(64))
        total = np.float16(0)
        for value in row:
            away = np.float16(value - mean)
            total = np.float16(total + np.float16(away * away))
        assert np.float16(total / np.float16(64)) == expected.numpy()
    assert found.dtype == torch.float16
    signs = torch.tensor([1.0, -1.0]).repeat(512)[None]
    _, variance = normalised(signs.bfloat16(), torch.bfloat16, 1e-5)
    assert variance.item() == 256 / 1024


def test_what_is_lost_and_what_bfloat16_changes(tmp_path: Path) -> None:
    """At a deviation of 300 squares pass float16's 65,504, and not bfloat16's range."""
    records = [
        record_of(
            f"task.dtype={dtype}",
            f"task.statistics={statistics}",
            "task.input_std=300",
            artifacts=tmp_path,
        )
        for dtype, statistics in (
            ("float16", "float16"),
            ("float16", "float32"),
            ("bfloat16", "bfloat16"),
            ("bfloat16", "float32"),
        )
    ]
    table = table_of("layer_norm", *records)
    half = row_of(table, **{"inputs, outputs": "float16", "statistics": "float16"})
    assert half["lost (%)"] == "100.0"
    assert float(half["largest square"].replace(",", "")) > 65_504
    wide = row_of(table, **{"inputs, outputs": "float16", "statistics": "float32"})
    brain = row_of(table, **{"inputs, outputs": "bfloat16", "statistics": "bfloat16"})
    mixed = row_of(table, **{"inputs, outputs": "bfloat16", "statistics": "float32"})
    assert [row["lost (%)"] for row in (wide, brain, mixed)] == ["0.0"] * 3
    assert float(brain["output error"]) > 10 * float(mixed["output error"])
    # Half a unit in the last place, of 2^-8 and 2^-11, in the mean a little less.
    assert 2**-10 < float(mixed["output error"]) < 2**-8
    assert 2**-13 < float(wide["output error"]) < 2**-11
    said = finding_of(table)
    assert "float16: it loses 100% of rows to overflow at a deviation of 300" in said
    assert "bfloat16: it overflows nowhere" in said
    assert "with statistics in float32 no row is lost" in said


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("task.dtype=int8", "task.dtype=int8: must be one of float32"),
        ("task.width=1", "task.width=1: must be at least 2"),
        ("task.eps=0", "task.eps=0: must be positive and finite"),
        ("task.input_mean=nan", "task.input_mean=nan: must be a finite number"),
    ],
)
def test_what_cannot_be_normalised(argument: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compose_request(["task=layer_norm", argument, "device=cpu"])
