"""Strategies against one process: wrong ones end as wrong, and those of users raise no alarm."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import pytest
import torch
import torch.distributed as dist
import wrong_strategies
from ranks import on_ranks
from torch import Tensor, nn
from wrong_strategies import IN_GRADIENTS, OF_PARTS, OF_SHARDS

from harness.bench.bench import Bench
from harness.bench.outcome import PeerFailed, WrongResult
from harness.bench.phase_timer import PhaseTimer
from harness.cases.case import Case
from harness.gate.updates import Training
from harness.request.compose import compose_request
from harness.tasks import batch
from harness.tasks.training import strategy_check
from harness.tasks.training.step import MeasuredStep
from harness.tasks.training.strategy_check import check_replicas, check_strategy
from kernels import sinks
from parallel import STRATEGIES
from parallel.context.attention import SequenceParallelAttention

RANKS = 4

SMALL = ("task=train_step", "model=tiny", "model.d_model=64", "device=cpu")

DATA = ("attention=naive", f"parallel.dp={RANKS}")

MASKS = ("attention.window=9", "attention.sinks=true", "model.full_attention_every=2")

LATE = "after_some_steps"

FAULTS = [*(name for name in IN_GRADIENTS if name != LATE), *OF_SHARDS, *OF_PARTS]

HIDDEN = {"bf16_pure": ["zero_element_left", "fsdp_element_left"]}
"""By precision, faults that it cannot tell: one weight that stays where it was is no further off
than others whose steps are lost to rounding."""


def case_of(words: list[str]) -> Case:
    (case,) = compose_request([*SMALL, *words]).cases
    return case


def bench_of(group: dist.ProcessGroup) -> Bench:
    return Bench(
        device=torch.device("cpu"), rank=group.rank(), world_size=group.size(), vote_group=group
    )


@contextlib.contextmanager
def one_process_trains_once(group: dist.ProcessGroup) -> Iterator[None]:
    """Train in one process once for all strategies that are compared with the same training.

    The ranks, which would all do the same, take turns.
    """
    train = strategy_check._Trained.in_one_process
    trained: dict[str, Training] = {}

    def once(self: strategy_check._Trained, *, exact: bool) -> Training:
        case = self._case
        same = {**case.to_dict(), "parallel": (case.parallel.dp, case.parallel.exchange_dtype)}
        key = repr((same, self._ties, exact))
        if key not in trained:
            # Both trainings of a check on one rank, so that each rank makes exact ones.
            turn = len(trained) // 2 % group.size()
            result = [train(self, exact=exact) if group.rank() == turn else None]
            dist.broadcast_object_list(result, group=group, group_src=turn)
            trained[key] = cast(Training, result[0])
        return trained[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy_check._Trained, "in_one_process", once)
        yield


def said(group: dist.ProcessGroup, choices: list[list[str]]) -> list[str]:
    """What this rank's check says of each choice; nothing if it holds."""
    with wrong_strategies.registered(), one_process_trains_once(group):
        return [said_of(case_of(words), bench_of(group)) for words in choices]


def said_of(case: Case, bench: Bench, *, draws: Iterable[int] = (0,)) -> str:
    try:
        for draw in draws:
            check(case, bench, draw)
    except WrongResult as error:
        with contextlib.suppress(PeerFailed):
            bench.vote("wrong")
        return str(error)
    except PeerFailed:
        pass
    return ""


def check(case: Case, bench: Bench, draw: int) -> None:
    if case.parallel.cp == 1:
        check_strategy(case, bench, case.attention, None, draw=draw)
        return
    scheme = case.attention.role(SequenceParallelAttention)
    with scheme.bind(case.parallel.cp_group(), bench.device) as attention:
        check_strategy(case, bench, attention, attention.layout, draw=draw)


def words_of(fault: str) -> list[str]:
    words = OF_PARTS.get(fault, DATA)
    attention = [] if any(word.startswith("attention=") for word in words) else ["attention=naive"]
    return [*words, *attention, f"parallel=planted_{fault}"]


