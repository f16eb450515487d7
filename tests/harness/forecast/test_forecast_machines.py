"""Machines: predicted steps of a packaged calibration."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import OmegaConf

import harness
from harness import forecast
from harness.cases.case import Case
from harness.forecast import build, calibration, extract, machines, measured, steps
from harness.forecast.schedule import Exchange, Phase, predict
from harness.paths import CONF, ROOT
from kernels.backend import BACKENDS

PLAIN: dict[str, Any] = {
    "task": {"name": "train_step"},
    "attention": {"name": "sdpa"},
    "parallel": {"name": "none"},
    "compile": {},
    "seq_len": 1024,
    "batch_size": 4,
    "seed": 0,
    "device": "cuda",
}


def case(model: str = "medium", precision: str = "bf16", **changes: Any) -> Case:
    conf = {
        "model": OmegaConf.load(CONF / "model" / f"{model}.yaml"),
        "precision": OmegaConf.load(CONF / "precision" / f"{precision}.yaml"),
    }
    plain = {key: OmegaConf.to_container(value) for key, value in conf.items()}
    return Case.from_dict({**PLAIN, **plain, **changes})


@pytest.fixture(scope="module")
def h200() -> Any:
    return forecast.machine("h200")


def test_parts_sum_to_the_median_inside_its_interval(h200: Any) -> None:
    found = h200.step(case())
    assert sum(part.ms for part in found.parts) == pytest.approx(found.median_ms)
    assert found.low_ms < found.median_ms < found.high_ms
    assert found.tokens_per_s == pytest.approx(4096 / found.median_ms * 1e3)


def test_attention_is_predicted_once_for_alike_steps_alone(h200: Any) -> None:
    """Steps that share an attention, as those of one question do, each as on a new machine."""
    one = case(attention={"name": "naive"})
    assert one.model is not None
    shallow = replace(one, model=replace(one.model, num_layers=2))
    windowed = replace(one.model, full_attention_every=None)
    pure = replace(one, precision=case(precision="bf16_pure").precision)
    single = replace(one, precision=case(precision="fp32").precision)
    longer = replace(one, seq_len=2048)
    together = machines.Machine(h200.calibration)
    alike = [one, shallow, replace(one, model=windowed), pure, single, longer, one]
    for step in alike:
        found, alone = together.step(step), machines.Machine(h200.calibration).step(step)
        assert found.parts == alone.parts
        assert found.notes == alone.notes
    times = {together.step(step).median_ms for step in alike}
    assert len(times) == 5


def test_a_captured_step_does_not_wait_for_its_host(h200: Any) -> None:
    """On a machine of which no captured step is known."""
    known = h200.calibration
    factors = {name: x for name, x in known.factors.items() if name != "captured_gap_us"}
    machine = machines.Machine(replace(known, factors=factors))
    small = {"seq_len": 128, "batch_size": 1}
    launched = machine.step(case("small", **small))
    captured = machine.step(case("small", **small, task={**PLAIN["task"], "cuda_graph": True}))
    parts = {part.name: part.ms for part in launched.parts}
    waited = parts["waiting for the host"]
    closed = 0.7 * parts["gaps between kernels"]
    assert captured.median_ms == pytest.approx(launched.median_ms - waited - closed, rel=0.02)
    assert "waiting for the host" not in [part.name for part in captured.parts if part.ms > 0.1]
    assert any("no captured step calibrates" in note for note in captured.notes)
    # Wider than of a step that waits for an unknown host, by pauses that a graph may not have.
    gaps = {part.name: part.ms for part in captured.parts}["gaps between kernels"]
    spread = math.log(captured.high_ms / captured.median_ms) / 1.645
    assert spread > gaps / captured.median_ms


def test_a_captured_step_holds_what_ranks_exchange(h200: Any) -> None:
    """No host launches its messages: it takes as long as its kernels and visible communication."""
    both = {"parallel": {"name": "sharded_optimizer", "dp": 2}, "seq_len": 128, "batch_size": 1}
    launched = h200.step(case("small", **both))
    captured = h200.step(case("small", **both, task={**PLAIN["task"], "cuda_graph": True}))
    assert launched.waiting_ms > 0.3 * launched.median_ms
    assert captured.waiting_ms < 0.02 * captured.median_ms


def test_captured_steps_tell_nothing_of_hosts() -> None:
    """Their host launches three graphs: as one that launches kernels it would be very fast."""
    frame = harness.load(ROOT / "results" / "h200", sweep="warmup_effect")
    found = measured.of_frame(frame)
    plain = build.kernels("one", frame)
    expected = steps.completed(plain, found)
    assert expected.hosts
    quick = [captured_twin(step) for step in found]
    told = steps.completed(plain, [*found, *quick])
    assert "captured_gap_us" in told.factors
    known = {name: told.factors[name] for name in expected.factors}
    assert replace(told, factors=known) == expected


def captured_twin(step: measured.MeasuredStep) -> measured.MeasuredStep:
    """The same step captured, in a quarter of its time."""
    task: Any = step.case.task
    return replace(
        step,
        case_id=f"{step.case_id}-captured",
        case=replace(step.case, task=replace(task, cuda_graph=True)),
        phases_ms={name: ms / 4 for name, ms in step.phases_ms.items()},
    )


def test_auto_elsewhere_is_no_library_that_is_not_here(
    h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "attention/flash_attn_4/bfloat16/forward" in h200.calibration.observations
    one = case(attention={"name": "auto"})
    monkeypatch.setattr(BACKENDS["flash_attn_4"].target, "version", lambda self: None)
    chosen, _ = forecast.machines.Machine(h200.calibration).attending.backend(one)
    # As far as is known here, it may be missing there.
    monkeypatch.setattr(BACKENDS[chosen].target, "version", lambda self: None)
    second, _ = forecast.machines.Machine(h200.calibration).attending.backend(one)
    assert chosen not in ("", "flash_attn_4", second)


def test_larger_steps_take_longer(h200: Any) -> None:
    times = [
        h200.step(case(seq_len=length, batch_size=batch)).median_ms
        for length, batch in ((1024, 4), (2048, 4), (4096, 4), (4096, 8))
    ]
    assert times == sorted(times)
    assert 1.8 < times[3] / times[2] < 2.2


def test_checkpointing_computes_the_forward_pass_again(h200: Any) -> None:
    plain = h200.step(case("xl", batch_size=8))
    again = h200.step(case("xl", batch_size=8, checkpoint={"scope": "block"}))
    ratio = again.phases_ms["backward"] - plain.phases_ms["backward"]
    assert 0.8 < ratio / plain.phases_ms["forward"] < 1.05


def test_a_small_step_waits_for_its_host(h200: Any) -> None:
    names = [part.name for part in h200.step(case("small", seq_len=128, batch_size=1)).parts]
    assert "waiting for the host" in names
    names = [part.name for part in h200.step(case("xl", batch_size=8)).parts]
    assert "waiting for the host" not in names


ATTENTION: dict[str, Any] = {
    **{key: PLAIN[key] for key in ("parallel", "batch_size", "seed", "device")},
    "task": {"name": "attention", "num_heads": 16, "head_dim": 64},
    "seq_len": 4096,
}


def attention_row(phase: str = "forward", **options: Any) -> dict[str, Any]:
    """A row of a frame, of attention measured by itself."""
    precision = case("medium", "bf16_pure").to_dict()["precision"]
    one = Case.from_dict({**ATTENTION, "precision": precision, "attention": options})
    columns = {"layout": "dense", "rotary": "none", "causal": True, "cuda_graph": False, "cp": 1}
    columns |= {"kv_len": None, "seq_len": 4096, "disturbed": None, "median_ms": 2.0}
    columns |= {"device_ms": 1.9, "host_ms": 0.1, "attention": options["name"]}
    row = {**columns, "task": "attention", "status": "ok", "phase": phase}
    return row | {"case_id": "one", "case": one.to_dict()}


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({"name": "flex"}, (4, 16, 16, 4096, 64)),
        ({"name": "flex", "window": 64}, (4, 16, 16, 4096, 64, 64 / 4096)),
        ({"name": "flex", "softcap": 30.0}, (4, 16, 16, 4096, 64, 1, 2)),
        ({"name": "naive", "window": 64}, (4, 16, 16, 4096, 64)),
        ({"name": "flex", "sinks": True}, None),
    ],
)
def test_a_calibration_reads_attention_with_its_mask(options: Any, shape: Any) -> None:
    row = attention_row(**options)
    found = extract.from_frame(pd.DataFrame([row]), {})
    shapes = [item.shapes for items in found.values() for item in items]
    assert shapes == ([] if shape is None else [(shape,)])


def test_a_pass_that_waited_for_its_host_counts_what_the_device_took() -> None:
    late = {"median_ms": 0.3, "device_ms": 0.08, "disturbed": ["spread"]}
    row = attention_row(name="flex")
    rows = [row | late, row | late | {"device_ms": None}, row | {"device_ms": 1.95}]
    read = [extract.from_frame(pd.DataFrame([one]), {}) for one in rows]
    times = [[item.ms for items in one.values() for item in items] for one in read]
    # That of the device; unknown; and that of the pass, which waited for nothing.
    assert times == [[0.08], [], [2.0]]


def test_precisions_of_a_softmax_in_memory_have_laws_of_their_own() -> None:
    pure = attention_row(name="naive")
    low = Case.from_dict(pure["case"] | {"precision": case().to_dict()["precision"]})
    compiled = Case.from_dict(pure["case"] | {"task": {**ATTENTION["task"], "compile": True}})
    rows = [pure, pure | {"case": low.to_dict()}, pure | {"case": compiled.to_dict()}]
    read = [list(extract.from_frame(pd.DataFrame([row]), {})) for row in rows]
    name = "attention/naive/bfloat16"
    # What a compiler fuses is no call of this backend's kernels.
    assert read == [[f"{name}/forward"], [f"{name}_autocast/forward"], []]


def test_a_precision_without_a_law_takes_the_other(h200: Any) -> None:
    known = h200.calibration.observations
    left = {name: items for name, items in known.items() if "_autocast" not in name}
    assert len(left) < len(known)
    one = case(attention={"name": "naive"})
    alone = forecast.machines.Machine(replace(h200.calibration, observations=left))
    assert alone.why_not(one) is None
    # A softmax in float32 moves twice the bytes.
    times = [sum(p.ms for p in m.step(one).parts if p.name == "attention") for m in (alone, h200)]
    assert 0.4 < times[0] / times[1] < 0.95


def test_masked_calls_take_a_host_time_of_their_own() -> None:
    rows = [attention_row(name="flex"), attention_row(name="flex", window=64) | {"host_ms": 0.4}]
    found = build._enqueue(pd.DataFrame(rows))
    plain, masked = (found[f"enqueue/flex/forward{end}"] for end in ("", "/masked"))
    assert masked == pytest.approx(4 * plain, rel=1e-3)


@pytest.mark.parametrize(("options", "taken"), [({}, True), ({"window": 64}, False)])
def test_steps_with_masks_tell_nothing_of_hosts(options: Any, taken: bool) -> None:
    step = case(attention={"name": "flex", **options})
    row = {"task": "train_step", "status": "ok", "phase": "step", "case": step.to_dict()}
    row |= {"machine": None, "kernel_profile": None, "revision": "one", "case_id": "one"}
    row |= {"median_ms": 2.0, "device_ms": math.nan}
    assert len(measured.of_frame(pd.DataFrame([row]))) == taken


def test_ten_thousand_predictions_take_seconds(h200: Any) -> None:
    cases = [case(seq_len=length, batch_size=batch) for length in (512, 1024) for batch in (1, 2)]
    begin = time.process_time()
    for _ in range(250):
        for one in cases:
            h200.step(one)
    assert time.process_time() - begin < 2


def test_what_was_not_measured_is_said(h200: Any) -> None:
    assert h200.why_not(case()) is None
    odd = replace(case(), attention=case(attention={"name": "flash_attn_3"}).attention)
    assert "flash_attn_3 was not measured" in h200.why_not(odd)


def test_an_unknown_machine_is_an_error_of_one_line() -> None:
    with pytest.raises(ValueError, match=r"machine=abacus: no calibration.* one of h100, h200"):
        forecast.machine("abacus")


@pytest.mark.parametrize(
    ("name", "others"),
    [("h200", ["h200_sxm", "NVIDIA H200"]), ("h100", ["h100_sxm", "NVIDIA H100 80GB HBM3"])],
)
def test_a_machine_goes_by_any_name_of_its_hardware(name: str, others: list[str]) -> None:
    expected = forecast.machine(name).step(case())
    assert all(forecast.machine(other).step(case()) == expected for other in others)
    with pytest.raises(ValueError, match="no calibration"):
        forecast.machine("h200_nvl")  # fewer clocks, so another machine


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_the_packaged_calibration_is_what_the_records_give(name: str) -> None:
    built = build.build(name, ROOT / "results" / name).to_dict()
    packaged = calibration.read(CONF / "machine" / f"{name}.json").to_dict()
    for key, value in built.items():
        assert json.loads(json.dumps(value)) == packaged[key], (
            f"{key} differs: python -m harness.forecast results/{name} conf/machine/{name}.json"
        )


def test_records_that_do_not_suffice_are_no_calibration() -> None:
    with pytest.raises(ValueError, match=r"h100: no step can be predicted without a record of a"):
        build.build("here", ROOT / "results" / "h100", sweep="data_parallel_peers")


def test_a_gpu_that_no_file_describes_is_what_its_driver_says() -> None:
    frame = harness.load(ROOT / "results" / "h100", sweep="data_parallel_peers")
    known = build.kernels("known", frame)
    assert (known.num_sms, known.device_memory_bytes) == (132, 80 * 2**30)
    told = frame.assign(device_name="Example", multiprocessors=84, device_memory_gib=47.5)
    found = build.kernels("found", told)
    assert (found.num_sms, found.device_memory_bytes) == (84, 47.5 * 2**30)
    assert found.gpus_per_host == 8


@pytest.mark.parametrize(
    ("attention", "parallel"),
    [
        ("auto", {"name": "none"}),
        ("zigzag", {"name": "none", "cp": 4}),
        ("ulysses", {"name": "ddp_torch", "dp": 2, "cp": 2}),
        ("sdpa", {"name": "fsdp", "dp": 4, "tp": 2}),
    ],
)
def test_any_legal_choice_has_a_time(h200: Any, attention: str, parallel: dict[str, Any]) -> None:
    one = case(attention={"name": attention}, parallel=parallel, seq_len=8192)
    assert h200.step(one).median_ms > 0


def test_this_machine_needs_its_sweep_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no calibration; run attnbench sweeps=calibration"):
        forecast.machine("here", tmp_path)


def test_this_machine_keeps_its_fit(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "calibration"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    known = calibration.read(CONF / "machine" / "h200.json")
    calibration.write(replace(known, name="here"), folder / "machine.json")
    found = forecast.machine("here", tmp_path)
    assert found.name == "here"
    assert found.step(case()) == forecast.machine("h200").step(case())


def test_a_calibration_of_another_version_is_fitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweeps" / "calibration"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / "machine.json").write_text('{"schema": 1}')
    known = replace(calibration.read(CONF / "machine" / "h200.json"), name="here")
    monkeypatch.setattr(build, "build", lambda *_, **__: known)
    assert forecast.machine("here", tmp_path).calibration == known


def split(name: str, cp: int = 4) -> Case:
    parallel = {"name": "zero_2", "dp": 1, "cp": cp}
    return case(attention={"name": name}, parallel=parallel, seq_len=65536, batch_size=1)


def test_ranks_of_an_unbalanced_scheme_wait_for_the_busiest(h200: Any) -> None:
    def attention_ms(name: str) -> float:
        return sum(part.ms for part in h200.step(split(name)).parts if part.name == "attention")

    # Of the causal mask the last of four contiguous parts has 7 sixteenths.
    for unbalanced in ("ring", "llama3"):
        assert attention_ms(unbalanced) / attention_ms("zigzag") == pytest.approx(7 / 4, rel=0.01)
    for balanced in ("zigzag_llama3", "ulysses"):
        assert attention_ms(balanced) == pytest.approx(attention_ms("zigzag"))


def test_kernels_chosen_on_an_absent_device_have_times(h200: Any) -> None:
    assert [h200.why_not(split(name)) for name in ("zigzag", "ulysses", "ring")] == [None] * 3


def ranks(parallel: str, precision: str) -> Case:
    strategy = {"name": parallel, "dp": 2}
    return case("xl", precision, parallel=strategy, batch_size=8)


def test_a_strategy_that_waits_after_its_backward_pass_hides_nothing(h200: Any) -> None:
    def exchanged(parallel: str, precision: str) -> tuple[float, float]:
        parts = h200.step(ranks(parallel, precision)).parts
        (part,) = (part for part in parts if part.name.startswith("communication"))
        return part.ms, part.hidden_ms

    # In either format as long, beside overlapped ones that tensor cores leave less room.
    assert exchanged("ddp_naive", "bf16")[0] == pytest.approx(
        exchanged("ddp_naive", "fp32")[0], rel=0.2
    )
    assert exchanged("ddp_bucketed", "fp32")[0] < 0.6 * exchanged("ddp_bucketed", "bf16")[0]


def test_communication_that_follows_is_not_hidden_by_a_host_that_is_late() -> None:
    phase = Phase(name="backward", parts={"a": 1.0}, errors={"a": 0.0}, launches=1, enqueued=10)
    beside = Exchange(
        name="c", phase="backward", visible_ms=3.0, hidden_ms=0.0, error_ms=0.0, launches=0.0
    )

    def step_ms(exchange: Exchange, launch_us: float) -> float:
        return predict([phase], [exchange], {"backward": launch_us}, 0.1, 1.0, set()).median_ms

    follows = replace(beside, follows=True)
    assert step_ms(beside, 1000) == pytest.approx(10)
    assert step_ms(follows, 1000) == pytest.approx(13)
    # Of a host that is ahead, both take as long.
    assert step_ms(beside, 0) == step_ms(follows, 0) == pytest.approx(4)


def test_the_head_runs_after_a_host_that_was_waited_for() -> None:
    phase = Phase(name="forward", parts={"a": 3.0}, errors={"a": 0.0}, launches=1, enqueued=10)
    host_us = {"forward": 1000.0}
    found = predict([replace(phase, last_ms=2.0)], [], host_us, 0.1, 1.0, set())
    assert found.median_ms == pytest.approx(12)


def test_keys_that_are_handed_on_take_a_message_for_each_rank(h200: Any) -> None:
    def keys_ms(transport: str, cp: int) -> float:
        one = split("zigzag", cp)
        one = replace(one, attention=replace(one.attention, transport=transport))
        parts = h200.step(one).parts
        return sum(
            part.ms + part.hidden_ms for part in parts if part.name == "context parallelism (keys)"
        )

    # Between two ranks the same bytes in one message; among eight, seven small ones.
    assert keys_ms("send_recv", 2) == pytest.approx(keys_ms("symmetric", 2), rel=0.25)
    assert keys_ms("send_recv", 8) > 1.5 * keys_ms("symmetric", 8)


def test_steps_tell_how_long_16_bit_parameters_take_to_update(h200: Any) -> None:
    """Neither as long as those in float32, nor half: profiled steps have none of them."""
    frame = harness.load(ROOT / "results" / "h200", sweep="forecast_problems-two_gpus")
    updates = frame[(frame["phase"] == "optimizer") & (frame["precision"] == "bf16_pure")]
    # A rank of several updates its own part.
    updates = updates[updates["world_size"] == 1]
    found = extract.from_frame(frame, {})["optimizer"]
    assert [item.ms for item in found] == pytest.approx(updates["device_ms"].tolist(), rel=1e-5)
    low, full = (
        h200.step(case("xl", name)).phases_ms["optimizer"] for name in ("bf16_pure", "bf16")
    )
    assert 0.6 < low / full < 0.72


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {**PLAIN["task"], "cuda_graph": True}},
        {"task": {**PLAIN["task"], "clip_grad_norm": 1.0}},
        {"parallel": {"name": "ddp_flat", "dp": 2}},
        {"precision": "bf16"},
        {"device_ms": math.nan},
        {},
    ],
    ids=lambda changes: next(iter(changes), "told"),
)
def test_an_optimizer_with_something_else_tells_nothing(changes: dict[str, Any]) -> None:
    other = dict(changes)
    row = {"device_ms": other.pop("device_ms", 5.0)}
    one = case(precision=other.pop("precision", "bf16_pure"), **other)
    frame = pd.DataFrame(
        [
            {"case_id": one.id, "case": one.to_dict(), "task": "train_step", "phase": "optimizer",
             "status": "ok", "median_ms": 6.0, **row}
        ]
    )  # fmt: skip
    found = extract.from_frame(frame, {}).get("optimizer", [])
    assert [item.ms for item in found] == ([] if changes else [5.0])
