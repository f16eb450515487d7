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


SLOW = replace(network(), gb_s_per_gpu=2.0)
SLOW_BYTES_A_MS = 8 * 2e9 * 0.8 / 1e3
"""What enters or leaves a host."""


def split_case(scheme: str, cp: int, tp: int = 1, **options: Any) -> Case:
    """Llama 3 8B with sequences of 8,192 tokens on 16 GPUs, which are two hosts."""
    parallel = {**SHARDED["parallel"], "dp": 16 // (cp * tp), "cp": cp, "tp": tp}
    return replace(
        scaled_case(SHARDED, 16),
        attention=BACKENDS[scheme].target(name=scheme, **options),
        parallel=STRATEGIES["fsdp"].target(**parallel),
    )


def exchanged_ms(case: Case, what: str) -> float:
    """Milliseconds of a step's exchange on the slow network, hidden or not."""
    parts = Machine(read(FOLDER / "h200.json"), SLOW).step(case).parts
    return sum(part.ms + part.hidden_ms for part in parts if part.name.endswith(what))


def test_ranks_that_split_a_weight_stand_between_those_of_a_sequence_and_of_gradients() -> None:
    """Of 16 ranks with tp=2, the eight of a sequence are on two hosts, and both groups send."""
    apart, near, whole = (
        split_case("zigzag_llama3", cp, tp, transport="all_gather")
        for cp, tp in ((8, 2), (4, 2), (16, 1))
    )
    model = apart.model
    assert model is not None
    # Keys of half of the heads, in bfloat16, of one sequence: half of them enter each host, of two
    # groups over the same eight ports.
    size = 2 * apart.seq_len * model.kv_heads // 2 * model.head_dim * 2
    expected = 2 * model.num_layers * 2 * size / 2 / SLOW_BYTES_A_MS
    assert exchanged_ms(apart, "(keys)") == pytest.approx(expected, rel=0.05)
    assert exchanged_ms(apart, "(keys)") > 5 * exchanged_ms(near, "(keys)")
    # Gradients of halves of the weights, among eight ranks each: as much as whole ones of all.
    machine = Machine(read(FOLDER / "h200.json"), SLOW)
    assert machine.between_hosts_ms(apart) == pytest.approx(
        machine.between_hosts_ms(whole), rel=0.05
    )


def test_ranks_that_exchange_heads_send_tokens_of_their_own() -> None:
    """Of 16 ranks, half of each rank's tokens leave the host, in all heads of 32 and 16 copies."""
    case = split_case("ulysses", 16, transport="all_to_all")
    model = case.model
    assert model is not None
    of_rank = case.seq_len / 16 * (2 * 32 + 2 * 16) * model.head_dim * 2
    expected = 2 * model.num_layers * 8 * of_rank / 2 / SLOW_BYTES_A_MS
    assert exchanged_ms(case, "(heads)") == pytest.approx(expected, rel=0.05)
    assert exchanged_ms(case, "(keys)") == 0


def test_a_hybrid_exchanges_heads_in_a_host_and_hands_on_keys_between_hosts() -> None:
    """Of 16 ranks two groups of eight: a head of keys for each rank, of half a sequence."""
    hybrid = split_case("ulysses_zigzag", 16)
    inside = split_case("ulysses", 8, transport="all_to_all")
    assert 0 < exchanged_ms(hybrid, "(heads)") < exchanged_ms(inside, "(heads)")
    model = hybrid.model
    assert model is not None
    # Each of eight rings of two hands on its half at once.
    handed_on = 8 * 2 * hybrid.seq_len / 2 * model.head_dim * 2
    expected = 2 * model.num_layers * handed_on / SLOW_BYTES_A_MS
    assert exchanged_ms(hybrid, "(keys)") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("cp", "tp"), [(16, 1), (2, 8)])
def test_by_auto_ranks_on_two_hosts_send(cp: int, tp: int) -> None:
    machine = Machine(read(FOLDER / "h200.json"), SLOW)
    auto, sent = (
        machine.step(split_case("ulysses_zigzag", cp, tp, transport=transport)).median_ms
        for transport in ("auto", "send_recv")
    )
    assert auto == sent


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
