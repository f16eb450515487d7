"""FLOPs of ranks that exchange heads, against pairs counted one by one."""

from __future__ import annotations

import pytest

from harness.cases.case import Case
from harness.request.compose import compose_request
from parallel.context.blocks.layouts import Contiguous, Layout, Zigzag

HEADS, HEAD_DIM, TOKENS = 6, 8, 48


def case_of(*arguments: str) -> Case:
    keys = {"task": "flop_balance", "device": "cpu", "batch_size": "1", "seq_len": str(TOKENS)}
    keys |= {"task.num_heads": str(HEADS), "task.head_dim": str(HEAD_DIM), "task.ranks": "4"}
    keys |= dict(argument.split("=", 1) for argument in arguments)
    (case,) = compose_request([f"{key}={value}" for key, value in keys.items()]).cases
    return case


def flops_by_rank(layout: str, *arguments: str) -> list[float]:
    case = case_of(f"task.layout={layout}", *arguments)
    return case.task.balance(case).per_rank("pair")


def one_by_one(layout: type[Layout], groups: int, heads_of: list[int], window: int) -> list[float]:
    """Pairs of each group's queries and the keys they see, times the heads of each of its ranks."""
    found = []
    for group in range(groups):
        queries = [q for run in layout(num_ranks=groups).runs(group, TOKENS) for q in run]
        pairs = sum(1 for q in queries for k in range(q + 1) if k > q - window)
        found += [4.0 * HEAD_DIM * heads * pairs for heads in heads_of]
    return found


@pytest.mark.parametrize("window", [TOKENS, 7])
@pytest.mark.parametrize(
    ("layout", "arguments", "outer", "heads_of"),
    [
        # Six heads do not divide over four ranks.
        ("heads", (), Contiguous, [1, 2, 1, 2]),
        ("heads", ("task.ranks=3",), Contiguous, [2, 2, 2]),
        ("heads_contiguous", (), Contiguous, [3, 3]),
        ("heads_zigzag", (), Zigzag, [3, 3]),
        ("heads_zigzag", ("task.ulysses=4",), Zigzag, [1, 2, 1, 2]),
        ("heads_zigzag", ("task.ranks=6", "task.ulysses=2"), Zigzag, [3, 3]),
    ],
)
def test_flops(
    layout: str, arguments: tuple[str, ...], outer: type[Layout], heads_of: list[int], window: int
) -> None:
    words = () if window == TOKENS else (f"attention.window={window}", "attention=flash_torch")
    found = flops_by_rank(layout, *arguments, *words)
    groups = len(found) // len(heads_of)
    assert found == pytest.approx(one_by_one(outer, groups, heads_of, window))


def test_a_ring_of_groups_has_a_step_for_each() -> None:
    case = case_of("task.layout=heads_zigzag", "task.ranks=6", "task.ulysses=2")
    balance = case.task.balance(case)
    assert {len(steps) for steps in balance.pair} == {3}
    assert balance.lockstep_cost("pair") == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("task.layout=zigzag", "task.ulysses=2"), "task.ulysses=2: task.layout=zigzag exchanges"),
        (
            ("task.layout=heads_zigzag", "task.ulysses=3"),
            "task.ulysses=3: must divide task.ranks=4",
        ),
        (("task.layout=heads", "task.ulysses=2"), "task.ulysses=2: with task.layout=heads all"),
        (("task.layout=heads", "task.ranks=8"), "task.num_heads=6: must be at least the 8 ranks"),
        (("task.layout=heads_zigzag", "seq_len=50"), "seq_len=50: must be a multiple of 4"),
        (("task.layout=head",), "task.layout=head: "),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        case_of(*arguments)
    assert "\n" not in str(caught.value)
