"""Hosts are told apart by more than their names, and one host's records are known as one's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from records import in_rounds, make_record

from harness.analysis.comparison import AXES, compare
from harness.analysis.frame import build_frame
from harness.analysis.machines import Machine, host_labels
from harness.analysis.run_to_run import ASSUMED
from harness.analysis.verdicts import Level
from harness.bench import environment as environments
from harness.cases import format as fmt
from harness.commands import compare as compare_command
from harness.render.table import OTHER_HOST, build_table
from harness.store.record import Record, RecordStore

CPU = {"cpu_model": "Example CPU", "num_cpus": 16}
EIGHT = [f"GPU-{number}" for number in range(8)]


def vm(**facts: Any) -> dict[str, Any]:
    return {"host": "vm", **CPU, **facts}


ONE = vm(boot_id="b1", machine_id="m", gpu_uuid="GPU-0", gpu_uuids=EIGHT)

SAME = {
    "another of its eight GPUs": vm(**{**ONE, "gpu_uuid": "GPU-7"}),
    "booted again": vm(**{**ONE, "boot_id": "b2"}),
    "a container with a name and a GPU of its own": {
        **ONE, "host": "c0ffee", "machine_id": "n", "gpu_uuid": "GPU-9", "gpu_uuids": ["GPU-9"],
    },
    "a record of one of its GPUs alone": vm(gpu_uuid="GPU-3"),
    "a record of a name alone": {"host": "vm"},
    "an older record without a name": dict(CPU),
    "nothing": {},
}  # fmt: skip

OTHER = {
    "GPUs": vm(boot_id="b2", machine_id="m", gpu_uuid="GPU-8", gpu_uuids=["GPU-8"]),
    "a GPU that it does not have": vm(gpu_uuid="GPU-8"),
    "a machine id, on a CPU": vm(boot_id="b2", machine_id="n"),
    "a CPU": vm(boot_id="b2", cpu_model="Other CPU"),
    "a number of CPUs": vm(boot_id="b2", num_cpus=64),
    "a number of CPUs, without a name": {"num_cpus": 64},
    "a name": {**CPU, "host": "node2", "machine_id": "m"},
}


@pytest.mark.parametrize("kind", SAME)
def test_not_another_host(kind: str) -> None:
    one, same = Machine.of(ONE), Machine.of(SAME[kind])
    assert not one.is_other(same)
    assert not same.is_other(one)


@pytest.mark.parametrize("kind", OTHER)
def test_another_host_for_its(kind: str) -> None:
    one, other = Machine.of(ONE), Machine.of(OTHER[kind])
    assert one.is_other(other)
    assert other.is_other(one)


def test_two_records_that_name_one_gpu_each_may_be_of_one_host() -> None:
    """As those from before all GPUs were listed."""
    assert not Machine.of(vm(gpu_uuid="GPU-1")).is_other(Machine.of(vm(gpu_uuid="GPU-2")))


def test_gpus_of_other_ranks_count_where_they_share_the_host() -> None:
    ranks = [{"host": "vm", "gpu_uuid": "GPU-1"}, {"host": "n2", "gpu_uuid": "GPU-2"}]
    assert Machine.of(vm(gpu_uuid="GPU-0", ranks=ranks)).gpus == {"GPU-0", "GPU-1"}


def test_labels() -> None:
    cloud = vm(boot_id="b2", gpu_uuids=["GPU-abcdef"], gpu_uuid="GPU-abcdef")
    cases = [vm(), ONE, cloud, vm(gpu_uuid="GPU-3"), {"host": "laptop"}, {}]
    with_gpu, with_other = "vm with GPU-0", "vm with GPU-abcd"
    expected = [with_gpu, with_gpu, with_other, with_gpu, "laptop", None]
    for order in itertools.permutations(range(len(cases)), len(cases)):
        found = host_labels([Machine.of(cases[place]) for place in order])
        assert found == [expected[place] for place in order]
    assert host_labels([Machine.of(ONE), Machine.of(vm())]) == ["vm", "vm"]
    clones = [Machine.of(vm(boot_id=f"{number}boot", machine_id=f"{number}")) for number in (1, 2)]
    assert host_labels(clones) == ["vm, boot 1boo", "vm, boot 2boo"]


def timed(attention: str, environment: dict[str, Any], scale: float = 1.0) -> Record:
    record = make_record(
        task="attention",
        mode="forward",
        attention=attention,
        samples_ms={"forward": [[10 * scale, 10.001 * scale, 10.002 * scale] * 3]},
    )
    record.environment |= {"cpu_model": None, "num_cpus": None, **environment}
    return in_rounds(record)


def pair(other: dict[str, Any]) -> list[Record]:
    return [timed("naive", ONE), timed("sdpa", other, scale=0.9)]


def test_tables_say_that_rows_are_of_two_hosts() -> None:
    frame = build_frame(pair(OTHER["GPUs"]))
    rows = compare(frame, AXES["attention"])
    assert set(rows["apart_mark"]) == {fmt.TRIANGLE}
    table = build_table("comparison", frame)
    assert table is not None
    assert OTHER_HOST in table.footnotes
    summary = build_table("attention_summary", frame)
    assert summary is not None
    assert summary.footnotes[-1] == (
        "Measured on 2 hosts, whose times may differ: vm with GPU-0 (1 case), "
        "vm with GPU-8 (1 case)."
    )
    frame = build_frame(pair(SAME["another of its eight GPUs"]))
    assert set(compare(frame, AXES["attention"])["apart_mark"]) == {""}
    summary = build_table("attention_summary", frame)
    assert summary is not None
    assert not any("hosts" in note for note in summary.footnotes)


def test_a_calibration_of_one_host_is_none_of_the_other() -> None:
    """Rounds of two hosts took no turns, and one host's level says nothing of two."""
    calm = Level(std_log=0.001, df=30, num_processes=5, num_cases=3)
    for other, turns, word in (
        (SAME["another of its eight GPUs"], True, "FASTER"),
        (OTHER["GPUs"], False, "UNCLEAR"),
    ):
        frame = build_frame(pair(other))
        frame["run_level"] = [calm] * len(frame)
        (row,) = compare(frame, AXES["attention"]).to_dict("records")
        assert (row["in_turns"], row["verdict"]) == (turns, word)
        assert row["level"] == (None if turns else ASSUMED[False])


def test_folders_of_two_machines_are_compared_with_a_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, environment in (("a", ONE), ("b", OTHER["GPUs"])):
        store = RecordStore(tmp_path / name)
        store.create()
        store.write(timed("naive", environment))
    sides = [str(tmp_path / name) for name in ("a", "b")]
    assert compare_command.main([*sides, "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert f"1.000{fmt.TRIANGLE}" in text
    assert OTHER_HOST in text


class TestHere:
    def test_one_host_is_itself(self) -> None:
        found = environments.environment(torch.device("cpu"))
        again = environments.environment(torch.device("cpu"))
        assert Machine.of(found) == Machine.of(again)
        assert found["boot_id"] is None or len(found["boot_id"]) == 12

    def test_digests_and_not_the_ids(self, tmp_path: Path) -> None:
        path = tmp_path / "machine-id"
        assert environments._digest_of(path) is None
        path.write_text("\n")
        assert environments._digest_of(path) is None
        path.write_text("0123\n")
        digest = environments._digest_of(path)
        assert digest is not None
        assert "0123" not in digest

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_this_gpu_is_among_the_hosts(self) -> None:
        found = environments.environment(torch.device("cuda", 0))
        assert found["gpu_uuid"] in found["gpu_uuids"]
