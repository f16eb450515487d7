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
    (case,) = expand([{}], arguments, "cuda").values()
    case = replace(case, seq_len=seq_len)
    machine = machine_named("h200", 128)
    fewer = Support(machine).why_not(case)
    monkeypatch.setattr(support, "MOST_RANKS", 128)
    assert fewer == Support(machine).why_not(case)
    assert (fewer is None) == (name != "ulysses")


@pytest.mark.parametrize("name", ["fsdp", "ddp_bucketed", "none"])
def test_a_captured_step_is_refused_by_its_strategy_alone(name: str) -> None:
    """Whatever this host says of kernels for a device that it may not have."""
    arguments = {
        "task": ["train_step"],
        "model": ["small"],
        "precision": ["bf16"],
        "attention": ["flash_triton"],
        "parallel": [name],
        "seq_len": [1024],
        "task.cuda_graph": [True],
    }
    (case,) = expand([{}], arguments, "cuda").values()
    reason = Support(machine_named("h200", 2)).why_not(case)
    if name == "fsdp":
        assert str(reason).startswith("parallel=fsdp is not captured in a CUDA graph")
    else:
        assert reason is None
