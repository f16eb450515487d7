"""Memory, traffic, overhead: formulas by hand, and against what real steps hold and send."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Command
from ranks import device_of, on_gpus, on_ranks

from harness import accounting
from harness.bench import Bench, PhaseTimer
from harness.case import Case
from harness.compose import compose_request
from harness.feed_forward_accounting import FeedForwardStack, Mesh
from harness.figure import draw
from harness.frame import build_frame
from harness.intervals import clipped, length, overlap, union
from harness.overhead import Link, fit_link
from harness.record import Phase, Record
from harness.runner import comparison_groups
from harness.step_memory import MemoryNotes, held_bytes, note_first_step
from harness.step_trace import COMMUNICATION, COMPUTE, note_timeline, spans_of
from harness.step_traffic import TrafficCounter, note_traffic
from harness.table import Table, build_table
from models.accounting import num_parameters, parameter_sizes
from models.transformer import Transformer, cross_entropy
from parallel._buckets import fill_buckets
from parallel.data_parallel.gradients import Bucket, buckets_of

SMALL = ("model=tiny", "model.num_layers=2", "batch_size=2", "seq_len=16", "device=cpu")


def case_of(*arguments: str) -> Case:
    (case,) = compose_request([*SMALL, *arguments]).cases
    return case


# 1,000 x 128 twice; a block of 4 x 128^2 + 3 x 128 x 384 and two norms of 128; a last norm.
PARAMETERS = 2 * 128_000 + 2 * (65_536 + 147_456 + 256) + 128

STEP_COUNTS = 4 * 21
"""Bytes in which AdamW counts the steps of each of the model's 21 tensors."""


