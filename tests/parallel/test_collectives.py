"""Collective operations: results element by element, and bandwidths by numbers typed here."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import Command
from ranks import on_ranks
from records import make_collective_record

from harness.analysis.frame import build_frame
from harness.cases.case import Case
from harness.render.figure import build_figure, draw
from harness.render.table import build_table
from harness.request.compose import compose_request
from harness.request.plan import predicted_seconds
from parallel.collectives import (
    COLLECTIVES,
    CollectiveData,
    bus_factor,
    make_collective,
    num_elements,
)


def case_of(*arguments: str) -> Case:
    (case,) = compose_request(["task=collectives", "device=cpu", *arguments]).cases
    return case


@pytest.mark.parametrize(
    ("collective", "two", "eight"),
    [
        ("all_reduce", 1.0, 1.75),
        ("all_gather", 0.5, 0.875),
        ("reduce_scatter", 0.5, 0.875),
        ("all_to_all", 0.5, 0.875),
        ("broadcast", 1.0, 1.0),
        ("send_recv", 1.0, 1.0),
    ],
)
def test_bus_factors(collective: str, two: float, eight: float) -> None:
    """nccl-tests, doc/PERFORMANCE.md, with n = 2 and n = 8."""
    assert bus_factor(collective, 2) == two
    assert bus_factor(collective, 8) == eight


def test_sizes_divide_among_the_ranks() -> None:
    assert num_elements(2**20, 4, 2) == 262_144
    assert num_elements(2**20, 4, 6) == 262_140
    assert num_elements(7, 4, 2) == 0


def wrong_before_and_after(
    group: dist.ProcessGroup, collective: str, dtype: torch.dtype
) -> list[int]:
    """Wrong elements of three results: not exchanged, exchanged, exchanged after a reset."""
    size = 12 * group.size()
    data = CollectiveData(group=group, num_elements=size, dtype=dtype, device=torch.device("cpu"))
    made = make_collective(collective, data)
    counts = [made.wrong_elements()]
    made.run()
    counts.append(made.wrong_elements())
    made.reset()
    made.run()
    counts.append(made.wrong_elements())
    return counts


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(2, torch.float32), (3, torch.float32), (4, torch.bfloat16)]
)
def test_wrong_elements_are_counted(collective: str, num_ranks: int, dtype: torch.dtype) -> None:
    ranks = on_ranks(num_ranks, wrong_before_and_after, collective, dtype)
    for rank, (before, *after) in enumerate(ranks):
        assert after == [0, 0]
        # The first rank has the broadcast data from the start.
        assert (before == 0) == (collective == "broadcast" and rank == 0)


def one_spoiled_element(group: dist.ProcessGroup, collective: str) -> int:
    """An element of the data changes on its way from the group's first rank."""
    data = CollectiveData(
        group=group, num_elements=8, dtype=torch.float32, device=torch.device("cpu")
    )
    original = CollectiveData.of_rank

    def spoiled(self: CollectiveData, rank: int) -> torch.Tensor:
        values = original(self, rank)
        if rank == 0:
            # In the part that all_gather and all_to_all take from the first rank.
            values[0] += 1
        return values

    if dist.get_rank(group) == 0:
        CollectiveData.of_rank = spoiled  # type: ignore[method-assign]
    try:
        made = make_collective(collective, data)
    finally:
        CollectiveData.of_rank = original  # type: ignore[method-assign]
    made.run()
    return made.wrong_elements()


@pytest.mark.parametrize(
    ("collective", "wrong"),
    [
        ("all_reduce", [1, 1]),
        ("broadcast", [1, 1]),
        ("all_gather", [1, 1]),
        ("reduce_scatter", [1, 0]),
        ("all_to_all", [1, 0]),
        ("send_recv", [0, 1]),
    ],
)
def test_one_wrong_element_is_one(collective: str, wrong: list[int]) -> None:
    """On the ranks whose result holds it."""
    assert on_ranks(2, one_spoiled_element, collective) == wrong


def test_table_by_hand() -> None:
    """10 MiB in 4 ms of the slowest of four ranks: 10,485,760 / 0.004 s = 2.62 GB/s, x 1.5."""
    records = [
        make_collective_record("all_reduce", ranks=4, size_mib=10, ms=4.0),
        make_collective_record("all_gather", ranks=4, size_mib=10, ms=4.0),
        make_collective_record("send_recv", ranks=4, size_mib=10, ms=4.0, wrong=5),
    ]
    table = build_table("distributed_communication", build_frame(records))
    assert table is not None
    assert table.cells() == [
        ["all_reduce", "4", "10", "4.00", "0.0", "2.62", "3.93", "0"],
        ["all_gather", "4", "10", "4.00", "0.0", "2.62", "1.97", "0"],
        # A count, and no speed.
        ["send_recv", "4", "10", "wrong result", "–", "–", "–", "5"],  # noqa: RUF001
    ]
    for word in ("attention", "sequence", "batch", "heads"):
        assert word not in table.caption


