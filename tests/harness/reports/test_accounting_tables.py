"""Strategies in turns, and the tables and figures of their memory, traffic and overhead."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from accounting_cases import PARAMETERS, SMALL, case_of
from conftest import Command
from profiles import table_of
from records import in_rounds

from harness.analysis.frame import build_frame
from harness.bench.step_trace import COMMUNICATION, COMPUTE
from harness.predictions import training as accounting
from harness.predictions.bucket_overhead import LinkModel
from harness.render.figure import build_figure, draw
from harness.render.table import Table, build_table, finding_of
from harness.request.compose import compose_request
from harness.run.rounds.interleaving import comparison_groups
from harness.store.record import Phase, Record


def test_strategies_are_measured_in_turns() -> None:
    """With as many ranks, and not with what trains on one."""
    names = "parallel=ddp_torch,ddp_naive"
    cases = [
        *compose_request([*SMALL, names, "precision=fp32,bf16"]).cases,
        *compose_request([*SMALL, names, "parallel.dp=4"]).cases,
        *compose_request([*SMALL, "parallel=none"]).cases,
    ]
    groups = [
        [(case.parallel.name, case.parallel.dp, case.precision.name) for case in group]
        for group in comparison_groups(cases)
    ]
    assert groups == [
        *([("ddp_torch", 2, p), ("ddp_naive", 2, p)] for p in ("fp32", "bf16")),
        [("ddp_torch", 4, "fp32"), ("ddp_naive", 4, "fp32")],
        [("none", 1, "fp32")],
    ]


def training_record(*arguments: str, step_ms: float, samples: int = 9, **fields: Any) -> Record:
    case = compose_request([*dict.fromkeys([*arguments, "device=cpu"])]).cases[0]
    times = {"step": step_ms, "backward": step_ms / 2, **fields.pop("phases", {})}
    spread = [0.99 + 0.02 * index / (samples - 1) for index in range(samples)]
    record = Record(
        case_id=case.id,
        case=case.to_dict(),
        status="ok",
        work={name: asdict(item) for name, item in case.task.work(case).items()},
        phases={
            name: Phase(
                clock="host",
                samples_ms=[[value * factor for factor in spread]] * case.world_size,
            )
            for name, value in times.items()
        },
        environment={"cpu_model": "Example"},
        notes={"predicted_memory": case.task.predicted_memory(case), **fields.pop("notes", {})},
        memory=[{"source": "rss", "peak_rss_bytes": 2**30, **fields.pop("memory", {})}]
        * case.world_size,
    )
    return in_rounds(record)


def cells(table: Table, header: str) -> list[str]:
    headers = [column.full_header for column in table.columns]
    return [row[headers.index(header)] for row in table.cells()]


# Rank 1 computes longer, 0 to 8 of 10 ms, and sends from 6 to 10; rank 0 waits from 2 on.
TIMELINE = [
    [
        {"spans": [["forward", COMPUTE, 0, 0.0, 2.0], ["backward", COMMUNICATION, 0, 2.0, 10.0]]},
        {
            "spans": [
                ["forward", COMPUTE, 0, 0.0, 3.0],
                ["backward", COMPUTE, 0, 3.0, 8.0],
                ["backward", COMMUNICATION, 0, 6.0, 10.0],
            ]
        },
    ]
]

XL = ("model=xl", "batch_size=2")


class TestTables:
    def records(self) -> list[Record]:
        counted = [{"collective": "all_reduce", "ranks": 2, "calls": 3, "bytes": 2**20}] * 1
        notes = {"timeline": TIMELINE, "traffic": [counted, counted]}
        return [
            training_record(*XL, "parallel=ddp_torch", step_ms=100.0),
            training_record(
                *XL,
                "parallel=ddp_naive",
                step_ms=150.0,
                phases={"communication": 30.0},
                notes=notes,
                memory={"parameters_bytes": 2**30, "after_initialisation_bytes": 2**31},
            ),
            training_record(*XL, "parallel=none", step_ms=90.0),
        ]

    def test_data_parallel(self) -> None:
        table = table_of("data_parallel", *self.records())
        assert cells(table, "parallel") == ["ddp_naive", "ddp_torch"]
        assert cells(table, "over DDP")[0][:-1] == "1.500"
        low, high = cells(table, "interval")[0].split(" to ")
        assert 1.45 < float(low) <= 1.5 <= float(high) < 1.55
        assert cells(table, "after backward (%)")[0] == "20.0"
        # Of rank 1: 4 ms, half of them hidden, and 2 of 10 ms in sight.
        assert cells(table, "traced hidden (%)")[0] == "50.0"
        assert cells(table, "traced exposed (%)")[0] == "20.0"
        # The text's figures are of other hardware and of another batch.
        assert not [column.header for column in table.columns if "text" in column.full_header]

    def test_a_step_that_cannot_be_told_from_the_peers(self) -> None:
        peer, naive, _ = self.records()
        found = finding_of(table_of("data_parallel", peer, naive))
        assert "cannot be told" not in found
        close = training_record(*XL, "parallel=ddp_flat", step_ms=100.0)
        found = finding_of(table_of("data_parallel", peer, naive, close))
        assert "; 1 of 2 cannot be told from ddp_torch;" in found

    def test_a_strategy_and_its_peer_stand_once(self) -> None:
        """Against PyTorch's DDP where it ran, and against each other in one direction."""
        ours, peer = (
            training_record(*XL, f"parallel={name}", "parallel.dp=2", step_ms=step_ms)
            for name, step_ms in [("fsdp", 90.0), ("fsdp_torch", 100.0)]
        )
        beside = table_of("comparison", ours, peer)
        assert (cells(beside, "parallel"), cells(beside, "baseline")) == (["fsdp"], ["fsdp_torch"])
        ddp = training_record(*XL, "parallel=ddp_torch", "parallel.dp=2", step_ms=100.0)
        table = table_of("comparison", ours, peer, ddp)
        rows = zip(cells(table, "parallel"), cells(table, "baseline"), strict=True)
        assert sorted(rows) == [
            ("fsdp", "ddp_torch"),
            ("fsdp", "fsdp_torch"),
            ("fsdp_torch", "ddp_torch"),
        ]

    def test_scaling(self) -> None:
        """Two ranks in 100 and 150 ms against one in 90: 1.8 and 1.2 times its tokens."""
        table = table_of("strategy_scaling", *self.records())
        assert cells(table, "parallel") == ["ddp_naive", "ddp_torch", "none"]
        assert cells(table, "efficiency (%)") == ["60.0", "90.0", "100.0"]
        drawn = draw("strategy_scaling", build_frame(self.records()))
        assert drawn is not None
        assert b"ddp_torch" in drawn[2]

    def test_volume(self) -> None:
        table = table_of("communication_volume", *self.records())
        assert cells(table, "all_reduce (MiB)")[0] == "1.00"
        assert cells(table, "sent (MiB)")[0] == "1.00"
        assert cells(table, "by formula (MiB)")[0] == "7,620"

    def test_sharding(self) -> None:
        table = table_of("optimizer_state_sharding", *self.records())
        assert cells(table, "after initialisation")[0] == "2.00"
        assert cells(table, "holds parameters")[0] == "1.00 (7.44)"

    def test_overhead(self) -> None:
        made = LinkModel(overhead_s=1e-3, bytes_per_s=1e9)
        link = [link_record(size, 1e3 * made.seconds(size)) for size in (2**10, 2**20, 2**24)]
        steps = [
            training_record(
                *SMALL,
                "parallel=ddp_bucketed",
                f"parallel.bucket_size_mb={mib}",
                step_ms=50.0,
                phases={"communication": 5.0},
                notes={"timeline": TIMELINE},
            )
            for mib in (0.1, 1.0)
        ]
        table = table_of("ddp_overhead", *steps, *link)
        assert cells(table, "o (us)") == ["1,000"] * 2
        assert cells(table, "w (GB/s)") == ["1.00"] * 2
        counts = [accounting.buckets_of_case(case_of(), mib) for mib in (0.1, 1.0)]
        assert cells(table, "n_b") == [str(count) for count in counts]
        expected = [n * 1.0 + 4 * PARAMETERS / n / 1e6 for n in counts]
        found = [float(cell) for cell in cells(table, "model (ms)")]
        assert found == pytest.approx(expected, rel=0.01)
        assert build_table("ddp_overhead", build_frame(steps)) is None
        slower = [
            training_record(
                *SMALL,
                "parallel=ddp_bucketed",
                f"parallel.bucket_size_mb={mib}",
                "precision=bf16",
                step_ms=5000.0,
                phases={"communication": 3000.0},
                notes={"timeline": TIMELINE},
            )
            for mib in (0.1, 1.0)
        ]
        drawn = build_figure("ddp_overhead", build_frame([*steps, *slower, *link]))
        assert drawn is not None
        one, other = (axis.get_ylim() for axis in drawn.figure.axes)
        assert one == other

    @pytest.mark.parametrize(("backward_ms", "is_said"), [(1000.0, True), (2.0, False)])
    def test_why_less_is_left_than_the_model_says(self, backward_ms: float, is_said: bool) -> None:
        """A long backward pass hides all but the last bucket, and a short one does not."""
        made = LinkModel(overhead_s=1e-3, bytes_per_s=1e9)
        link = [link_record(size, 1e3 * made.seconds(size)) for size in (2**10, 2**20, 2**24)]
        step = training_record(
            *SMALL,
            "parallel=ddp_bucketed",
            "parallel.bucket_size_mb=0.1",
            step_ms=2000.0,
            phases={"communication": 1.5, "backward": backward_ms},
        )
        table = table_of("ddp_overhead", step, *link)
        found = finding_of(table)
        assert ("only the last bucket (0.488 MiB) is left, 1.51 ms by a queue" in found) == is_said
        if is_said:
            # The embedding of 1,000 x 128, which no other fits in with.
            assert cells(table, "queue (ms)") == [f"{1 + 4 * 128_000 / 1e6:.2f}"]
            (model,) = cells(table, "model (ms)")
            assert f"model says {model} ms and 1.50 are measured" in found

    @pytest.mark.parametrize("name", ["ddp_timeline", "step_memory"])
    def test_figures(self, name: str) -> None:
        drawn = draw(name, build_frame(self.records()))
        assert drawn is not None
        assert b"ddp_naive" in drawn[2]
        assert draw(name, build_frame(self.records()[:1])) is None

    @pytest.mark.parametrize("checkpoint", ["none", "block"])
    def test_activations_of_the_formula_are_those_that_are_counted(self, checkpoint: str) -> None:
        """Held when the forward pass ends, without what a block computes again later."""
        arguments = [*XL, "parallel=fsdp", f"checkpoint={checkpoint}"]
        memory = {"parameters_bytes": 2**30, "activations_bytes": 2**31}
        record = training_record(*arguments, step_ms=150.0, memory=memory)
        drawn = build_figure("step_memory", build_frame([record]))
        assert drawn is not None
        (axes,) = drawn.figure.axes
        predicted = accounting.footprint(compose_request(arguments).cases[0])
        held = predicted.parameters + predicted.gradients + predicted.optimizer_state
        found = max(bar.get_x() + bar.get_width() for bar in axes.patches)
        assert found == pytest.approx((held + predicted.saved_activations) / 2**30)
        assert 0 < predicted.saved_activations <= predicted.activations

    def test_a_case_that_failed_shows_no_number(self) -> None:
        records = self.records()
        records[1].status, records[1].error = "oom", {"message": "CUDA out of memory"}
        table = table_of("data_parallel", *records)
        assert cells(table, "step (ms)")[0] == "OOM"
        for name in ("data_parallel", "communication_volume", "ddp_overhead", "strategy_scaling"):
            assert build_table(name, build_frame(records[2:])) is None


