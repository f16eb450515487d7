"""What steps tell beyond their kernels: load, compilers, scores, graphs, keys that travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness import forecast
from harness.forecast import clocks, steps
from harness.forecast.machines import Machine
from harness.forecast.measured import MeasuredStep
from tests.harness.forecast.test_forecast_machines import case


@pytest.fixture(scope="module")
def plain() -> Machine:
    """An H200 of which no step has told anything of load, compilers or graphs."""
    whole = forecast.machine("h200").calibration
    told = ("load", "compiled", "captured")
    left = {name: value for name, value in whole.factors.items() if not name.startswith(told)}
    return Machine(replace(whole, factors=left))


def told(machine: Machine, **factors: float) -> Machine:
    known = machine.calibration
    return Machine(replace(known, factors={**known.factors, **factors}))


def measured(one: Any, phases_ms: dict[str, float], **device_ms: float) -> MeasuredStep:
    whole = {**phases_ms, "step": sum(phases_ms.values())}
    return MeasuredStep(
        case_id="one",
        case=one,
        phases_ms=whole,
        device_ms=device_ms,
        host="another",
        profile=None,
        row={"disturbed": None, "revision": "one"},
    )


TRANSPORTS = ("symmetric", "send_recv")

LOADED = {"precision": "bf16_pure", "batch_size": 8, "seq_len": 2048}


@pytest.mark.parametrize(("share", "load"), [(0.2, 0), (0.32, 0), (0.395, 0.5), (0.6, 1)])
def test_load_grows_with_the_rate_of_products(share: float, load: float) -> None:
    assert clocks.load(share * 800, 800) == pytest.approx(load)


def test_load_makes_passes_longer_and_leaves_the_optimizer(plain: Machine) -> None:
    before, after = (told(plain, load=cost).step(case("xl", **LOADED)) for cost in (0.0, 0.1))
    ratios = {name: after.phases_ms[name] / ms for name, ms in before.phases_ms.items()}
    assert ratios == pytest.approx({"forward": 1.1, "backward": 1.1, "optimizer": 1.0})
    assert clocks.SLOWED in [part.name for part in after.parts]


@pytest.mark.parametrize("changes", [{"precision": "fp32"}, {"seq_len": 128, "batch_size": 1}])
def test_products_on_cuda_cores_and_waiting_devices_keep_their_clocks(
    plain: Machine, changes: Any
) -> None:
    found = told(plain, load=0.1).step(case("small", **changes))
    assert clocks.SLOWED not in [part.name for part in found.parts]


def test_both_formats_of_16_bits_are_under_the_same_load(plain: Machine) -> None:
    times = []
    for precision in ("bf16", "fp16"):
        found = told(plain, load=0.1).step(case("xl", precision, batch_size=4, seq_len=2048))
        times += [part.ms for part in found.parts if part.name == clocks.SLOWED]
    assert times[1] == pytest.approx(times[0], rel=0.1)


def test_a_rate_that_a_power_limit_leaves_pays_for_it_once(plain: Machine) -> None:
    one = case("xl", **LOADED)
    limited = Machine(told(plain, load=0.1).calibration, compute=0.85)
    assert clocks.SLOWED not in [part.name for part in limited.step(one).parts]


def test_what_no_step_tells_of_load_is_noted(plain: Machine) -> None:
    assert clocks.UNMEASURED_NOTE in plain.step(case("xl", **LOADED)).notes
    assert clocks.UNMEASURED_NOTE not in told(plain, load=0.1).step(case("xl", **LOADED)).notes


def test_steps_tell_what_load_costs(plain: Machine) -> None:
    one = case("xl", **LOADED)
    alone = {phase.name: phase.device_ms for phase in plain.enqueued(one)}
    slower = measured(one, {name: 1.08 * ms for name, ms in alone.items()})
    assert steps._load(plain, [slower]) == {"load": pytest.approx(0.08, abs=1e-3)}
    noisy = replace(slower, row={"disturbed": ["spread"]})
    light = replace(slower, case=case("small", batch_size=1, seq_len=128))
    assert steps._load(plain, [noisy, light]) == {}


def test_a_compiled_step_that_waits_tells_of_kernels_and_of_its_host(plain: Machine) -> None:
    one = case("small", compile={"scope": "block"})
    alone = {phase.name: phase.device_ms for phase in plain.enqueued(one)}
    late = {name: 3 * ms for name, ms in alone.items()}
    found = steps._compiled(plain, [measured(one, late, **alone)])
    same = steps._compiled(plain, [measured(one, alone)])
    shares = {name: share for name, share in found.items() if name.startswith("compiled/")}
    # The device's own time is what it would be without waiting.
    assert shares == same
    eager = {phase.name: phase for phase in plain.enqueued(case("small"))}
    for name in ("forward", "backward"):
        launches = late[name] * 1e3 / plain.host_us()[name] / eager[name].enqueued
        assert found[f"compiled_launches/block/{name}"] == pytest.approx(launches, rel=1e-3)


def test_graphs_of_a_compiler_have_a_host_time_of_their_own(plain: Machine) -> None:
    small = {"seq_len": 128, "batch_size": 1}
    launched = case("small", **small, compile={"scope": "block"})
    graphs = case("small", **small, compile={"scope": "block", "mode": "reduce-overhead"})
    machine = told(plain, **{"compiled_graphs/block/forward": 2.0})
    assert machine.step(launched) == plain.step(launched)
    slower = machine.step(graphs).phases_ms["forward"] / plain.step(graphs).phases_ms["forward"]
    assert slower > 3


def test_captured_steps_tell_the_pauses_between_their_kernels(plain: Machine) -> None:
    task = {"name": "train_step", "cuda_graph": True}
    one = case("small", seq_len=128, batch_size=1, task=task)
    phases = plain.enqueued(one)
    kernels_ms = sum(phase.device_ms - phase.parts["gaps between kernels"] for phase in phases)
    launches = sum(phase.launches for phase in phases)
    found = steps._captured(plain, [measured(one, {"step": kernels_ms + 0.7e-3 * launches})])
    assert found == {"captured_gap_us": pytest.approx(0.7, abs=1e-3)}
    knows = told(plain, **found).step(one)
    assert not any("captured" in note for note in knows.notes)


def test_selective_checkpointing_computes_scores_in_memory_again(plain: Machine) -> None:
    def backward_ms(attention: str, scope: str) -> float:
        one = case("medium", attention={"name": attention}, checkpoint={"scope": scope})
        return plain.enqueued(one)[1].device_ms

    fused, scores = (
        backward_ms(name, "block") - backward_ms(name, "selective") for name in ("sdpa", "naive")
    )
    # Of a block all is computed again; what selective saves besides products is fused attention.
    attention = plain.attending.layers(case("medium"), "forward").time.ms
    assert fused - scores == pytest.approx(attention, rel=0.01)


def test_gradients_of_keys_travel_when_the_pass_has_ended(plain: Machine) -> None:
    def parts(transport: str) -> dict[str, Any]:
        parallel = {"name": "none", "cp": 2}
        attention = {"name": "zigzag", "kernel": "sdpa", "transport": transport}
        found = plain.step(case("medium", parallel=parallel, attention=attention))
        return {part.name: part for part in found.parts}

    read, sent = (parts(name)["context parallelism (gradients of keys)"] for name in TRANSPORTS)
    assert read.hidden_ms == sent.hidden_ms == 0
    # Float32 beside bfloat16.
    assert sent.ms > 1.5 * read.ms


def test_ranks_that_share_sequences_add_up_gradients_at_the_end(plain: Machine) -> None:
    attention = {"name": "zigzag", "kernel": "sdpa"}
    found = plain.step(case("medium", parallel={"name": "none", "cp": 2}, attention=attention))
    (summed,) = (part for part in found.parts if "all_reduce" in part.name)
    assert summed.ms > 0
    assert summed.hidden_ms == 0