@pytest.mark.parametrize(
    ("precision", "faults"),
    [
        ("fp32", FAULTS),
        ("bf16_pure", FAULTS[::3]),
        *(
            pytest.param(precision, FAULTS, marks=pytest.mark.exhaustive)
            for precision in ("bf16_pure", "bf16", "fp16")
        ),
    ],
)
def test_wrong_ones_are_wrong(precision: str, faults: list[str]) -> None:
    faults = [fault for fault in faults if fault not in HIDDEN.get(precision, [])]
    choices = [[*words_of(fault), f"precision={precision}"] for fault in faults]
    by_rank = on_ranks(RANKS, said, choices)
    missed = [
        fault
        for fault, *of_ranks in zip(faults, *by_rank, strict=True)
        if not any(of_ranks) or any("\n" in text for text in of_ranks)
    ]
    assert missed == []


def test_one_that_turns_wrong_later_is_wrong_then() -> None:
    """The first check ends before the fault begins, the one after the measured steps finds it."""
    first, later = zip(*on_ranks(RANKS, said_late), strict=True)
    assert not any(first)
    assert any("one process" in text for text in later)


def said_late(group: dist.ProcessGroup) -> list[str]:
    with wrong_strategies.registered(), one_process_trains_once(group):
        case = case_of(words_of(LATE))
        return [said_of(case, bench_of(group), draws=[draw]) for draw in (0, 1)]


SOUND = [
    *([f"parallel={name}", *DATA] for name in STRATEGIES.names() if name != "none"),
    ["parallel=none", "parallel.cp=4", "attention=ring"],
    ["parallel=none", "parallel.tp=4", "attention=sdpa"],
    ["parallel=ddp_bucketed", "parallel.dp=2", "parallel.cp=2", "attention=zigzag"],
    ["parallel=zero_2", "parallel.dp=2", "parallel.tp=2", "attention=naive"],
    ["parallel=none", "parallel.tp=4", "attention=flash_torch", *MASKS],
    ["parallel=fsdp", "parallel.dp=2", "parallel.cp=2", "attention=zigzag", *MASKS],
    ["parallel=fsdp", "parallel.compute_dtype=bfloat16", *DATA],
    ["parallel=fsdp_torch", "parallel.compute_dtype=bfloat16", *DATA],
    ["parallel=fsdp", "checkpoint=block", *DATA],
    ["parallel=fsdp", "parallel.shard_group=2", *DATA],
    ["parallel=fsdp_torch", "parallel.shard_group=2", "parallel.compute_dtype=bfloat16", *DATA],
]


@pytest.mark.parametrize(
    ("precision", "draws"),
    [
        ("fp32", 1),
        *(
            pytest.param(precision, 5, marks=pytest.mark.exhaustive)
            for precision in ("fp32", "bf16", "bf16_pure", "fp16")
        ),
    ],
)
def test_no_alarm(precision: str, draws: int) -> None:
    choices = [[*words, f"precision={precision}"] for words in SOUND]
    for of_rank in on_ranks(RANKS, alarms, choices, draws):
        assert of_rank == [""] * len(choices)


def alarms(group: dist.ProcessGroup, choices: list[list[str]], draws: int) -> list[str]:
    with one_process_trains_once(group):
        return [said_of(case_of(words), bench_of(group), draws=range(draws)) for words in choices]


OF_SINKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sign": lambda x, rank: -x,
    "none": lambda x, rank: 0 * x,
    "too little": lambda x, rank: 0.6 * x,
    "twice": lambda x, rank: 2 * x,
    "one head without": lambda x, rank: torch.cat([0 * x[:1], x[1:]]),
    "heads in another order": lambda x, rank: x.flip(0),
    "of the first rank alone": lambda x, rank: x if rank == 0 else 0 * x,
}
"""What becomes of a rank's gradient of sinks."""