def link_record(size: float, ms: float) -> Record:
    """A measured all-reduce between two ranks."""
    arguments = ["task=collectives", f"task.size_mib={size / 2**20}", "device=cpu"]
    (case,) = compose_request(arguments).cases
    return Record(
        case_id=case.id,
        case=case.to_dict(),
        status="ok",
        phases={"collective": Phase(clock="host", samples_ms=[[ms] * 3] * 2)},
        notes={"size_bytes": size, "wrong_elements": 0},
        memory=[{"source": "rss"}] * 2,
    )


def test_the_command(tmp_path: Path, command: Command) -> None:
    """Two strategies in turns, from the sweep to the tables."""
    done = command(
        *("sweeps=naive_ddp", "device=cpu", f"results={tmp_path}", "model.num_layers=1"),
        *("task.measure_steps=4", "task.warmup_steps=1", "seq_len=16", "until=rounds"),
        "fresh_rounds=false",
        environment={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("sweeps/*/tables/data_parallel.csv")
    with path.open(newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["ddp_naive", "ddp_torch"]
    naive, peer = rows.values()
    # On a busy machine a traced step may take longer than the others, and shares are withheld.
    if not naive["traced_impossible"]:
        assert float(naive["exposed_share"]) > 0
    assert 0 < float(naive["communication_median_ms"]) < float(naive["step_median_ms"])
    assert float(naive["over_low"]) <= float(naive["over_peer"]) <= float(naive["over_high"])
    # It communicates inside the backward pass, and has no such phase.
    assert not peer["communication_median_ms"]
    for row in rows.values():
        if row["traced_impossible"]:
            assert row["hidden_share"] == row["exposed_share"] == ""
            continue
        assert 0 <= float(row["hidden_share"]) <= 1
        assert 0 <= float(row["exposed_share"]) < 1
    for record in map(json.loads, (p.read_text() for p in tmp_path.glob("records/*.json"))):
        assert record["rounds"] == [1, 1, 1, 1]
        assert record["memory"][1]["optimizer_state_bytes"] > record["memory"][1]["gradients_bytes"]
    assert list(tmp_path.glob("sweeps/*/figures/ddp_timeline.png"))
