"""Which times are the host's, from records with and without the host's and the device's own."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.analysis.frame import build_frame
from harness.analysis.host_time import host_bound, host_time
from harness.drawing.panels import whole_calls
from harness.render.rows import per_case
from harness.render.table import HOST_BOUND, build_table, finding_of
from harness.store.record import Phase, Record
from tests.support.records import in_rounds, make_record


def phase(samples: float, *, host: float | None = None, device: float | None = None) -> Phase:
    return Phase(
        clock="cuda_event",
        samples_ms=[[samples] * 8],
        host_ms=[[host] * 8] if host is not None else [],
        device_ms=[[device] * 3] if device is not None else [],
    )


@pytest.mark.parametrize(
    ("found", "waits", "bound"),
    [
        # The host's time hides behind the flush of the cache: the pass is shorter than it.
        (phase(0.50, host=0.60, device=0.10), 0.8, True),
        (phase(1.00, host=0.50, device=0.94), 0.06, True),
        (phase(1.00, host=0.50, device=0.96), 0.04, False),
        # Lower clocks in a row than one by one are no waiting: the host had nothing to do.
        (phase(100.0, host=0.5, device=80.0), 0.005, False),
        (phase(1.00, host=0.50, device=1.10), 0.0, False),
    ],
)
def test_the_share_in_which_the_device_waits(found: Phase, waits: float, bound: bool) -> None:
    time = host_time(found, "cuda")
    assert time.device_waits == pytest.approx(waits)
    assert time.host_bound is bound


@pytest.mark.parametrize(("host", "bound"), [(1.2, True), (0.96, True), (0.94, False)])
def test_without_passes_of_the_device_alone(host: float, bound: bool) -> None:
    time = host_time(phase(1.0, host=host), "cuda")
    assert time.host_bound is bound
    assert time.device_waits != time.device_waits


HOSTS_MS = [0.35, 0.6, 0.8, 0.45, 0.9] * 8


@pytest.mark.parametrize(
    ("times", "hosts", "waits", "bound"),
    [
        # 16,384 tokens on an H200 at its limit of power: some passes were at the clocks of those
        # that measured the device alone, and none took longer for its host.
        ([5.6] * 10 + [6.3] * 30, HOSTS_MS, 0.0, False),
        # The longer passes are those of a slow host.
        ([5.0 + 2 * host for host in HOSTS_MS], HOSTS_MS, 0.55 / 6.2, True),
        # No pass was as fast as the device alone.
        ([6.0] * 10 + [6.3] * 30, HOSTS_MS, 0.45 / 6.3, True),
        # The host takes as long as the device, so that it can be late at any kernel.
        ([5.6] * 10 + [6.3] * 30, [8 * host for host in HOSTS_MS], 0.7 / 6.3, True),
    ],
)
def test_lower_clocks_are_no_waiting_where_the_host_was_ahead(
    times: list[float], hosts: list[float], waits: float, bound: bool
) -> None:
    found = Phase(clock="cuda_event", samples_ms=[times], host_ms=[hosts], device_ms=[[5.6] * 3])
    time = host_time(found, "cuda")
    assert time.host_bound is bound
    assert time.device_waits == pytest.approx(waits, abs=0.03)


def test_what_a_record_does_not_tell_is_unknown() -> None:
    assert host_time(phase(1.0), "cuda").host_bound is None
    assert host_time(None, "cuda").host_bound is None
    assert host_time(phase(1.0), "cpu").host_bound is False


def test_a_full_launch_queue_is_not_the_host_s_time() -> None:
    found = phase(1.0, host=0.1, device=1.0)
    found.host_ms = [[0.1] * 3 + [1.0] * 5]
    assert host_time(found, "cuda").host_ms == pytest.approx(0.1)


def test_the_slowest_rank_counts() -> None:
    found = Phase(
        clock="cuda_event", samples_ms=[[1.0] * 4, [0.9] * 4], host_ms=[[0.1] * 4, [0.97] * 4]
    )
    time = host_time(found, "cuda")
    assert (time.host_ms, time.host_bound) == (pytest.approx(0.97), True)


def test_columns_of_the_frame() -> None:
    samples = {"forward": [[0.5] * 4], "backward": [[2.0] * 4]}
    record = make_record(task="attention", mode="forward_backward", samples_ms=samples)
    old = make_record(task="attention", mode="forward_backward", samples_ms=samples, seed=1)
    record.phases["forward"].host_ms = [[0.5] * 4]
    record.phases["forward"].device_ms = [[0.2]]
    frame = build_frame([record, old])
    rows = frame[frame["case_id"] == record.case_id].set_index("phase")
    assert rows.loc["forward", ["host_ms", "device_ms", "device_waits"]].tolist() == [0.5, 0.2, 0.6]
    assert rows["host_bound"].tolist() == [True, None]
    assert host_bound(frame).tolist() == [True, False, False, False]
    assert not host_bound(pd.DataFrame({"phase": ["forward"]})).any()


def test_a_host_bound_time_is_marked_wherever_it_stands() -> None:
    samples = {"forward": [[0.5] * 4], "backward": [[0.5] * 4], "forward_backward": [[1.0] * 4]}
    slow, fast = (
        make_record(
            task="attention",
            attention=name,
            mode="forward_backward",
            samples_ms=samples,
            flops=1e9,
        )
        for name in ("sdpa", "naive")
    )
    slow.phases["forward"].host_ms = [[0.5] * 4]
    slow.phases["forward"].device_ms = [[0.2]]
    frame = build_frame([slow, fast])
    both = per_case(frame, ("forward", "backward")).set_index("attention")
    assert both["forward_mark"].to_dict() == {"sdpa": "‖", "naive": ""}
    assert both["backward_mark"].to_dict() == {"sdpa": "", "naive": ""}
    assert both["mark"].to_dict() == {"sdpa": "‖", "naive": ""}
    table = build_table("cases", frame)
    assert table is not None
    assert HOST_BOUND in table.footnotes
    marks = table.rows.set_index(["attention", "phase"])["mark"]
    assert marks["sdpa", "forward"] == "‖"
    assert marks["naive", "forward"] == ""


def call(attention: str, seq_len: int, ms: float, *, device_ms: float, **task: Any) -> Record:
    """Forward passes of which the host enqueues one in 0.5 ms."""
    record = make_record(
        task="attention",
        mode="forward",
        attention=attention,
        seq_len=seq_len,
        samples_ms={"forward": [[ms] * 4]},
        flops=1e9,
    )
    record.case["task"] |= task
    record.case_id += str(sorted(task))
    record.phases["forward"].host_ms = [[0.5] * 4]
    record.phases["forward"].device_ms = [[device_ms]]
    return in_rounds(record)


def test_host_bound_times_rank_nothing() -> None:
    records = [
        call("sdpa", 512, 0.5, device_ms=0.2),
        call("naive", 512, 0.6, device_ms=0.1),
        call("sdpa", 2048, 2.0, device_ms=2.0),
        call("naive", 2048, 8.0, device_ms=8.0),
    ]
    table = build_table("flash_benchmarking", build_frame(records))
    assert table is not None
    assert finding_of(table) == "sdpa is fastest in bf16 from 2,048 tokens on."
    summary = build_table("attention_summary", build_frame(records))
    assert summary is not None
    assert finding_of(summary).startswith("sdpa is fastest in bf16, by a factor of 4.00")
    for record in records:
        record.phases["forward"].device_ms = record.phases["forward"].samples_ms
    table = build_table("flash_benchmarking", build_frame(records))
    assert table is not None
    assert finding_of(table) == "sdpa is fastest in bf16 at every length."


def test_host_and_device_side_by_side() -> None:
    records = [
        call("sdpa", 512, 0.6, device_ms=0.1),
        call("sdpa", 512, 0.11, device_ms=0.1, cuda_graph=True),
        call("sdpa", 2048, 2.0, device_ms=2.0),
        make_record(task="attention", mode="forward", samples_ms={"forward": [[1.0]]}),
    ]
    table = build_table("host_time", build_frame(records))
    assert table is not None
    found = table.rows.set_index(["seq_len", "cuda_graph"])
    assert len(found) == 3
    launched = found.loc[(512, False)]
    assert launched["device_waits"] == pytest.approx(5 / 6)
    assert (launched["bound"], launched["graph_ms"]) == ("host", pytest.approx(0.11))
    assert found.loc[(2048, False), "bound"] == "device"
    # The graph's own host is a stand-in that takes as long, so its tenth counts as waiting.
    assert finding_of(table).startswith("2 of 3 passes are host-bound")
    assert not any("task.cuda_graph=true" in note for note in table.footnotes)
    table = build_table("host_time", build_frame(records[:1]))
    assert table is not None
    assert any("task.cuda_graph=true" in note for note in table.footnotes)
    assert build_table("host_time", build_frame(records[3:])) is None


def test_figures_leave_out_graphs_of_some_calls() -> None:
    launched = [call("sdpa", seq_len, 1.0, device_ms=1.0) for seq_len in (512, 2048)]
    graphed = [
        call("sdpa", seq_len, 1.0, device_ms=1.0, cuda_graph=True) for seq_len in (512, 2048)
    ]
    assert whole_calls(build_frame([*launched, *graphed[:1]]))["cuda_graph"].tolist() == [False] * 2
    assert len(whole_calls(build_frame([*launched, *graphed]))) == 4
    assert len(whole_calls(build_frame(graphed))) == 2


def test_verdicts_on_backends_need_the_device_s_own_time() -> None:
    def verdicts(naive_device_ms: float) -> tuple[str, list[str], str]:
        records = [
            call("naive", 512, 2.0, device_ms=naive_device_ms),
            call("sdpa", 512, 1.0, device_ms=1.0),
        ]
        table = build_table("comparison", build_frame([in_rounds(record) for record in records]))
        assert table is not None
        (row,) = table.rows.to_dict("records")
        return row["verdict"], table.footnotes, finding_of(table)

    assert verdicts(2.0)[0] == "FASTER"
    verdict, footnotes, finding = verdicts(1.0)
    assert verdict == "UNCLEAR"
    assert HOST_BOUND in footnotes
    assert finding == ("The one pair is UNCLEAR: none can be told from its baseline.")