def test_figure_needs_a_speed() -> None:
    good = make_collective_record("all_reduce", ranks=2, size_mib=1, ms=1.0)
    bad = make_collective_record("all_gather", ranks=2, size_mib=1, ms=1.0, wrong=1)
    assert draw("bus_bandwidth", build_frame([bad])) is None
    drawn = draw("bus_bandwidth", build_frame([good, bad]))
    assert drawn is not None
    assert b"all_reduce" in drawn[2]
    assert b"all_gather" not in drawn[2]


def test_one_operation_is_one_panel_of_a_line_for_each_number_of_ranks() -> None:
    records = [
        make_collective_record("all_reduce", ranks=ranks, size_mib=size, ms=size)
        for ranks in (2, 4)
        for size in (1, 10)
    ]
    drawn = build_figure("bus_bandwidth", build_frame(records))
    assert drawn is not None
    (axis,) = (axis for axis in drawn.figure.axes if axis.get_visible())
    names = {line.get_label(): list(line.get_ydata()) for line in axis.get_lines()}
    # MiB in milliseconds, times 2 (n - 1) / n.
    assert names["all_reduce, 2 ranks"] == pytest.approx([1.048576] * 2)
    assert names["all_reduce, 4 ranks"] == pytest.approx([1.572864] * 2)


class TestCase:
    def test_runs_on_its_ranks(self) -> None:
        case = case_of("task.ranks=4", "task.collective=broadcast", "task.size_mib=10")
        assert case.world_size == 4
        assert case.title == "collectives broadcast 10_MiB 4_ranks"
        assert case.slug == "collectives-fp32-broadcast-10_MiB-4_ranks-cpu"

    def test_what_it_sends_and_holds(self) -> None:
        """1 MiB on four ranks: each sends three quarters twice; a quarter is its own part."""
        case = case_of("task.ranks=4")
        (work,) = case.task.work(case).values()
        assert work.sent_bytes == 1.5 * 2**20
        assert sum(case.task.predicted_memory(case).values()) == 2 * 2**20
        gather = case_of("task.ranks=4", "task.collective=all_gather")
        assert sum(gather.task.predicted_memory(gather).values()) == 1.25 * 2**20

    def test_large_sizes_are_predicted_to_take_longer(self) -> None:
        small, large = case_of(), case_of("task.size_mib=1024")
        assert predicted_seconds(large) > predicted_seconds(small) + 10

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("task.collective=allreduce", "task.collective=allreduce: must be one of all_reduce,"),
            ("task.ranks=1", "task.ranks=1: must be at least 2"),
            ("task.size_mib=0", "task.size_mib=0: must be positive and finite"),
            ("task.size_mib=-1", "task.size_mib=-1: must be positive and finite"),
            ("task.size_mib=inf", "task.size_mib=inf: must be a finite number"),
            ("task.size_mib=0.000001", "task.size_mib=1e-06: holds no element for each of"),
            ("parallel=ddp_naive", "parallel.dp: task=collectives trains nothing; say task.ranks="),
        ],
    )
    def test_bad_input(self, argument: str, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") as error:
            case_of(argument)
        assert "\n" not in str(error.value)


def test_the_command(tmp_path: Path, command: Command) -> None:
    done = command(
        "sweeps=distributed_communication",
        "device=cpu",
        f"results={tmp_path}",
        "task.collective=all_reduce,send_recv",
        "task.size_mib=0.1",
        "task.measure_steps=3",
        environment={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("sweeps/*/tables/distributed_communication.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["collective"] for row in rows] == ["all_reduce", "send_recv"]
    for row in rows:
        assert float(row["wrong_elements"]) == 0
        # 26,214 floats fit into a tenth of a MiB.
        expected = 4 * 26_214 / (float(row["collective_median_ms"]) / 1e3) / 1e9
        assert float(row["algorithm_gb_s"]) == pytest.approx(expected)
    for record in map(json.loads, (p.read_text() for p in tmp_path.glob("records/*.json"))):
        assert [len(rank) for rank in record["phases"]["collective"]["samples_ms"]] == [3, 3]
    assert list(tmp_path.glob("sweeps/*/figures/bus_bandwidth.png"))
