"""What attention supports on a machine that is not here, where ranks are many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.predictions import support
from harness.predictions.capacity import machine_named
from harness.predictions.support import Support
from harness.request.grid import expand


@pytest.mark.parametrize("name", ["ring", "zigzag", "zigzag_llama3", "ulysses"])
@pytest.mark.parametrize("seq_len", [131072, 1000])
def test_many_ranks_have_the_reasons_of_all_of_them(
    name: str, seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {
        "task": ["train_step"],
        "model": ["small"],
        "precision": ["bf16"],
        "attention": [name],
        "parallel": ["zero_2"],
        "parallel.cp": [128],
        "seq_len": [131072],
    }
    (case,) = expand([{}], arguments, "cuda")
    case = replace(case, seq_len=seq_len)
    machine = machine_named("h200", 128)
    fewer = Support(machine).why_not(case)
    monkeypatch.setattr(support, "MOST_RANKS", 128)
    assert fewer == Support(machine).why_not(case)
    assert (fewer is None) == (name != "ulysses")
