"""Activation checkpointing: equal gradients, fewer saved activations, errors for wrong options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from profiles import TINY, case_of, run, table_of
from torch import Tensor

from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks.batch import whole_batch
from harness.tasks.training.step import build_model
from models.transformer import cross_entropy

CPU = torch.device("cpu")

SCOPES = {
    "block": ("checkpoint=block",),
    "every second": ("checkpoint=every_k",),
    "every third": ("checkpoint=every_k", "checkpoint.every=3"),
    "selective": ("checkpoint=selective",),
}

THREE = (*(item for item in TINY if "num_layers" not in item), "model.num_layers=3")


def gradients_and_kept(case: Case) -> tuple[dict[str, Tensor], int]:
    """Gradients of one step, and the number of elements that autograd saved beside parameters."""
    torch.manual_seed(3)
    model = build_model(case, case.attention, CPU)
    batch = whole_batch(case, CPU, 0)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = cross_entropy(model(batch.tokens, batch.positions), batch.targets)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(
        kept.values()
    )


@pytest.mark.parametrize("attention", ["naive", "sdpa_flash"])
@pytest.mark.parametrize("scope", SCOPES)
def test_gradients_are_the_same_bits(scope: str, attention: str) -> None:
    expected, all_kept = gradients_and_kept(case_of(*THREE, f"attention={attention}"))
    found, kept = gradients_and_kept(case_of(*THREE, f"attention={attention}", *SCOPES[scope]))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert kept < 0.85 * all_kept


def test_nothing_is_kept_without_gradients() -> None:
    case = case_of(*TINY, "checkpoint=block")
    model = build_model(case, case.attention, CPU)
    batch = whole_batch(case, CPU, 0)
    with torch.no_grad():
        assert not model(batch.tokens, batch.positions).requires_grad


def test_counts_in_the_id_once_it_is_used() -> None:
    plain = case_of(*TINY)
    assert case_of(*TINY, "checkpoint=none", "profile=none").id == plain.id
    assert "checkpoint" not in plain.slug
    others = [case_of(*TINY, *scope) for name, scope in SCOPES.items() if name != "every third"]
    assert len({plain.id, *(case.id for case in others)}) == 4
    for case in others:
        assert Case.from_dict(case.to_dict()) == case
        assert f"checkpoint_{case.checkpoint.label}" in case.slug  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("checkpoint=blocks",), r"checkpoint=blocks: no such choice \(did you mean block\?\)"),
        (("checkpoint=block", "checkpoint.every=3"), "checkpoint.every=3: .*every_k"),
        (("checkpoint=every_k", "checkpoint.every=0"), "checkpoint.every=0: must be at least 1"),
        (("checkpoint=every_k", "checkpoint.every=99"), "checkpoint.every=99: .*num_layers=2"),
        (("checkpoint=block", "task.mode=forward"), "checkpoint=block: task.mode=forward keeps"),
        (("task=attention", "checkpoint=block"), "checkpoint: the chosen task has no use"),
    ],
)
def test_words_for_what_makes_no_sense(arguments: tuple[str, ...], words: str) -> None:
    base = () if "task=attention" in arguments else TINY
    with pytest.raises(ValueError, match=words):
        compose_request([*base, *arguments, "device=cpu"])


def test_the_table_compares_with_the_case_without(tmp_path: Path) -> None:
    longer = [item for item in TINY if "seq_len" not in item]
    cases = [
        case_of(*longer, "seq_len=256", "profile=memory", f"checkpoint={name}")
        for name in ("none", "block")
    ]
    records = [run(case, tmp_path / case.id) for case in cases]
    built = table_of("checkpointing", *records)
    peaks = [record.notes["memory_profile"]["peak_bytes"] for record in records]
    ratios = dict(zip(built.rows["checkpoint"], built.rows["memory_ratio"], strict=True))
    assert ratios == {"none": 1.0, "block": pytest.approx(peaks[1] / peaks[0])}
    assert ratios["block"] < 0.9
    times = [record.phases["step"].samples_ms[0][0] for record in records]
    assert built.rows["time_ratio"].tolist() == [1.0, pytest.approx(times[1] / times[0])]