def said_with_wrong_sinks(
    group: dist.ProcessGroup, words: list[str], faults: list[str]
) -> list[str]:
    """What the check says where a kernel's gradient of sinks is wrong, by fault."""
    gradient, case, found = sinks.gradient, case_of([*words, *MASKS]), []
    with one_process_trains_once(group):
        for fault in faults:
            spoil = functools.partial(OF_SINKS[fault], rank=group.rank())
            with pytest.MonkeyPatch.context() as patch:
                # Training in one process has autograd's gradient, of explicit softmax.
                patch.setattr(sinks, "gradient", lambda *a, spoil=spoil: spoil(gradient(*a)))
                found.append(said_of(case, bench_of(group)))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16_pure", "bf16", "fp16"])
@pytest.mark.parametrize(
    "words",
    [
        ["parallel=none", "parallel.tp=4", "attention=flash_torch"],
        ["parallel=fsdp", "parallel.dp=2", "parallel.cp=2", "attention=zigzag"],
    ],
    ids=["tp", "cp"],
)
def test_a_wrong_gradient_of_sinks_is_wrong(words: list[str], precision: str) -> None:
    # Under tensor parallelism each of the four ranks has one head.
    one_head = "parallel.tp=4" in words
    faults = [fault for fault in OF_SINKS if not (one_head and "order" in fault)]
    by_rank = on_ranks(RANKS, said_with_wrong_sinks, [*words, f"precision={precision}"], faults)
    for fault, *of_ranks in zip(faults, *by_rank, strict=True):
        assert any("sinks" in text for text in of_ranks), fault


def verdict(bench: Bench, check: Callable[[], None]) -> str:
    """What a check says on this rank, which votes on it."""
    try:
        check()
    except WrongResult as error:
        with contextlib.suppress(PeerFailed):
            bench.vote("wrong")
        return str(error)
    except PeerFailed:
        return "a peer failed"
    return ""


def compared(group: dist.ProcessGroup, fault: str) -> str:
    """What the check of a measured model's weights says, after a fault on the second rank."""
    torch.manual_seed(3)
    module = nn.Linear(4, 4)
    bench = bench_of(group)
    if group.rank() == 1:
        with torch.no_grad():
            if fault == "one bit":
                module.weight[2, 1] = torch.nextafter(module.weight[2, 1], torch.tensor(9.0))
            if fault == "nan":
                module.bias[3] = torch.nan
    case = case_of(["parallel=ddp_naive", *DATA])
    return verdict(bench, lambda: check_replicas(case, bench, module, module))


@pytest.mark.parametrize(
    ("fault", "words"), [("none", ""), ("one bit", "weight differs by"), ("nan", "bias has")]
)
def test_replicas_hold_the_same_bits(fault: str, words: str) -> None:
    by_rank = on_ranks(RANKS, compared, fault)
    assert words in by_rank[1]
    assert bool(by_rank[1]) == (fault != "none")
    assert all(text in ("", "a peer failed") for text in (by_rank[0], *by_rank[2:]))


def compared_after_steps(group: dist.ProcessGroup, name: str) -> str:
    """What the check says of measured steps; a strategy may show shards between them."""
    case = case_of([f"parallel={name}", f"parallel.dp={RANKS}", "attention=naive", "seq_len=16"])
    bench = bench_of(group)
    make_batch = functools.partial(batch.whole_batch, case, bench.device, bench.rank)
    step = MeasuredStep(case, bench, case.attention, make_batch, mode="train_step")
    for _ in range(2):
        step(PhaseTimer(bench.device))
    step.finish()

    def before_and_after_a_change() -> None:
        check_replicas(case, bench, step.model, step.module)
        if group.rank() == 1:
            with torch.no_grad():
                next(step.module.parameters()).view(-1)[5] += 1e-3
        check_replicas(case, bench, step.model, step.module)

    return verdict(bench, before_and_after_a_change)


@pytest.mark.parametrize("name", ["ddp_bucketed", "sharded_optimizer", "zero_1", "zero_2"])
def test_replicas_of_measured_steps_are_compared_whole(name: str) -> None:
    """Equal after two steps, and not once a rank has changed a weight."""
    by_rank = on_ranks(RANKS, compared_after_steps, name)
    if name.startswith("zero"):
        # What a rank writes to whole weights is gone with the next gathering of shards.
        assert by_rank == [""] * RANKS
    else:
        assert "differs by" in by_rank[1]
