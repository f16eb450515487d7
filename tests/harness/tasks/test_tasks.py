"""Attention and training tasks: phases, work, and memory against what autograd keeps."""

from __future__ import annotations

import pytest
import torch

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.request.compose import compose_request


def make_case(*arguments: str) -> Case:
    (case,) = compose_request([*arguments, "device=cpu"]).cases
    return case


ATTENTION = ("task=attention", "task.num_heads=4", "batch_size=2", "task.head_dim=16")

SHORT = ("task.warmup_steps=1", "task.measure_steps=3")


@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
@pytest.mark.parametrize("causal", ["true", "false"])
def test_predicted_memory_is_what_autograd_keeps(attention: str, causal: str) -> None:
    case = make_case(*ATTENTION, *SHORT, f"attention={attention}", f"task.causal={causal}")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    measured = bench.outcome.memory["before_backward_bytes"]
    parts = case.task.predicted_before_backward(case)
    assert parts is not None
    predicted = sum(parts.values())
    # A few scalars (random state, lengths) are saved beside the tensors.
    assert measured == pytest.approx(predicted, rel=0.01)


def test_attention_task_times_both_passes_apart_and_together() -> None:
    case = make_case(*ATTENTION, *SHORT, "attention=naive", "seq_len=128")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    samples = bench.outcome.samples_ms
    assert set(samples) == set(case.task.work(case)) == {"forward", "backward", "forward_backward"}
    assert {len(values) for values in samples.values()} == {3}
    for forward, backward, both in zip(*samples.values(), strict=True):
        total = sorted((forward, backward, both))
        assert total[2] >= total[0] + total[1]


@pytest.mark.parametrize(
    ("mode", "phases"),
    [
        ("forward", {"forward", "step"}),
        ("forward_backward", {"forward", "backward", "step"}),
        ("train_step", {"forward", "backward", "optimizer", "step"}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_train_step_modes(mode: str, phases: set[str], precision: str) -> None:
    keys = ("model=tiny", "model.num_layers=1", "seq_len=16", "batch_size=2")
    case = make_case(*keys, *SHORT, f"task.mode={mode}", f"precision={precision}")
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    assert set(bench.outcome.samples_ms) == set(case.task.work(case)) == phases
    # Random tokens of a vocabulary of 1,000: the loss starts near log(1000) = 6.9.
    assert 6.0 < bench.outcome.notes["loss"] < 9.0