class TestFootprint:
    def test_parameters_by_hand(self) -> None:
        case = case_of()
        assert case.model is not None
        assert num_parameters(case.model) == PARAMETERS
        assert accounting.gradient_bytes(case_of("precision=bf16_pure")) == 2 * PARAMETERS

    @pytest.mark.parametrize("kv_heads", ["null", "2"])
    def test_sizes_are_those_of_the_model(self, kv_heads: str) -> None:
        case = case_of(f"model.num_kv_heads={kv_heads}")
        assert case.model is not None
        model = Transformer(case.model, case.attention, device="meta")
        assert parameter_sizes(case.model) == [p.numel() for p in model.parameters()]

    @pytest.mark.parametrize(
        ("strategy", "buffers", "loose", "state"),
        [
            ("none", 0, 1, 1),
            ("ddp_naive", 0, 1, 1),
            ("ddp_overlapped", 0, 1, 1),
            ("ddp_flat", 1, 1, 1),
            ("ddp_bucketed", 1, 0, 1),
            ("ddp_torch", 1, 0, 1),
            ("sharded_optimizer", 1, 0, 0.5),
            ("zero_redundancy_torch", 1, 0, 0.5),
        ],
    )
    def test_of_each_strategy(self, strategy: str, buffers: int, loose: int, state: float) -> None:
        """In units of the parameters: AdamW has two more, flat has all gradients twice."""
        found = accounting.footprint(case_of(f"parallel={strategy}"))
        unit = 4 * PARAMETERS
        adamw = (2 * unit + STEP_COUNTS) * state
        assert found.parameters == unit
        assert found.gradient_buffers == buffers * unit
        assert found.loose_gradients == loose * unit
        assert found.optimizer_state == adamw
        assert found.after_initialisation == (1 + buffers) * unit
        assert found.before_first_optimizer_step == 2 * unit
        assert found.after_first_optimizer_step == 2 * unit + adamw
        rest = max(loose * unit, found.activations)
        assert found.peak == unit * (1 + buffers) + adamw + rest

    def test_one_rank_has_no_buffers(self) -> None:
        alone = accounting.footprint(case_of("parallel=ddp_bucketed", "parallel.dp=1"))
        assert alone == accounting.footprint(case_of())

    def test_sharded_parameters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A strategy that shards all three: a quarter each, and three quarters of two units."""
        case = case_of("parallel=ddp_naive", "parallel.dp=4")
        for name in ("parameter_share", "gradient_share", "optimizer_state_share"):
            monkeypatch.setattr(type(case.parallel), name, 0.25)
        found = accounting.footprint(case)
        assert found.parameters == found.gradients == PARAMETERS
        assert found.optimizer_state == 2 * PARAMETERS + STEP_COUNTS / 4
        # The largest unit is a block, not the vocabulary.
        assert found.gathered_parameters == 2 * 4 * (65_536 + 147_456 + 256) * 0.75
        assert case.parallel.traffic == {"all_gather": 2, "reduce_scatter": 1}
        monkeypatch.setattr(type(case.parallel), "parameter_share", 1.0)
        assert case.parallel.traffic == {"all_gather": 1, "reduce_scatter": 1}

    @pytest.mark.parametrize("name", ["fsdp", "fsdp_torch"])
    def test_modules_compute_in_what_travels(self, name: str) -> None:
        """Nothing is left for autocast to copy; what the optimizer has stays float32."""
        low = case_of(f"parallel={name}", "parallel.compute_dtype=bfloat16", "precision=bf16")
        pure = case_of(f"parallel={name}", "precision=bf16_pure")
        found, wanted = accounting.footprint(low), accounting.footprint(pure)
        assert found.activations == wanted.activations
        assert found.gathered_parameters == wanted.gathered_parameters
        assert found.parameters == 2 * wanted.parameters == 4 * PARAMETERS / 2
        assert accounting.traffic_bytes(low) == accounting.traffic_bytes(pure)
        assert accounting.traffic_bytes(low)["all_gather"] == 2 * 2 * PARAMETERS

    def test_what_is_sent(self) -> None:
        """Four ranks: an all-reduce carries 2 x 3/4 of a size, a broadcast all of it."""
        size = 4 * PARAMETERS
        sharded = case_of("parallel=sharded_optimizer", "parallel.dp=4")
        traffic = accounting.traffic_bytes(sharded)
        assert traffic == {"all_reduce": size, "broadcast": size}
        assert accounting.sent_bytes(traffic, 4) == 2.5 * size
        assert sharded.task.work(sharded)["step"].sent_bytes == 2.5 * size
        forward = case_of("parallel=ddp_naive", "task.mode=forward")
        assert accounting.traffic_bytes(forward) == {}
        assert case_of().task.work(case_of())["step"].sent_bytes is None

    @pytest.mark.parametrize("mib", [0.01, 0.5, 1.0, 100.0])
    def test_buckets_are_those_that_are_made(self, mib: float) -> None:
        case = case_of()
        assert case.model is not None
        model = Transformer(case.model, case.attention, device="meta")
        made = buckets_of(list(model.parameters())[::-1], mib * 2**20)
        assert accounting.buckets_of_case(case, mib) == len(made)
        bucketed = case_of("parallel=ddp_bucketed", f"parallel.bucket_size_mb={mib}")
        in_buffers = sum(
            4 * sum(p.numel() for p in bucket.parameters)
            for bucket in made
            if isinstance(bucket, Bucket)
        )
        assert accounting.footprint(bucketed).gradient_buffers == pytest.approx(in_buffers)

    def test_buckets_by_hand(self) -> None:
        assert fill_buckets([3, 1, 1, 9, 1], 4) == [[3, 1], [1], [9], [1]]
        assert fill_buckets([3, 1, 1, 9, 1], 100) == [[3, 1, 1, 9, 1]]


class TestCommunicationAccounting:
    """CS336 assignment 2 and the errata of its worked answers."""

    XXL = FeedForwardStack(d_model=16384, d_ff=53248, num_blocks=126)
    MESH = Mesh(fsdp=16, tp=4, fsdp_axes=2, tp_axes=1, flops_per_s=4.6e14, bytes_per_s=1.8e11)

    def test_memory(self) -> None:
        assert self.XXL.num_parameters == 219_848_638_464
        assert self.XXL.static_bytes == 16 * 219_848_638_464
        assert self.XXL.activation_bytes_per_token == 126 * 69_632 * 2 == 17_547_264

    def test_shards(self) -> None:
        """3,517.6 / 95 = 37.03; with 4,096 tokens (3,517.6 + 35.9) / (95 - 35.9) = 60.2."""
        assert self.XXL.least_shards(95e9, 0) == 38
        assert self.XXL.least_shards(95e9, 4096) == 61
        assert self.XXL.sharded_bytes(61, 4096) < 95e9 <= self.XXL.sharded_bytes(60, 4096)
        assert self.XXL.least_shards(95e9, 20_000) is None

    def test_batch(self) -> None:
        """ERRATA: B > 20,444 tokens in all, 319 a device; F > 10,222."""
        assert self.MESH.least_batch() == pytest.approx(20_444, abs=1)
        assert self.MESH.least_batch() / self.MESH.num_devices == pytest.approx(319.4, abs=0.1)
        assert self.MESH.least_d_ff() == pytest.approx(10_222, abs=1)
        batch = self.MESH.least_batch()
        assert self.MESH.compute_s(self.XXL, batch) == pytest.approx(self.MESH.gather_s(self.XXL))
        narrow = FeedForwardStack(d_model=16384, d_ff=10_222, num_blocks=1)
        times = self.MESH.compute_s(narrow, 1.0), self.MESH.exchange_s(narrow, 1.0)
        assert times[0] == pytest.approx(times[1], rel=1e-3)

    def test_table(self) -> None:
        record = counted_record("task=communication_accounting")
        table = table_of("communication_accounting", [record])
        found = dict(zip(cells(table, "quantity"), cells(table, "value"), strict=True))
        assert found["parameters"] == "219,848,638,464"
        assert found["least N_FSDP for 95 GB, no tokens"] == "38"
        assert found["least batch bound by compute (tokens)"] == "20,444"
        text = dict(zip(cells(table, "quantity"), cells(table, "text"), strict=True))
        assert text["the same, a device (tokens)"] == "623"
        other = counted_record("task=communication_accounting", "task.d_ff=1024")
        assert "text" not in [
            c.header for c in table_of("communication_accounting", [other]).columns
        ]

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("task.d_ff=0", "task.d_ff=0: must be at least 1"),
            ("task.tflops=inf", "task.tflops=inf: must be positive and finite"),
            ("parallel=ddp_naive", "parallel.dp=2: task=communication_accounting runs in one"),
        ],
    )
    def test_bad_input(self, argument: str, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            compose_request(["task=communication_accounting", "device=cpu", argument])


def counted_record(*arguments: str) -> Record:
    """What a task that measures nothing writes."""
    (case,) = compose_request([*arguments, "device=cpu"]).cases
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    work = {name: asdict(item) for name, item in case.task.work(case).items()}
    notes = bench.outcome.notes
    return Record(case_id=case.id, case=case.to_dict(), status="ok", work=work, notes=notes)


class TestOverhead:
    LINK = Link(overhead_s=1e-4, bytes_per_s=1e10)

    def test_by_hand(self) -> None:
        """4 GB in 10 buckets: 10 x 0.1 ms + 400 MB at 10 GB/s; best is sqrt(4e9 x 1e10 x 1e-4)."""
        assert self.LINK.added_seconds(4e9, 10) == pytest.approx(1e-3 + 0.04)
        assert self.LINK.best_bucket_bytes(4e9) == pytest.approx(6.3246e7, rel=1e-4)
        assert self.LINK.best_bucket_bytes(1e3) == 1e3
        best = 4e9 / self.LINK.best_bucket_bytes(4e9)
        added = self.LINK.added_seconds(4e9, best)
        for buckets in (best / 1.1, best * 1.1):
            assert self.LINK.added_seconds(4e9, buckets) > added

    def test_fit_finds_what_made_the_times(self) -> None:
        sizes = [1e4, 1e6, 1e8, 1e9]
        found = fit_link(sizes, [self.LINK.seconds(size) for size in sizes])
        assert found is not None
        assert found.overhead_s == pytest.approx(1e-4)
        assert found.bytes_per_s == pytest.approx(1e10)

    def test_small_sizes_count_as_much_as_large_ones(self) -> None:
        """The largest is off by 10 ms, a hundred calls' overhead, and o hardly moves."""
        sizes = [1e4, 1e5, 1e6, 1e9]
        times = [self.LINK.seconds(size) for size in sizes]
        found = fit_link(sizes, [*times[:-1], times[-1] + 0.01])
        assert found is not None
        assert found.overhead_s == pytest.approx(1e-4, rel=0.02)

    def test_no_negative_overhead_and_no_fit_of_nothing(self) -> None:
        found = fit_link([1e6, 2e6], [1e-4, 3e-4])
        assert found is not None
        assert found.overhead_s == 0
        assert fit_link([1e6, 1e6], [1e-4, 2e-4]) is None
        assert fit_link([1e6, 2e6], [2e-4, 1e-9]) is None


