"""Run files that somebody else wrote: wrongly typed, cut short, links, pipes and made-up values."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import submitit
from announced import announced, manifest
from fuzzing import fuzz, with_duplicates
from hypothesis import given
from hypothesis import strategies as st

from harness.commands.cancel import main as cancel_main
from harness.commands.status import look
from harness.commands.status import main as status_main
from harness.run import processes
from harness.run.run_files import read_bytes
from harness.run.run_folder import RunFolder, planning_lock, read_runs
from harness.run.slurm.task import Leader, ShareTask

BAD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 1.5, 1e300, float("nan"), float("inf"), 10**400),
    *("", "\ud800", "--help", "1; rm -rf x", "\x1b[31m", [], [None], [[None]], {}, {"a": 1}),
)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with one local run of two cases, which lives, and its task's state."""
    with announced(tmp_path, ["case-1", "case-2"]):
        kept = {path: path.read_bytes() for path in (tmp_path / "runs").glob("*/*.json")}
        folder = next(iter(kept)).parent
    folder.mkdir()
    for path, content in kept.items():
        path.write_bytes(content)
    return tmp_path


def run_file(results: Path) -> Path:
    (path,) = results.glob("runs/*/run.json")
    return path


def every_path(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of every value inside a JSON document."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(place for key, item in items for place in every_path(item, (*path, key)))]


def put(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[path[0]] = put(copy[path[0]], path[1:], value)
    return copy


def look_and_cancel(results: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What both commands print, neither of which may fail."""
    assert status_main([str(results), "--all"]) == 0
    assert cancel_main([str(results)]) == 0
    said = capsys.readouterr()
    return said.out, said.err


@pytest.fixture(autouse=True)
def nobody_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one of the files believed, this process would get the signal."""
    monkeypatch.setattr(processes.signal, "pidfd_send_signal", lambda fd, number: None)


class TestWrongTypes:
    def test_one_bad_file_is_one_line_and_the_others_are_read(
        self, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        good = run_file(results)
        bad = good.parents[1] / "bad" / "run.json"
        bad.parent.mkdir()
        bad.write_text(json.dumps(json.loads(good.read_text()) | {"id": "bad", "case_ids": 5}))
        assert status_main([str(results)]) == 0
        said = capsys.readouterr()
        assert "case-1" in said.out
        (line,) = said.err.splitlines()
        assert line.startswith(f"attnbench-status: {bad}: set aside: ")
        assert "case_ids" in line

    def test_every_field_with_every_bad_value(
        self, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The file is used or set aside; no command ends by it."""
        path = run_file(results)
        whole = json.loads(path.read_bytes())
        set_aside = 0
        for place in every_path(whole):
            for value in BAD_VALUES:
                path.write_text(json.dumps(put(whole, place, value)), encoding="utf-8")
                set_aside += len(read_runs(results)[1])
                look(results)
        assert set_aside > 300
        look_and_cancel(results, capsys)

    def test_every_field_of_a_state(self, results: Path) -> None:
        path = run_file(results).parent / "state-0.json"
        whole = json.loads(path.read_bytes())
        for place in every_path(whole):
            for value in BAD_VALUES:
                path.write_text(json.dumps(put(whole, place, value)), encoding="utf-8")
                assert [case.case_id for case in look(results).cases] == ["case-1", "case-2"]

    def test_of_a_key_that_stands_twice_the_last_counts(self, results: Path) -> None:
        before = look(results)
        for path in run_file(results).parent.glob("*.json"):
            path.write_text(with_duplicates(json.loads(path.read_bytes())), encoding="utf-8")
        assert look(results).cases == before.cases
        assert len(read_runs(results)[0]) == 1

    @fuzz(100)
    @given(text=st.binary(max_size=200) | st.text('[{"1,:}]', max_size=100).map(str.encode))
    def test_junk(self, text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
        results = tmp_path_factory.mktemp("junk")
        folder = results / "runs" / "junk"
        folder.mkdir(parents=True)
        for name in ("run.json", "state-0.json", "share-0.json"):
            (folder / name).write_bytes(text)
        assert len(read_runs(results)[1]) == 1
        look(results)
        with pytest.raises(ValueError, match="share-0"):
            RunFolder(results, "junk").read_share(0)

    def test_deeply_nested(self, results: Path) -> None:
        for text in ("[" * 100_000, '{"a":' * 100_000, '{"id":' + "[" * 100_000):
            run_file(results).write_text(text, encoding="utf-8")
            assert len(read_runs(results)[1]) == 1

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("case_ids", [["a", "b"], ["c"]]),
            ("case_ids", [["a"]]),
            ("predicted_s", [[1.0]]),
            ("predicted_s", [[1.0, float("nan")]]),
            ("predicted_s", [[1.0, -5.0]]),
            ("jobs", ["1", "2", "3"]),
            ("jobs", ["--help"]),
            ("jobs", ["1; rm"]),
            ("shapes", ["a", "b"]),
            ("created_s", 1e30),
            ("pid", 0),
            ("pid", -1),
            ("pid", 2**40),
        ],
    )
    def test_lists_that_do_not_fit_and_numbers_that_cannot_be(
        self, field: str, value: object, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = run_file(results)
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {field: value}))
        out, err = look_and_cancel(results, capsys)
        assert field in err.partition("set aside: ")[2]
        assert "stopped" not in out


class TestJobIds:
    def test_what_is_no_job_id_never_reaches_scancel(
        self, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        called: list[object] = []
        monkeypatch.setattr("harness.run.slurm.commands._call", lambda *words: called.append(words))
        path = run_file(results)
        for job in ("--help", "1; rm", "-1", "", "1_2_3", "*", "1\n2", "$(id)"):
            path.write_text(json.dumps(json.loads(path.read_bytes()) | {"jobs": [job]}))
            look_and_cancel(results, capsys)
        assert called == []


class TestShares:
    def share(self, results: Path, **changed: Any) -> RunFolder:
        folder = RunFolder(results, "of-slurm")
        folder.path.mkdir(parents=True)
        values = {"schema": 1, "options": {"results": "x"}, "files_before": [], "cases": []}
        (folder.path / "share-0.json").write_text(json.dumps(values | changed))
        return folder

    def test_writes_stay_in_the_folder(self, tmp_path: Path) -> None:
        folder = self.share(tmp_path, options={"results": "/somewhere/else"})
        assert folder.read_share(0)[1].results == tmp_path

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"options": {"results": "x", "speed": 1}}, "speed"),
            ({"options": {"results": "x", "timeout_s": "long"}}, "timeout_s"),
            ({"options": {"results": 5}}, "results"),
            ({"options": []}, "options"),
            ({"cases": [{"no": "case"}]}, "cases"),
            ({"cases": [{}]}, "cases"),
            ({"cases": ["word"]}, "cases"),
            ({"files_before": {}}, "files_before"),
            ({"schema": 2}, "schema 2"),
        ],
    )
    def test_one_line_that_names_file_and_field(
        self, changed: dict[str, Any], named: str, tmp_path: Path
    ) -> None:
        folder = self.share(tmp_path, **changed)
        with pytest.raises(ValueError, match=named) as raised:
            folder.read_share(0)
        assert str(raised.value).startswith(str(folder.path / "share-0.json"))
        assert "\n" not in str(raised.value)


class TestTask:
    """A task of a job array whose files are not what this version reads."""

    def lead(self, results: Path) -> str:
        """The line that the task ends with."""
        folder = RunFolder(results, "of-slurm")
        leader = Leader(ShareTask(str(results), "of-slurm", 0, 1, 1, 30), folder)
        environment = cast(
            submitit.JobEnvironment, SimpleNamespace(job_id="1", hostnames=["n"], num_tasks=1)
        )
        before = signal.getsignal(signal.SIGTERM)
        try:
            with pytest.raises(SystemExit) as ended:
                leader.lead(environment)
        finally:
            signal.signal(signal.SIGTERM, before)
        state = folder.read_state(0)
        assert state is not None
        assert (state.event, f"attnbench: {state.error}") == ("failed", ended.value.code)
        return str(ended.value.code)

    def test_fails_with_one_line(self, tmp_path: Path) -> None:
        TestShares().share(tmp_path, options={"results": "x", "speed": 1})
        line = self.lead(tmp_path)
        assert "share-0.json: options: no option speed in this version" in line
        assert "\n" not in line

    def test_without_a_share(self, tmp_path: Path) -> None:
        RunFolder(tmp_path, "of-slurm").path.mkdir(parents=True)
        assert "share-0.json" in self.lead(tmp_path)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    # The path of a socket may have 107 bytes.
    here = Path.cwd()
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_another_file(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [fifo, bound_socket, folder, loop, link_to_another_file, terminal])
class TestOtherThanRegularFiles:
    def test_is_set_aside(
        self,
        make: Callable[[Path], None],
        results: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        whole = run_file(results).parent
        for name in ("run.json", "state-0.json"):
            path = results / "runs" / f"{name[:3]}-{make.__name__}" / name
            path.parent.mkdir()
            if name != "run.json":
                values = json.loads((whole / "run.json").read_bytes()) | {"id": path.parent.name}
                (path.parent / "run.json").write_text(json.dumps(values))
            make(path)
        assert status_main([str(results)]) == 0
        said = capsys.readouterr()
        assert "case-1" in said.out
        for name in ("run.json", "state-0.json"):
            assert [line for line in said.err.splitlines() if f"{make.__name__}/{name}" in line]

    def test_is_not_read(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        make(tmp_path / "file")
        with pytest.raises(ValueError, match="not a regular file"):
            read_bytes(tmp_path / "file")

    def test_as_the_lock_of_planning(self, make: Callable[[Path], None], tmp_path: Path) -> None:
        (tmp_path / "runs").mkdir()
        make(tmp_path / "runs" / ".lock")
        with pytest.raises(OSError, match=r"lock"), planning_lock(tmp_path):
            pass


def test_a_file_of_ten_gigabytes(results: Path) -> None:
    with run_file(results).open("r+b") as file:
        file.truncate(10 << 30)
    (line,) = read_runs(results)[1]
    assert "10,240 MiB" in line


def test_files_of_before_are_read(results: Path) -> None:
    """Without the fields that were added."""
    path = run_file(results)
    values = json.loads(path.read_bytes())
    del values["process"], values["attempts_before"]
    path.write_text(json.dumps(values))
    state = path.parent / "state-0.json"
    values = json.loads(state.read_bytes())
    del values["since_monotonic_s"]
    state.write_text(json.dumps(values))
    assert read_runs(results)[1] == []
    assert look(results).warnings == []
    assert manifest(results).process is None
