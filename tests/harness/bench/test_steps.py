"""Memory, traffic and overlap of real steps, against formulas and traces written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from accounting_cases import PARAMETERS, case_of
from ranks import device_of, on_gpus, on_ranks

from harness.bench.bench import Bench
from harness.bench.intervals import clipped, length, overlap, union
from harness.bench.phase_timer import PhaseTimer
from harness.bench.step_memory import MemoryNotes, held_bytes, note_first_step
from harness.bench.step_trace import COMMUNICATION, COMPUTE, note_timeline, spans_of
from harness.bench.step_traffic import TrafficCounter, note_traffic
from harness.predictions import training as accounting
from models.transformer import Transformer, cross_entropy


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


HYBRID = ("parallel.dp=4", "parallel.shard_group=2")


@pytest.mark.parametrize(
    ("name", "options"), [("fsdp", ("parallel.replicate_below=0",)), ("fsdp_torch", ())]
)
def test_hybrid_steps_hold_and_send_what_formulas_say(name: str, options: tuple[str, ...]) -> None:
    """Two copies of two shards: half of all on a rank, and shards of gradients between copies."""
    case = case_of(f"parallel={name}", *HYBRID, *options)
    predicted, traffic = accounting.footprint(case), accounting.traffic_bytes(case)
    whole = 4 * PARAMETERS
    assert traffic == {"all_gather": 2 * whole, "reduce_scatter": whole, "all_reduce": whole / 2}
    # Each rank sends half of what it gathers or scatters to the other one of its copy.
    assert accounting.step_sent_bytes(case) == whole + whole / 2 + whole / 2
    for rank, found in enumerate(on_ranks(4, noted, name, *HYBRID, *options)):
        memory = found["memory"]
        for key, size in (
            ("parameters_bytes", predicted.parameters),
            ("gradients_bytes", predicted.gradients),
            ("optimizer_state_bytes", predicted.optimizer_state),
        ):
            assert memory[key] == pytest.approx(size, rel=0.01)
        assert predicted.parameters == whole / 2
        counted = {item["collective"]: item for item in found["traffic"][rank]}
        assert {item["ranks"] for item in counted.values() if item["bytes"] > 1000} == {2}
        for collective in ("reduce_scatter", "all_reduce"):
            size = traffic[collective]
            assert counted[collective]["bytes"] == pytest.approx(size, rel=0.01)
        # What is outside of blocks is gathered once.
        gathered = whole + 4 * (PARAMETERS - 2 * 128_000)
        assert counted["all_gather"]["bytes"] == pytest.approx(gathered, rel=0.01)


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