class TestIntervals:
    def test_by_hand(self) -> None:
        first = union([(4, 6), (0, 1), (0.5, 2), (6.1, 7)])
        assert first == [(0, 2), (4, 6), (6.1, 7)]
        assert union(first, close_gaps=0.2) == [(0, 2), (4, 7)]
        assert length(first) == pytest.approx(4.9)
        assert overlap(first, [(1, 5), (6.5, 9)]) == pytest.approx(1 + 1 + 0.5)
        assert clipped(first, 1, 5) == [(1, 2), (4, 5)]


def launched(name: str, at: float, start: float, end: float, number: int) -> list[dict[str, Any]]:
    """A kernel and the call that launched it."""
    args = {"correlation": number}
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 2, "args": args}
    kernel = {"ph": "X", "cat": "kernel", "name": name, "tid": 7, "args": args}
    call |= {"ts": at * 1e3, "dur": 1.0}
    return [call, {**kernel, "ts": start * 1e3, "dur": (end - start) * 1e3}]


class TestSpans:
    def test_of_a_gpu(self) -> None:
        """Three steps of 10 ms on the host, run 5 ms later; each sends from 8 to 12 of its own.

        The host runs ahead, and communication reaches into the next step.
        """
        events: list[dict[str, Any]] = []
        marks, number = [], 0
        for step in range(3):
            host, gpu = 100 + 10 * step, 105 + 10 * step
            marks += [("step", host, host + 9), ("forward", host, host + 4)]
            marks += [("backward", host + 4, host + 9), ("communication", host + 8, host + 9)]
            for name, at, start, end in (
                ("gemm", host + 1, gpu, gpu + 3),
                ("gemm", host + 5, gpu + 3.01, gpu + 9),
                ("ncclDevKernel_AllReduce", host + 6, gpu + 8, gpu + 12),
            ):
                number += 1
                events += launched(name, at, start, end, number)
        # A barrier's, between steps: of no phase.
        events += launched("ncclDevKernel_AllReduce", 99.0, 99.5, 120.0, 1000)
        spans, origin = spans_of(events, marks, thread=None)
        assert origin == 100
        assert spans == [
            ["forward", COMPUTE, 0, 15.0, 18.0],
            ["backward", COMPUTE, 0, 18.01, 24.0],
            # Of the step before, and its own up to where the next one begins.
            ["backward", COMMUNICATION, 0, 15.0, 17.0],
            ["backward", COMMUNICATION, 1, 23.0, 25.0],
        ]


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


