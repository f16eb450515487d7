"""Masks: the keys that they leave, the walk along them, and predicted steps of models with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness import forecast
from harness.cases.case import Case
from harness.forecast import balance, masks, terms
from harness.forecast.law import Law, Observation
from harness.forecast.machines import Machine
from kernels import AttentionProblem
from parallel.context.blocks.layouts import LAYOUTS
from tests.harness.forecast.test_forecast_machines import case

LENGTH = 2048


def problem(length: int = LENGTH, **options: Any) -> AttentionProblem:
    return AttentionProblem(
        batch_size=1,
        num_heads=16,
        num_kv_heads=16,
        q_len=length,
        kv_len=length,
        head_dim=128,
        dtype="bfloat16",
        device="cuda",
        causal=True,
        needs_grad=True,
        **options,
    )


def visible(one: AttentionProblem) -> np.ndarray[Any, Any]:
    """[L, L], whether a query sees a key, entry by entry."""
    i, j = np.indices((one.q_len, one.kv_len))
    seen = (j <= i) | (j < one.prefix_len)
    return seen if one.window is None else seen & (i - j < one.window)


def in_tiles(seen: np.ndarray[Any, Any]) -> float:
    """Pairs in tiles with at least one pair."""
    tiles = seen.reshape(len(seen) // masks.TILE, masks.TILE, -1, masks.TILE).any(axis=(1, 3))
    return float(tiles.sum() * masks.TILE**2)


@pytest.mark.parametrize("window", [128, 256, 1024, 1536, LENGTH])
def test_a_window_leaves_the_keys_that_its_tiles_have(window: int) -> None:
    one = problem(window=window)
    keys = masks.keys_of(LENGTH, (*masks.attention_shape(one), 1.0)[5])
    # What tiles on the diagonal have besides, all causal calls have.
    diagonal = masks.TILE / 2
    expected = in_tiles(visible(one)) / LENGTH - diagonal
    assert keys.computed == pytest.approx(expected, rel=0.02)
    causal = visible(problem()).sum() / LENGTH
    assert keys.hidden == pytest.approx(causal - visible(one).sum() / LENGTH, abs=1)


def test_a_prefix_adds_pairs_and_hides_none() -> None:
    one = problem(prefix_len=1024)
    keys = masks.keys_of(LENGTH, masks.attention_shape(one)[5])
    assert keys.computed == pytest.approx(visible(one).sum() / LENGTH, rel=1e-3)
    assert (keys.longest, keys.hidden) == (LENGTH, 0)


def test_plain_calls_have_five_sizes_and_windows_that_hide_nothing_are_plain() -> None:
    assert masks.attention_shape(problem()) == (1, 16, 16, LENGTH, 128)
    assert masks.attention_shape(problem(window=LENGTH)) == masks.attention_shape(problem())
    assert masks.attention_shape(problem(window=64), whole=True) == (1, 16, 16, LENGTH, 128)
    assert masks.options_of(masks.attention_shape(problem(softcap=50.0))) == {"softcap"}


@pytest.mark.parametrize("computes_hidden", [True, False])
def test_a_law_finds_whether_a_kernel_computes_what_a_window_hides(computes_hidden: bool) -> None:
    def ms(one: AttentionProblem) -> float:
        pairs = visible(problem(one.q_len) if computes_hidden else one).sum()
        return 0.01 + 2e-6 * float(pairs)

    calls = [problem(length) for length in (256, 512, 1024, 2048)]
    calls += [problem(length, window=128) for length in (256, 1024, 2048)]
    observed = [
        Observation(shapes=(masks.attention_shape(one),), ms=ms(one), source=0) for one in calls
    ]
    other = problem(1024, window=512)
    assert Law(terms.attention, observed)(masks.attention_shape(other)).ms == pytest.approx(
        ms(other), rel=0.1
    )


@pytest.fixture(scope="module")
def causal() -> Machine:
    """The H200 as its causal calls alone tell it."""
    known = forecast.machine("h200").calibration
    plain = {
        name: tuple(item for item in items if not masks.options_of(item.shapes[0]))
        for name, items in known.observations.items()
        if not name.startswith("attention/") or len(items[0].shapes[0]) >= 5
    }
    return Machine(replace(known, observations={n: found for n, found in plain.items() if found}))


def masked(length: int = 16384, name: str = "flash_triton", **options: Any) -> Case:
    one = {"seq_len": length, "batch_size": 1}
    if every := options.pop("full_attention_every", None):
        model = {**case("medium").to_dict()["model"], "full_attention_every": every}
        return replace_model(case(attention={"name": name, **options}, **one), model)
    return case(attention={"name": name, **options}, **one)


def replace_model(one: Case, model: dict[str, Any]) -> Case:
    return Case.from_dict({**one.to_dict(), "model": model})


def attention_ms(machine: Machine, one: Case) -> float:
    return sum(part.ms for part in machine.step(one).parts if part.name == "attention")


def test_a_window_takes_less_and_layers_without_it_are_counted(causal: Machine) -> None:
    plain, windowed = masked(), masked(window=1024)
    whole, short = attention_ms(causal, plain), attention_ms(causal, windowed)
    assert 1024 / 16384 < short / whole < 0.5
    # Of 24 layers, the last of each group of 4 has no window.
    mixed = attention_ms(causal, masked(window=1024, full_attention_every=4))
    assert mixed == pytest.approx(6 / 24 * whole + 18 / 24 * short, rel=1e-6)


@pytest.mark.parametrize("options", [{"window": 1024}, {"prefix_len": 1024}, {"softcap": 50.0}])
def test_a_mask_without_a_record_widens_the_interval_and_is_said(
    causal: Machine, options: dict[str, Any]
) -> None:
    (name,) = options
    found, plain = causal.step(masked(**options)), causal.step(masked())
    assert f"flash_triton was not measured with attention.{name}" in found.notes
    assert causal.why_not(masked(**options)) is None
    both = [causal.attending.layers(one, "forward").time for one in (masked(**options), masked())]
    # Causal laws of kernels that skip what is hidden are off by a quarter under windows.
    assert both[0].error > 0.25 > 2 * both[1].error
    # Of a window attention is a small part of the step.
    wider = found.high_ms / found.low_ms > plain.high_ms / plain.low_ms
    assert wider or name == "window"
    shares = [attention_ms(causal, one) for one in (masked(**options), masked())]
    assert (shares[0] < shares[1]) == (name == "window")


def test_a_measured_window_is_not_extrapolated(causal: Machine) -> None:
    known, window = causal.calibration, masked(window=1024)
    problem_of = window.attention_problem
    laws = [f"attention/flash_triton/bfloat16/{phase}" for phase in ("forward", "backward")]
    added = Observation(shapes=(masks.attention_shape(problem_of),), ms=3.0, source=0)
    observations = {
        name: (*items, added, added) if name in laws else items
        for name, items in known.observations.items()
    }
    measured = Machine(replace(known, observations=observations))
    assert attention_ms(measured, window) == pytest.approx(24 * 2 * 3.0, rel=0.15)
    assert not any("not measured with" in note for note in measured.step(window).notes)
    narrow = [one.step(window) for one in (measured, causal)]
    errors = [one.high_ms / one.low_ms for one in narrow]
    assert errors[0] < errors[1]


def test_sinks_take_a_pass_over_the_output(causal: Machine) -> None:
    added = attention_ms(causal, masked(sinks=True)) - attention_ms(causal, masked())
    # 24 layers, 16 heads of 64: at least o once in each pass at the H200's 4.8 TB/s.
    least_ms = 24 * 2 * 2 * (16384 * 16 * 64) / 4.8e9
    assert least_ms < added < 20 * least_ms
    assert causal.why_not(masked(sinks=True)) is None


def test_whole_matrices_of_scores_save_nothing(causal: Machine) -> None:
    times = [attention_ms(causal, masked(4096, "naive", **one)) for one in ({}, {"window": 256})]
    assert times[0] == pytest.approx(times[1])
    assert not any("not measured with" in note for note in causal.step(masked(4096, "naive")).notes)


def test_a_mask_that_a_backend_does_not_take_is_refused(causal: Machine) -> None:
    assert causal.why_not(masked(name="sdpa", window=64)) == (
        "h200: sdpa takes no attention.window=64"
    )
    # What chooses leaves it to one that does.
    assert causal.why_not(masked(name="auto", window=64)) is None


def test_a_short_window_balances_contiguous_parts() -> None:
    layout = LAYOUTS["contiguous"](num_ranks=4)
    plain = balance._of_layout(layout, gathers=True)
    short = balance._of_layout(layout, balance._Share(window=1 / 64), gathers=True)
    assert plain == pytest.approx(7 / 4, rel=0.02)
    assert short == pytest.approx(1, abs=0.05)
