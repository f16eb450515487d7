"""Training steps as CUDA graphs: what is refused, and on GPUs the weights of launched steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import on_gpus

from harness.bench.bench import Bench
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks import batch
from harness.tasks.training.captured_step import CapturedStep
from harness.tasks.training.step import MeasuredStep
from kernels import Attention
from kernels.launching.graphs import WARM_UP_CALLS
from parallel.context.attention import SequenceParallelAttention

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def case_of(*arguments: str) -> Case:
    keys = {"task": "train_step", "model": "tiny", "precision": "bf16", "task.cuda_graph": "true"}
    keys |= {"seq_len": "512", "batch_size": "2", "device": "cpu"}
    keys |= dict(argument.split("=", 1) for argument in arguments)
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    # Where there is no such device, a command would say so at once.
    return replace(case, device="cuda")


def why_unsupported(case: Case) -> str | None:
    return case.task.why_unsupported(case)


class TestCases:
    def test_the_name_says_so(self) -> None:
        assert "cuda_graph" in case_of().task.words()
        assert case_of().id != case_of("task.cuda_graph=false").id

    def test_a_cpu_has_no_graphs(self) -> None:
        case = replace(case_of(), device="cpu")
        assert why_unsupported(case) == "CUDA graphs exist on CUDA devices only"

    @pytest.mark.parametrize("name", ["fsdp", "zero_1", "zero_2", "ddp_torch"])
    def test_strategies_that_decide_on_the_host_are_refused(self, name: str) -> None:
        reason = why_unsupported(case_of(f"parallel={name}", "parallel.dp=2"))
        assert reason is not None
        assert reason.startswith(f"parallel={name} is not captured in a CUDA graph: ")

    def test_graphs_are_not_captured_twice(self) -> None:
        words = ["compile=block", "compile.mode=reduce-overhead"]
        with pytest.raises(ValueError, match=r"task.cuda_graph=true: compile.mode=reduce-overhead"):
            case_of(*words)

    def test_phases_are_those_of_the_graphs(self) -> None:
        split = ("attention=zigzag", "parallel.cp=2")
        case, launched = case_of(*split), case_of(*split, "task.cuda_graph=false")
        phases = set(case.task.work(case))
        assert phases == {"forward", "backward", "optimizer", "step"}
        assert set(launched.task.work(launched)) - phases == {"communication"}


def weights_and_losses(
    group: dist.ProcessGroup | None, arguments: tuple[str, ...]
) -> tuple[list[float], float]:
    """Losses of launched and captured steps, and how far their weights are apart, relatively."""
    case = case_of(*arguments)
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device=device)
    if group is not None:
        ranks = list(range(group.size()))
        votes = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        bench = Bench(
            device=device, rank=dist.get_rank(group), world_size=len(ranks), vote_group=votes
        )
    losses, weights = [], []
    for kind in (MeasuredStep, CapturedStep):
        step = made(kind, case, bench)
        # Steps before a capture are launched.
        for _ in range(2 if kind is CapturedStep else 2 + WARM_UP_CALLS):
            step(PhaseTimer(device))
        torch.cuda.synchronize()
        losses.append(step.loss())
        weights.append(torch.cat([p.detach().flatten().double() for p in step.module.parameters()]))
    return losses, float((weights[0] - weights[1]).norm() / weights[0].norm())


def made(kind: type[MeasuredStep], case: Case, bench: Bench) -> MeasuredStep:
    if case.parallel.cp == 1:
        attention = case.attention.role(Attention)

        def make_batch() -> batch.Batch:
            return batch.whole_batch(case, bench.device, bench.rank)
    else:
        scheme = case.attention.role(SequenceParallelAttention)
        # Not left: buffers that peers read outlive the step.
        attention = scheme.bind(case.parallel.cp_group(), bench.device).__enter__()

        def make_batch() -> batch.Batch:
            rank = case.parallel.data_rank(bench.rank)
            return batch.split_batch(case, bench.device, rank, attention.layout)

    options = {"mode": "train_step", "max_norm": case.task.clip_grad_norm}
    return kind(case, bench, attention, make_batch, **options)


@pytest.mark.gpu
@pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_rank(precision: str) -> None:
    words = ("attention=flash_triton", f"precision={precision}", "task.clip_grad_norm=1")
    losses, apart = weights_and_losses(None, words)
    assert losses[0] == losses[1]
    assert apart == 0


@pytest.mark.multigpu
@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, torch sees {NUM_GPUS}")
@pytest.mark.parametrize(
    "words",
    [
        ("attention=zigzag", "attention.transport=symmetric", "parallel.cp=2"),
        ("attention=zigzag", "attention.transport=send_recv", "parallel.cp=2", "checkpoint=block"),
        ("attention=ulysses", "parallel.cp=2", "task.clip_grad_norm=1"),
        ("attention=llama3", "parallel=ddp_bucketed", "parallel.dp=1", "parallel.cp=2"),
        *(
            ("attention=flash_triton", f"parallel={name}", "parallel.dp=2")
            for name in ("ddp_naive", "ddp_flat", "ddp_bucketed", "sharded_optimizer")
        ),
        ("attention=flash_triton", "parallel.tp=2"),
    ],
    ids=" ".join,
)
def test_two_ranks(words: tuple[str, ...]) -> None:
    for losses, apart in on_gpus(2, weights_and_losses, words):
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        # NCCL may sum in another order in a graph.
        assert apart < 1e-5
