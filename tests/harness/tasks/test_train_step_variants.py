"""``task=train_step`` with windows, prefixes, caps and sinks: cases, formulas, and what is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from masked_attention import masked_attention

from harness.cases.case import Case
from harness.measure.plain_attention import PlainAttention
from harness.predictions import training
from harness.request.compose import compose_request
from harness.tasks.training.strategy_check import small_case
from kernels import AttentionProblem
from models import accounting
from models.variants import AttentionVariant


def case_of(*arguments: str) -> Case:
    base = {"task": "train_step", "model": "tiny", "attention": "flash_torch", "device": "cpu"}
    keys = base | {"seq_len": "256", "batch_size": "2"}
    keys |= dict(argument.split("=", 1) for argument in arguments)
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    return case


MASKS = ("attention.window=64", "attention.sinks=true", "model.full_attention_every=2")


def test_a_case_counts_what_its_layers_see() -> None:
    case = case_of(*MASKS)
    problem = case.attention_problem
    assert (problem.window, problem.sinks, problem.softcap) == (64, True, None)
    forward = case.task.work(case)["forward"].flops
    linear = 2 * accounting.count_parameters(case.model).linear * 2 * 256
    # 64 keys a query but for the first 63; two of four layers, with 4 heads of 32 each.
    windowed, full = 64 * 256 - 64 * 63 / 2, 256**2 / 2
    assert forward == linear + 4 * 2 * 4 * 32 * (2 * windowed + 2 * full)
    assert case.task.work(case)["step"].flops == 3 * forward
    plain = training.footprint(case_of())
    assert training.footprint(case).parameters - plain.parameters == 4 * 4 * 4
    assert training.gradient_bytes(case) - training.gradient_bytes(case_of()) == 4 * 4 * 4


def test_memory_of_a_cap_is_in_float32_beside_float16() -> None:
    def more(precision: str) -> float:
        plain, capped = (
            training.step_memory(case_of("attention=naive", f"precision={precision}", *cap)).saved
            for cap in ((), ("attention.softcap=30",))
        )
        return capped - plain

    assert more("fp16") == 2 * more("bf16") == more("fp32")


def test_options_change_the_id_and_their_defaults_do_not() -> None:
    plain, windowed = case_of(), case_of("attention.window=64")
    mixed = case_of("attention.window=64", "model.full_attention_every=2")
    assert len({plain.id, windowed.id, mixed.id}) == 3
    assert case_of("attention.sinks=false", "model.full_attention_every=null").id == plain.id
    assert Case.from_dict(mixed.to_dict()) == mixed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("model.full_attention_every=2",), "model.full_attention_every=2: leaves the window"),
        (
            ("task=precision_audit", "attention.softcap=3"),
            "attention.softcap=3.0: task=precision_audit",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ValueError, match="^" + words) as error:
        case_of(*arguments)
    assert "\n" not in str(error.value)


def test_both_kinds_of_layers_have_to_be_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(*MASKS)
    assert case.task.why_unsupported(case) is None

    def refuses_full(self: Any, problem: AttentionProblem) -> str | None:
        return "takes windows alone" if problem.window is None else None

    monkeypatch.setattr(type(case.attention), "supports", refuses_full)
    assert case.task.why_unsupported(case) == "takes windows alone"
    assert case.task.why_unsupported(replace(case, model=case_of().model)) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_small_model_of_the_check_has_a_window_that_hides_keys(ranks: int) -> None:
    small = small_case(case_of(*MASKS, f"parallel.tp={ranks}"), 0)
    assert small.attention_variant == AttentionVariant(window=8 * ranks, sinks=True)
    assert small.seq_len == 32 * ranks
    assert small.model.full_attention_every == 2
    every_fourth = case_of("attention.window=3", "model.full_attention_every=4")
    assert small_case(every_fourth, 0).model.full_attention_every == 2
    assert small_case(case_of("attention.window=3"), 0).attention_variant.window == 3
    prefix = small_case(case_of("attention.prefix_len=100"), 0).attention_variant
    assert prefix == AttentionVariant(prefix_len=8)


@pytest.mark.parametrize(
    "changes",
    [
        {"window": 5},
        {"window": 5, "causal": False},
        {"prefix_len": 9},
        {"softcap": 0.7},
        {"sinks": True},
        {"window": 5, "softcap": 0.7, "sinks": True},
    ],
)
def test_what_strategies_are_held_to_is_the_definition(changes: dict[str, Any]) -> None:
    sizes = {"batch_size": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 20, "kv_len": 20}
    fields = {"head_dim": 8, "dtype": "float64", "device": "cpu", "causal": True} | changes
    expected = masked_attention(AttentionProblem(**sizes, needs_grad=True, **fields))
    tensors = [x.clone().requires_grad_() for x in (expected.q, expected.k, expected.v)]
    spec = expected.spec
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.double().requires_grad_())
    o = PlainAttention().attend(*tensors, spec)
    torch.testing.assert_close(o, expected.o, rtol=1e-12, atol=1e-12)
    inputs = tensors if spec.sinks is None else [*tensors, spec.sinks]
    wanted = [expected.dq, expected.dk, expected.dv]
    wanted += [] if expected.dsinks is None else [expected.dsinks]
    for got, want in zip(torch.autograd.grad(o, inputs, expected.do), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