def noted(group: dist.ProcessGroup, name: str, *arguments: str) -> dict[str, Any]:
    """Notes and memory of real steps on each rank, in a world of their own."""
    votes = group
    if dist.get_backend(group) != "gloo":
        ranks = list(range(group.size()))
        votes = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    case = case_of(f"parallel={name}", *arguments)
    device = device_of(group)
    bench = Bench(
        device=device,
        rank=dist.get_rank(group),
        world_size=group.size(),
        vote_group=votes,
    )
    assert case.model is not None
    default, dist.distributed_c10d.GroupMember.WORLD = dist.group.WORLD, group
    try:
        torch.manual_seed(0)
        model = case.parallel.wrap(Transformer(case.model, case.attention, device=device))
        optimizer = case.parallel.optimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        tokens = torch.randint(1000, (2, 16), device=device)

        def step(timer: Any) -> None:
            with timer.phase("forward"):
                loss = cross_entropy(model(tokens, torch.arange(16, device=device)), tokens)
            with timer.phase("backward"):
                loss.backward()
                case.parallel.after_backward(model)
            with timer.phase("optimizer"):
                optimizer.step()
            model.zero_grad(set_to_none=True)

        note_first_step(bench, step, MemoryNotes(bench, model, optimizer, 0))
        # PyTorch's DDP arranges its buckets anew, and tells the others, after the first step.
        step(PhaseTimer(bench.device))
        note_traffic(bench, step)
        note_timeline(bench, step)
    finally:
        dist.distributed_c10d.GroupMember.WORLD = default
    return {"memory": bench.outcome.memory, **bench.outcome.notes}


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("ddp_naive", {"all_reduce": 22}),
        ("ddp_bucketed", {"all_reduce": 2}),
        ("ddp_torch", {"all_reduce": 1}),
        ("sharded_optimizer", {"all_reduce": 2, "broadcast": 2}),
    ],
)
def test_real_steps_hold_and_send_what_formulas_say(name: str, calls: dict[str, int]) -> None:
    """One all-reduce a parameter, 21 of them; and of ours one that tells which were used."""
    case = case_of(f"parallel={name}")
    predicted = accounting.footprint(case)
    for rank, found in enumerate(on_ranks(2, noted, name)):
        memory = found["memory"]
        assert memory["parameters_bytes"] == pytest.approx(predicted.parameters, rel=1e-3)
        assert memory["gradients_bytes"] == predicted.gradients
        assert memory["optimizer_state_bytes"] == pytest.approx(predicted.optimizer_state, rel=0.1)
        loss_gradients = 8 * 32 * 1000
        activations = predicted.activations - loss_gradients
        assert memory["activations_bytes"] == pytest.approx(activations, rel=0.01)
        moments = [memory[f"{name}_bytes"] for name in MOMENTS]
        assert moments[0] < moments[1] < moments[2]
        counted = {item["collective"]: item for item in found["traffic"][rank]}
        assert {name: item["calls"] for name, item in counted.items()} == calls
        for collective, size in accounting.traffic_bytes(case).items():
            assert counted[collective]["bytes"] == pytest.approx(size, rel=1e-3)
            assert counted[collective]["ranks"] == 2
        spans = found["timeline"][0][rank]["spans"]
        assert {phase for phase, *_ in spans} == {"forward", "backward", "optimizer"}
        sent = [span for span in spans if span[1] == COMMUNICATION]
        # Work of a step before may reach into the one that is kept, and its own into the next.
        assert len(sent) >= sum(calls.values()) - 1
        assert all(0 <= start <= end for *_, start, end in spans)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["ddp_naive", "ddp_bucketed", "ddp_torch", "sharded_optimizer"])
