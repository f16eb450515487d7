"""Clipped training steps of strategies, against one process; wrong norms end as wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_strategies import DATA, RANKS, alarms, bench_of, case_of, said_of
from torch import Tensor, nn

from harness.bench.bench import Bench
from harness.bench.outcome import Outcome
from harness.cases.case import Case
from harness.request.compose import compose_request
from harness.tasks import batch
from harness.tasks.training import clipping, strategy_check
from harness.tasks.training.clipping import unscale_and_clip
from kernels import Attention
from models.transformer import Transformer, cross_entropy
from parallel import STRATEGIES
from parallel.strategies.strategy import Strategy

CLIPPED = "task.clip_grad_norm=1"

TP = ["parallel.dp=2", "parallel.tp=2", "attention=naive"]

QUICK = [
    *([f"parallel={name}", *DATA] for name in ("ddp_torch", "fsdp", "fsdp_torch")),
    *([f"parallel={name}", *TP] for name in ("ddp_torch", "zero_2", "fsdp_torch")),
]

EVERY = [
    *([f"parallel={name}", *DATA] for name in STRATEGIES.names() if name != "none"),
    *([f"parallel={name}", *TP] for name in STRATEGIES.names() if name != "none"),
    ["parallel=none", "parallel.cp=4", "attention=ring"],
    ["parallel=none", "parallel.tp=4", "attention=sdpa"],
    ["parallel=fsdp", "parallel.dp=2", "parallel.cp=2", "attention=zigzag"],
    *([f"parallel={name}", "parallel.shard_group=2", *DATA] for name in ("fsdp", "fsdp_torch")),
]


@pytest.mark.parametrize(
    ("precision", "choices"),
    [
        ("fp32", QUICK),
        ("fp16", [QUICK[1], QUICK[3]]),
        pytest.param("fp32", EVERY, marks=pytest.mark.exhaustive),
        pytest.param("fp16", EVERY, marks=pytest.mark.exhaustive),
    ],
)
def test_no_alarm(precision: str, choices: list[list[str]]) -> None:
    clipped = [[*words, CLIPPED, f"precision={precision}"] for words in choices]
    for of_rank in on_ranks(RANKS, alarms, clipped, 1):
        assert of_rank == [""] * len(choices)


def by_own_norm(model: nn.Module, parallel: Strategy) -> None:
    """Each rank clips by the norm of what it holds, as others' loops did."""
    held = [p for p in model.parameters() if p.grad is not None]
    gradients = [p.grad.as_subclass(Tensor) for p in held if p.grad is not None]
    norm = torch.stack([g.norm() for g in gradients]).norm()
    torch._foreach_mul_(gradients, (strategy_check.MAX_NORM / norm).clamp(max=1.0))


def counting_all(model: nn.Module, parallel: Strategy) -> None:
    """Weights that all tensor-parallel ranks hold count once a rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipping, "_is_split", lambda name: True)
        clipping._clip(model, strategy_check.MAX_NORM, parallel)


def not_at_all(model: nn.Module, parallel: Strategy) -> None:
    """Nothing is clipped."""


def wrongly(
    group: dist.ProcessGroup, words: list[str], clip: Callable[[nn.Module, Strategy], None]
) -> str:
    def instead(
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        max_norm: float,
        parallel: Strategy | None,
    ) -> Any:
        if parallel is None:
            return unscale_and_clip(scaler, optimizer, model, max_norm, parallel)
        return clip(model, parallel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_check, "unscale_and_clip", instead)
        return said_of(case_of([*words, CLIPPED, "precision=fp32"]), bench_of(group))


@pytest.mark.parametrize(
    ("words", "clip"),
    [
        (["parallel=fsdp", *DATA], by_own_norm),
        (["parallel=ddp_torch", *TP], by_own_norm),
        (["parallel=ddp_torch", *TP], counting_all),
        (["parallel=ddp_naive", *DATA], not_at_all),
    ],
)
def test_wrong_norms_are_wrong(words: list[str], clip: Any) -> None:
    assert any("one process" in text for text in on_ranks(RANKS, wrongly, words, clip))


def run(*words: str) -> tuple[Case, Outcome]:
    small = ("task=train_step", "model=tiny", "model.num_layers=1", "seq_len=16", "batch_size=2")
    steps = ("task.warmup_steps=0", "task.measure_steps=1", "device=cpu", "attention=naive")
    (case,) = compose_request([*small, *steps, *words]).cases
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    return case, bench.outcome


def test_the_norm_before_is_noted() -> None:
    case, outcome = run("task.clip_grad_norm=0.25")
    assert case.model is not None
    torch.manual_seed(case.seed)
    model = Transformer(case.model, case.attention.role(Attention)).double()
    of_rank = batch.whole_batch(case, torch.device("cpu"), 0)
    logits = model(of_rank.tokens, of_rank.positions)
    cross_entropy(logits, of_rank.targets, None).backward()
    squares = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    assert outcome.notes["gradient_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert "clip0.25" in case.slug
    unclipped, found = run()
    assert "gradient_norm" not in found.notes
    assert unclipped.id != case.id


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task.clip_grad_norm=0"], "task.clip_grad_norm=0: must be positive, or null"),
        (["task.clip_grad_norm=inf"], "task.clip_grad_norm=inf: must be a finite number"),
        (
            ["task.clip_grad_norm=1", "task.mode=forward_backward"],
            "task.clip_grad_norm=1: task.mode=forward_backward has no optimizer's step",
        ),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as error:
        compose_request(["task=train_step", "model=tiny", "device=cpu", *words])
    assert "\n" not in str(error.value)
