"""Which transport a scheme has on hosts that hold parts of its sequences."""

from __future__ import annotations

import pytest

from harness.cases.case import Case
from harness.request.command_line import parse
from harness.request.grid import expand
from harness.run.workers.on_hosts import on_hosts


def case(*arguments: str) -> Case:
    """A training step of 8 heads, for GPUs."""
    keys = ["task=train_step", "model=tiny", "model.num_heads=8", "seq_len=256", *arguments]
    (found,) = expand([{}], parse(keys), "cuda").values()
    return found


@pytest.mark.parametrize(
    ("mesh", "ranks_on_host", "reaches"),
    [
        ("dp=1 cp=8 tp=1", 8, True),
        ("dp=2 cp=4 tp=1", 4, True),
        ("dp=2 cp=4 tp=2", 8, True),
        # Ranks 0, 2, ... 14.
        ("dp=1 cp=8 tp=2", 8, False),
        ("dp=1 cp=16 tp=1", 8, False),
        # The second sequence is on ranks 4 to 7, of which the last two are on the second host.
        ("dp=3 cp=4 tp=1", 6, False),
        ("dp=1 cp=2 tp=1", 1, False),
        ("dp=2 cp=1 tp=4", 2, True),
    ],
)
@pytest.mark.parametrize(
    ("scheme", "sending"),
    [("zigzag", "send_recv"), ("ulysses", "all_to_all"), ("ulysses_zigzag", "send_recv")],
)
def test_a_transport_reaches_all_ranks_of_a_sequence(
    scheme: str, sending: str, mesh: str, ranks_on_host: int, *, reaches: bool
) -> None:
    axes = [f"parallel.{axis}" for axis in mesh.split()]
    if "cp=1" in mesh.split():
        scheme = "sdpa"
    asked = case(f"attention={scheme}", "parallel=zero_1", *axes)
    found, reason = on_hosts(asked, ranks_on_host)
    assert reason is None
    if reaches:
        assert found is asked
    else:
        assert found.attention.transport == sending  # type: ignore[attr-defined]
        # What is recorded is what was asked.
        assert asked.attention.transport == "auto"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (2, False)])
def test_one_that_was_asked_for_is_refused_where_it_does_not(tp: int, *, fits: bool) -> None:
    keys = ["attention=ring", "attention.transport=symmetric", "parallel=zero_1"]
    asked = case(*keys, f"parallel.dp={2 // tp}", "parallel.cp=8", f"parallel.tp={tp}")
    found, reason = on_hosts(asked, 8)
    assert found is asked
    assert (reason is None) == fits
    assert fits or "parallel.cp=8 x parallel.tp=2 ranks, and 8 run on each" in str(reason)
