"""A bench that keeps its workers from run to run, with workers stood in for."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_workers import Host, stand_in

from harness.cases.case import Case
from harness.recommend.measuring import Bench
from harness.request.grid import Parts
from harness.terminal import PrintableConsole


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return stand_in(monkeypatch)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(
        results=tmp_path,
        launcher=Parts().choice("launcher", {}),
        budget_s=1,
        timeout_s=60,
        console=PrintableConsole(),
        command="attnbench recommend",
        label="recommend-test",
    )


def case_of(seq_len: int) -> Case:
    point = {"task": "train_step", "model": "tiny", "attention": "sdpa", "seq_len": seq_len}
    return Parts().case(point, "cpu")


def groups(host: Host) -> list[int]:
    """The number of the workers that measured each case."""
    return [number for _, _, number in host.asked]


def test_two_runs_are_served_by_one_group_that_ends_with_them(bench: Bench, host: Host) -> None:
    with bench.warm():
        assert bench.fits(case_of(32))
        assert bench.fits(case_of(64))
        assert host.ended == []
    assert groups(host) == [1, 1]
    assert host.ended == [1]
    (caches,) = host.starts
    assert not Path(caches).exists()


def test_a_bench_that_is_not_warm_ends_its_group_with_each_run(bench: Bench, host: Host) -> None:
    assert bench.fits(case_of(32))
    assert bench.fits(case_of(64))
    assert groups(host) == [1, 2]
    assert host.ended == [1, 2]


@pytest.mark.parametrize("exception", [KeyboardInterrupt, OSError])
def test_none_is_left_after_an_exception(
    exception: type[BaseException], bench: Bench, host: Host
) -> None:
    """Between two runs; what is measured after that has workers of its own, which end as well."""

    def measure() -> None:
        with bench.warm():
            assert bench.fits(case_of(32))
            raise exception

    with pytest.raises(exception):
        measure()
    assert host.ended == [1]
    assert bench.fits(case_of(64))
    assert groups(host) == [1, 2]
    assert host.ended == [1, 2]
