"""Networks between hosts, and forecasts beside published training."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from harness.cases.case import Case
from harness.forecast.calibration import FOLDER, read
from harness.forecast.communication import collective_ms
from harness.forecast.machines import Machine
from harness.forecast.network import network
from harness.forecast.published import comparisons, scaled_case
from harness.predictions.training import traffic_bytes
from kernels import BACKENDS
from parallel import STRATEGIES

SHARDED: dict[str, Any] = {
    "attention": {"name": "sdpa"},
    "parallel": {"name": "fsdp", "compute_dtype": "bfloat16"},
}


def test_inside_one_host_the_network_takes_no_time() -> None:
    assert network().between_hosts_ms(1e9, 8, 1.0) == 0
    assert network().straggling(8) == (0, 0)


def test_a_host_receives_its_bytes_over_all_rails() -> None:
    plain = network()
    # Two hosts: half of 8 GB enters each, over eight ports of 50 GB/s at 80%.
    expected = 8e9 / 2 / (8 * 50e9 * 0.8) * 1e3
    assert plain.between_hosts_ms(8e9, 16, 1.0) == pytest.approx(expected, rel=1e-2)
    narrow = replace(plain, oversubscription=2.0)
    assert narrow.between_hosts_ms(8e9, 16, 1.0) == pytest.approx(2 * expected, rel=1e-2)


def test_the_slowest_of_more_hosts_is_slower() -> None:
    excesses = [network().straggling(ranks)[0] for ranks in (16, 64, 512, 4096)]
    assert excesses == sorted(excesses)
    assert excesses[-1] == pytest.approx(0.015 * math.sqrt(2 * math.log(512)))


def step_ms(gpus: int, **changes: Any) -> float:
    between = replace(network(), **changes)
    machine = Machine(read(FOLDER / "h200.json"), between)
    return machine.step(scaled_case(SHARDED, gpus)).median_ms


def test_a_slow_network_no_longer_hides() -> None:
    assert step_ms(64, gb_s_per_gpu=2.0) > 3 * step_ms(64)
    assert step_ms(8, gb_s_per_gpu=2.0) == step_ms(8)


def test_copies_inside_hosts_send_gradients_between_them_alone() -> None:
    """Eight hosts: each all-reduces eight shards at once, which make one whole model."""
    machine = Machine(read(FOLDER / "h200.json"), replace(network(), gb_s_per_gpu=2.0))
    inside = {**SHARDED, "parallel": {**SHARDED["parallel"], "shard_group": 8}}
    case = scaled_case(inside, 64)
    whole = 8 * traffic_bytes(case)["all_reduce"]
    assert whole == traffic_bytes(case)["reduce_scatter"]
    expected = 2 * whole * 7 / 8 / (8 * 2e9 * 0.8) * 1e3
    assert machine.between_hosts_ms(case) == pytest.approx(expected, rel=1e-2)
    assert machine.between_hosts_ms(case) < machine.between_hosts_ms(scaled_case(SHARDED, 64))
    # Copies of two hosts hand their gradients to each other over the same links.
    larger = {**SHARDED, "parallel": {**SHARDED["parallel"], "shard_group": 16}}
    for name, factor in (("all_gather", 2 * 1 / 2), ("all_reduce", 2 * 8 / 16 * 3 / 4)):
        ranks, stride = scaled_case(larger, 64).parallel.predicted_ranks(name)
        size = whole / (16 if name == "all_reduce" else 1)
        times = 1 if name == "all_reduce" else 2
        ms, _ = collective_ms(machine, name, ranks, size, stride=stride)
        assert times * ms == pytest.approx(factor * whole / (8 * 2e9 * 0.8) * 1e3, rel=1e-2)


def test_ranks_that_split_a_weight_stand_between_those_of_a_sequence_and_of_gradients() -> None:
    """Of 16 ranks with tp=2, the eight of a sequence are on two hosts, and both groups send."""
    machine = Machine(read(FOLDER / "h200.json"), replace(network(), gb_s_per_gpu=2.0))

    def case(cp: int, tp: int) -> Case:
        parallel = {**SHARDED["parallel"], "dp": 16 // (cp * tp), "cp": cp, "tp": tp}
        scheme = BACKENDS["zigzag_llama3"].target(name="zigzag_llama3", transport="all_gather")
        strategy = STRATEGIES["fsdp"].target(**parallel)
        return replace(scaled_case(SHARDED, 16), attention=scheme, parallel=strategy)

    def keys_ms(cp: int, tp: int) -> float:
        parts = machine.step(case(cp, tp)).parts
        return sum(part.ms + part.hidden_ms for part in parts if "(keys)" in part.name)

    one = case(8, 2)
    model = one.model
    assert model is not None
    # Keys of half of the heads, in bfloat16, of one sequence: half of them enter each host, of two
    # groups over the same eight ports.
    size = 2 * one.seq_len * model.kv_heads // 2 * model.head_dim * 2
    expected = 2 * model.num_layers * 2 * size / 2 / (8 * 2e9 * 0.8) * 1e3
    assert keys_ms(8, 2) == pytest.approx(expected, rel=0.05)
    assert keys_ms(8, 2) > 5 * keys_ms(4, 2)
    # Gradients of halves of the weights, among eight ranks each: as much as whole ones of all.
    assert machine.between_hosts_ms(case(8, 2)) == pytest.approx(
        machine.between_hosts_ms(case(16, 1)), rel=0.05
    )


def test_intervals_widen_beyond_the_measured_ranks() -> None:
    machine = Machine(read(FOLDER / "h200.json"))
    widths = [
        math.log(found.high_ms / found.low_ms)
        for found in (machine.step(scaled_case(SHARDED, gpus)) for gpus in (2, 64))
    ]
    assert widths[1] > widths[0]


def test_published_figures_lie_in_their_intervals() -> None:
    rows = comparisons(SHARDED)
    assert len(rows) == 12
    assert sum(row.covered for row in rows) >= 11
    assert sum(abs(row.ratio - 1) <= 0.15 for row in rows) >= 8


def test_an_unknown_network_is_an_error_of_one_line() -> None:
    with pytest.raises(ValueError, match="network=carrier_pigeon: no such network; one of"):
        network("carrier_pigeon")