def test_real_steps_on_gpus(name: str) -> None:
    """NCCL's kernels are found in the trace, and sizes and memory are what formulas say."""
    # Large beside what no formula counts: cuBLAS keeps 64 MiB as its workspace.
    heads = ("model.num_heads=16", "model.num_kv_heads=16")
    large = ("model.d_model=1024", "model.d_ff=16384", *heads)
    case = case_of(f"parallel={name}", *large)
    predicted = accounting.footprint(case)
    for rank, found in enumerate(on_gpus(2, noted, name, *large)):
        memory = found["memory"]
        for moment, size in (
            ("before_optimizer_bytes", predicted.before_first_optimizer_step),
            ("parameters_bytes", predicted.parameters),
            ("gradients_bytes", predicted.gradients),
        ):
            assert memory[moment] == pytest.approx(size, rel=0.1)
        assert memory["activations_bytes"] > 0
        counted = {item["collective"]: item["bytes"] for item in found["traffic"][rank]}
        for collective, size in accounting.traffic_bytes(case).items():
            assert counted[collective] == pytest.approx(size, rel=1e-3)
        kinds = {kind for _, kind, *_ in found["timeline"][0][rank]["spans"]}
        assert kinds == {COMPUTE, COMMUNICATION}


MOMENTS = ("after_initialisation", "before_optimizer", "after_optimizer")


