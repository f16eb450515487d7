"""Results folders from someone else: one bad file costs itself, is named in one line, and waits."""

from __future__ import annotations

import json
import lzma
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from mutations import examples
from records import make_record, write_plan

from harness.cases.case import Case
from harness.cases.recorded import load
from harness.commands import report, status
from harness.store import archive
from harness.store.heads import read_heads
from harness.store.packing import PackingError, pack, unpack
from harness.store.record import Record, RecordError, RecordStore
from harness.store.regular import read_regular
from harness.store.rounds import RoundStore
from harness.store.sweep_plan import PlanError, planned_labels, read_plan

SAMPLES = {"step": [[1.0, 1.1, 0.9]]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordStore:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = RecordStore(tmp_path / "results")
    made.create()
    return made


def two(store: RecordStore) -> tuple[Record, Record]:
    """Two recorded cases, and a plan of both."""
    records = [make_record(attention=name, samples_ms=SAMPLES) for name in ("naive", "sdpa")]
    for record in records:
        store.write(record)
    write_plan(store.results, "all", records, tables=["summary"])
    return records[0], records[1]


def seen(results: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code of the report, and what report and status print to stdout and stderr."""
    code = report.main([str(results)])
    assert status.main([str(results)]) == 0
    return code, *capsys.readouterr()


class TestNames:
    def test_a_record_under_the_name_of_another_case(
        self, store: RecordStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = two(store)
        path = store.path(first.case_id, 1)
        planted = store.path(second.case_id, 1).read_bytes()
        path.write_bytes(planted)
        records, problems = store.load()
        assert list(records) == [second.case_id]
        (line,) = problems
        assert str(path) in line
        assert second.case_id in line
        assert "move it away" in line
        assert store.find(first.case_id) is None
        assert list(read_heads(store)[0]) == [second.case_id]
        assert "1 missing" in seen(store.results, capsys)[1]
        # Measured as if it were not there, beside it.
        assert store.write(first) == store.path(first.case_id, 2)
        assert store.find(first.case_id) == first
        assert path.read_bytes() == planted

    def test_a_record_whose_case_is_another(self, store: RecordStore) -> None:
        values = examples()[0]
        case = Case.from_dict(values["case"])
        record = Record.from_json(json.dumps(values | {"attempt": 1}))
        record.case = case.to_dict() | {"seed": case.seed + 1}
        path = store.write(record)
        records, problems = load(store)
        assert not records
        assert "its case is that of" in problems[0]
        assert str(path) in problems[0]
        assert store.find(case.id) is None, "the runner measures it"
        assert store.write(Record.from_json(json.dumps(values))).name == f"{case.id}.2.json"

    def test_a_copy_as_a_later_attempt_counts_as_that(self, store: RecordStore) -> None:
        first, _ = two(store)
        path = store.path(first.case_id, 1)
        store.path(first.case_id, 5).write_bytes(path.read_bytes())
        assert store.load()[0][first.case_id].attempt == 5


class TestOtherThanFiles:
    @pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "dangling", "loop", "device"])
    @pytest.mark.parametrize("place", ["records", "archive", "rounds", "plan"])
    def test_are_not_opened(
        self,
        store: RecordStore,
        kind: str,
        place: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first, _ = two(store)
        case_id = "train_step-odd-0123456789"
        path = {
            "records": store.path(case_id, 1),
            "archive": store.archives.folder / "odd.jsonl.xz",
            "rounds": store.results / "rounds" / f"{case_id}.json",
            "plan": store.results / "sweeps" / "odd" / "plan.json",
        }[place]
        path.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.chdir(path.parent)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "socket":
            # Relative, since a socket's path is short.
            socket.socket(socket.AF_UNIX).bind(path.name)
        elif kind == "folder":
            path.mkdir()
        elif kind == "dangling":
            path.symlink_to("nowhere")
        elif kind == "loop":
            path.symlink_to(path.name)
        else:
            path.symlink_to("/dev/zero")
        _, out, err = seen(store.results, capsys)
        assert "2 ok" in out
        assert "Traceback" not in err
        if place == "rounds":
            if kind == "dangling":
                assert RoundStore(store).find(case_id) is None
            else:
                with pytest.raises(ValueError, match=r"^[^\n]+$"):
                    RoundStore(store).find(case_id)
            return
        lines = [line for line in err.splitlines() if str(path) in line]
        assert lines
        assert all(line.count("attnbench") == 1 for line in lines)
        assert first.case_id in store.load()[0]

    def test_one_that_takes_a_files_place_meanwhile_is_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the look at it and its opening."""
        (tmp_path / "file").touch()
        (tmp_path / "fifo").touch()
        os.mkfifo(tmp_path / "other")
        look = os.stat

        def replaced(path: Any, **more: Any) -> os.stat_result:
            found = look(path, **more)
            if str(path) == str(tmp_path / "fifo"):
                (tmp_path / "other").replace(path)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", replaced)
            assert read_regular(tmp_path / "file")[0] == b""
            with pytest.raises(OSError, match="a FIFO, not a regular file"):
                read_regular(tmp_path / "fifo")

    def test_a_file_of_a_size_that_no_record_has(self, store: RecordStore) -> None:
        first, _ = two(store)
        path = store.path("train_step-odd-0123456789", 1)
        with path.open("wb") as file:
            file.truncate(500 * 2**20)
        records, problems = store.load()
        assert first.case_id in records
        assert "500 MiB, and at most 128 are read" in problems[0]


BYTES = {
    "not Unicode": b'{"case_id": "\xff"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "deep": b'{"case_id": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep notes": b'{"notes": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
    "long number": b'{"wall_s": ' + b"9" * 6000 + b"}",
    "empty": b"",
    "zeros": b"\0" * 1000,
    "a list": b"[]",
    "a word": b'"NaN"',
}


@pytest.mark.parametrize("data", BYTES.values(), ids=BYTES)
def test_bytes_that_are_no_record_or_plan(
    store: RecordStore, data: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    two(store)
    path = store.path("train_step-odd-0123456789", 1)
    path.write_bytes(data)
    plan = store.results / "sweeps" / "odd" / "plan.json"
    plan.parent.mkdir()
    plan.write_bytes(data)
    code, out, err = seen(store.results, capsys)
    assert code == 2
    assert "2 ok" in out
    assert f"{path}: not a readable record" in err
    assert f"{plan}: not a readable plan" in err
    assert "Traceback" not in err


class TestArchives:
    LINE = b'{"file":"a-0123456789.json","record":{"a":1}}\n'

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            (lzma.compress(LINE)[:-30], "it ends in the middle"),
            (b"PK\x03\x04" * 10, "Input format not supported"),
            (lzma.compress(b"\0" * (16 * 2**20), preset=0), "a record of over 1 MiB"),
            (lzma.compress(b"\0" * 2**19, preset=0), "not lines of records"),
            (lzma.compress(b'{"file":"' + b"a" * (6 * 2**20), preset=0), "a record of over 1 MiB"),
            (lzma.compress(LINE * 2), "line 2 is a second a-0123456789.json"),
        ],
        ids=["truncated", "not xz", "bomb of zeros", "zeros", "long line", "twice"],
    )
    def test_cost_their_own_records_alone(
        self, store: RecordStore, data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
        first, _ = two(store)
        store.archives.folder.mkdir()
        path = store.archives.folder / "odd.jsonl.xz"
        path.write_bytes(data)
        records, problems = store.load()
        assert first.case_id in records
        (line,) = problems
        assert line.startswith(f"{path}: not a readable archive ({reason}")
        assert "\n" not in line
        with pytest.raises(PackingError):
            pack(store)

    def test_more_records_than_memory_holds(
        self, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 1000)
        records = {f"a-{number:010x}.json": b'{"a":1}' for number in range(100)}
        with pytest.raises(ValueError, match="over 0 MiB of records"):
            archive.from_bytes(archive.to_bytes(records))

    def test_many_archives_of_more_than_memory_holds(
        self, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each is small enough: those behind the limit cost their records alone."""
        monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 1000)
        store.archives.folder.mkdir()
        for number in range(5):
            names = [f"a-{10 * number + index:010x}.json" for index in range(10)]
            data = archive.to_bytes(dict.fromkeys(names, b'{"a":1}'))
            (store.archives.folder / f"{number}{archive.SUFFIX}").write_bytes(data)
        problems = store.archives.problems()
        assert sum(map(len, store.archives.records().values())) < 1000
        assert len(problems) > 0
        assert all("over 0 MiB of records with the archives before it" in it for it in problems)
        held = [store.archives.holder(f"a-{10 * number:010x}.json") for number in range(5)]
        assert held.count(None) == len(problems)

    @pytest.mark.parametrize(
        "text",
        [
            b"{nope}",
            b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
            b'{"a":' + b"9" * 5000 + b"}",
        ],
        ids=["no JSON", "deep", "long number"],
    )
    def test_one_record_that_cannot_be_unpacked(self, text: bytes, store: RecordStore) -> None:
        first, second = two(store)
        pack(store)
        (path,) = store.archives.paths()
        strange = {"strange-0123456789.json": text, f"{'x' * 300}.json": b"{}"}
        path.write_bytes(archive.to_bytes(archive.read(path) | strange))
        unpacked = unpack(RecordStore(store.results))
        assert unpacked.num_records == 2
        assert all(store.path(case_id, 1).exists() for case_id in (first.case_id, second.case_id))
        assert sorted(line[:8] for line in unpacked.left) == ["strange-", "xxxxxxxx"]
        assert all(line.endswith(f"{path}, which stays") for line in unpacked.left)
        assert path.exists()

    def test_names_outside_the_folder(self, store: RecordStore) -> None:
        two(store)
        pack(store)
        (path,) = store.archives.paths()
        records = archive.read(path)
        name, text = next(iter(records.items()))
        outside = ["../../escaped-0123456789.json", "/tmp/escaped-0123456789.json", "x/y.json"]
        path.write_bytes(archive.to_bytes({**records, **dict.fromkeys(outside, text)}))
        fresh = RecordStore(store.results)
        assert name in fresh.names()
        assert not set(outside) & set(fresh.names())
        with pytest.raises(PackingError, match="no record's file"):
            unpack(fresh)
        assert not [*store.results.parent.rglob("escaped*")]


class TestNumbersAndText:
    def test_numbers_that_json_lacks_are_words_every_parser_reads(self, store: RecordStore) -> None:
        record = make_record(samples_ms=SAMPLES, status="wrong", message="NaN")
        record.check = {"errors": {"o": float("inf"), "dq": float("nan")}, "tolerance": 0.1}
        record.notes = {"loss": float("-inf")}
        path = store.write(record)
        plain = json.loads(path.read_bytes(), parse_constant=pytest.fail)
        assert plain["check"]["errors"] == {"o": "Infinity", "dq": "NaN"}
        found = store.read(path)
        assert found.check is not None
        assert found.check["errors"]["o"] == float("inf")
        assert found.check["errors"]["dq"] != found.check["errors"]["dq"]
        assert found.notes["loss"] == float("-inf")
        assert found.error == {"message": "NaN"}, "words stay words"

    def test_older_records_with_bare_nan_and_infinity(self, store: RecordStore) -> None:
        record = make_record(samples_ms=SAMPLES)
        path = store.write(record)
        text = path.read_text(encoding="utf-8").replace('"check": null', '"check": {"errors": ')
        text = text.replace('{"errors": ', '{"errors": {"o": Infinity, "dq": NaN}}')
        path.write_text(text, encoding="utf-8")
        found = store.read(path).check
        assert found is not None
        assert found["errors"]["o"] == float("inf")

    def test_a_lone_surrogate_of_an_older_record(
        self, store: RecordStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        first, second = two(store)
        record = make_record(attention="flex", status="failed", message="bad \udc80 byte")
        path = store.write(record)
        assert "\\udc80" not in path.read_text(encoding="utf-8")
        values = json.loads(path.read_bytes()) | {"error": {"message": "old \udc80 byte"}}
        path.write_text(json.dumps(values), encoding="utf-8")
        write_plan(store.results, "all", [first, second, record], tables=["summary"])
        code, out, err = seen(store.results, capsys)
        assert (code, err) == (0, "")
        assert "old \ufffd byte" in out
        text = (store.results / "sweeps/all/report.md").read_text(encoding="utf-8")
        assert "old \ufffd byte" in text

    def test_what_cannot_be_read_back_is_recorded_as_a_failure(self, store: RecordStore) -> None:
        record = make_record(samples_ms={"step": [[1.0, float("nan")]]})
        found = store.read(store.write(record))
        assert found.status == "failed"
        assert found.error is not None
        assert "cannot be kept" in found.error["message"]


OPEN_TO_RECORDS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"memory": [{"source": "rss", "peak_rss_bytes": "much"}]}, "peak_rss_bytes"),
    ({"work": {"step": {"flops": None, "bytes": None, "tokens": 1}}}, "flops"),
    ({"environment": {"libraries": 5}}, "libraries"),
    ({"environment": {"device_name": ["x"]}}, "device_name"),
    ({"notes": {"loss": "low"}}, "loss"),
    ({"notes": {"traffic": [[{"bytes": 1}]]}}, "calls"),
    ({"check": {"errors": {"o": "x"}, "tolerance": 1.0}}, "errors"),
    ({"compilation": {"compile_s": []}}, "compile_s"),
    ({"device_state": [{"before": 5, "after": {}}]}, "before"),
    ({"error": {"message": 7}}, "message"),
    (
        {"round_states": [{"started_at": "x", "process": 0, "ranks": [{"load": 3}]}]},
        "load",
    ),
)
"""Fields whose types a record's own leave open, and that tables, figures or commands read."""


@pytest.mark.parametrize(
    ("fields", "name"), OPEN_TO_RECORDS, ids=[name for _, name in OPEN_TO_RECORDS]
)
def test_what_readers_look_at_has_its_type_or_the_file_is_set_aside(
    store: RecordStore, fields: dict[str, Any], name: str
) -> None:
    path = store.write(make_record(samples_ms=SAMPLES))
    assert store.load()[1] == []
    path.write_text(json.dumps(json.loads(path.read_bytes()) | fields), encoding="utf-8")
    records, problems = store.load()
    assert not records
    (line,) = problems
    assert f"{path}: not a readable record (" in line
    assert name in line.removeprefix(str(path))


@pytest.mark.parametrize("option", [{"a": {"b": 1}}, [[1]], [{"a": 1}]])
def test_a_case_with_an_option_that_is_not_simple_is_set_aside(
    store: RecordStore, option: Any
) -> None:
    path = store.write(make_record(samples_ms=SAMPLES))
    values = json.loads(path.read_bytes())
    values["case"]["attention"]["option"] = option
    path.write_text(json.dumps(values), encoding="utf-8")
    records, problems = store.load()
    assert not records
    (line,) = problems
    assert "$.case" in line


def test_a_plan_names_its_own_folder_and_tables(store: RecordStore) -> None:
    two(store)
    path = store.results / "sweeps/all/plan.json"
    values = json.loads(path.read_bytes())
    for change in ({"label": "../../escaped"}, {"tables": ["../../escaped"]}, {"label": "other"}):
        path.write_text(json.dumps(values | change), encoding="utf-8")
        with pytest.raises(PlanError, match=r"^[^\n]+not a readable plan[^\n]+$"):
            read_plan(store.results, "all")
    assert planned_labels(store.results) == ["all"]


def test_a_record_error_is_one_printable_line(store: RecordStore) -> None:
    with pytest.raises(RecordError) as raised:
        store.read(store.folder / "a\x1b[2J\nb.json")
    assert str(raised.value).isprintable()