def all_kinds(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    from torch.distributed import _functional_collectives as functional

    counter = TrafficCounter()
    whole, part = torch.zeros(8), torch.zeros(4)
    with counter:
        dist.all_gather_into_tensor(whole, part, group=group)
        dist.all_gather([part, part.clone()], part, group=group)
        dist.all_to_all_single(torch.zeros(8), whole, group=group)
        dist.barrier(group)
        functional.all_gather_tensor(part, 0, group).sum()
        functional.all_reduce(whole, "sum", group).sum()
    return counter.counts()


def test_every_kind_of_operation_is_counted_with_its_size() -> None:
    """S of nccl-tests: 32 bytes each; two are called by way of functional collectives."""
    one = {"ranks": 2, "calls": 1, "bytes": 32}
    for found in on_ranks(2, all_kinds):
        assert found == [
            {"collective": "all_gather", "ranks": 2, "calls": 3, "bytes": 96},
            {"collective": "all_reduce", **one},
            {"collective": "all_to_all", **one},
        ]


def test_storages_count_once() -> None:
    whole = torch.zeros(10)
    assert held_bytes([whole, whole[2:], whole.view(2, 5), torch.zeros(3)]) == 52


def training_record(*arguments: str, step_ms: float, samples: int = 9, **fields: Any) -> Record:
    case = compose_request([*dict.fromkeys([*arguments, "device=cpu"])]).cases[0]
    times = {"step": step_ms, "backward": step_ms / 2, **fields.pop("phases", {})}
    spread = [0.99 + 0.02 * index / (samples - 1) for index in range(samples)]
    return Record(
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


def table_of(name: str, records: list[Record]) -> Table:
    built = build_table(name, build_frame(records))
    assert built is not None
    return built


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
        table = table_of("data_parallel", self.records())
        assert cells(table, "parallel") == ["ddp_naive", "ddp_torch"]
        assert cells(table, "over DDP")[0][:-1] == "1.500"
        low, high = cells(table, "95% interval")[0].split(" to ")
        assert 1.48 < float(low) <= 1.5 <= float(high) < 1.52
        assert cells(table, "after backward (%)")[0] == "20.0"
        # Of rank 1: 4 ms, half of them hidden, and 2 of 10 ms in sight.
        assert cells(table, "traced hidden (%)")[0] == "50.0"
        assert cells(table, "traced exposed (%)")[0] == "20.0"
        assert cells(table, "text step (ms)")[0] == "935"
        assert cells(table, "text communication (%)")[0] == "30.8"

    def test_scaling(self) -> None:
        """Two ranks in 100 and 150 ms against one in 90: 1.8 and 1.2 times its tokens."""
        table = table_of("strategy_scaling", self.records())
        assert cells(table, "parallel") == ["ddp_naive", "ddp_torch", "none"]
        assert cells(table, "efficiency (%)") == ["60.0", "90.0", "100.0"]
        drawn = draw("strategy_scaling", build_frame(self.records()))
        assert drawn is not None
        assert b"ddp_torch" in drawn[2]

    def test_volume(self) -> None:
        table = table_of("communication_volume", self.records())
        assert cells(table, "all_reduce (MiB)")[0] == "1.00"
        assert cells(table, "sent (MiB)")[0] == "1.00"
        assert cells(table, "by formula (MiB)")[0] == "7,620"

    def test_sharding(self) -> None:
        table = table_of("optimizer_state_sharding", self.records())
        assert cells(table, "after initialisation")[0] == "2.00"
        assert cells(table, "holds parameters")[0] == "1.00 (7.44)"

    def test_overhead(self) -> None:
        made = Link(overhead_s=1e-3, bytes_per_s=1e9)
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
        table = table_of("ddp_overhead", [*steps, *link])
        assert cells(table, "o (us)") == ["1,000"] * 2
        assert cells(table, "w (GB/s)") == ["1.00"] * 2
        counts = [accounting.buckets_of_case(case_of(), mib) for mib in (0.1, 1.0)]
        assert cells(table, "n_b") == [str(count) for count in counts]
        expected = [n * 1.0 + 4 * PARAMETERS / n / 1e6 for n in counts]
        found = [float(cell) for cell in cells(table, "model (ms)")]
        assert found == pytest.approx(expected, rel=0.01)
        assert build_table("ddp_overhead", build_frame(steps)) is None
        assert draw("ddp_overhead", build_frame([*steps, *link])) is not None

    @pytest.mark.parametrize("name", ["ddp_timeline", "step_memory"])
    def test_figures(self, name: str) -> None:
        drawn = draw(name, build_frame(self.records()))
        assert drawn is not None
        assert b"ddp_naive" in drawn[2]
        assert draw(name, build_frame(self.records()[:1])) is None

    def test_a_case_that_failed_shows_no_number(self) -> None:
        records = self.records()
        records[1].status, records[1].error = "oom", {"message": "CUDA out of memory"}
        table = table_of("data_parallel", records)
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
        *("task.measure_steps=4", "task.warmup_steps=1", "seq_len=16"),
        environment={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("sweeps/*/tables/data_parallel.csv")
    with path.open(newline="") as file:
        rows = {row["strategy"]: row for row in csv.DictReader(file)}
    assert list(rows) == ["ddp_naive", "ddp_torch"]
    naive, peer = rows.values()
    assert float(naive["exposed_share"]) > 0
    assert 0 < float(naive["communication_median_ms"]) < float(naive["step_median_ms"])
    assert float(naive["over_low"]) <= float(naive["over_peer"]) <= float(naive["over_high"])
    # It communicates inside the backward pass, and has no such phase.
    assert not peer["communication_median_ms"]
    for row in rows.values():
        assert 0 <= float(row["hidden_share"]) <= 1
        assert 0 <= float(row["exposed_share"]) < 1
    for record in map(json.loads, (p.read_text() for p in tmp_path.glob("records/*.json"))):
        assert record["rounds"] == [1, 1, 1, 1]
        assert record["memory"][1]["optimizer_state_bytes"] > record["memory"][1]["gradients_bytes"]
    assert list(tmp_path.glob("sweeps/*/figures/ddp_timeline.png"))
