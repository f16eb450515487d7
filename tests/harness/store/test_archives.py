"""Archives: records that were packed are read as if they were files, and none is ever lost."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from records import make_record, write_plan

import harness
from harness.commands.pack import main
from harness.store import archive
from harness.store.heads import read_heads
from harness.store.packing import PackingError, pack, unpack
from harness.store.record import Record, RecordStore
from harness.store.rounds import Rounds, RoundStore

SPEEDS = {"naive": 4.0, "flex": 1.0, "sdpa_flash": 2.0}


def passes(ms: float) -> dict[str, list[list[float]]]:
    return {"step": [[0.9 * ms, ms, 1.3 * ms]]}


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    """Two sweeps that share a case, one case with two attempts, and one that no sweep plans."""
    made = RecordStore(tmp_path / "results")
    made.create()
    records = [make_record(attention=name, samples_ms=passes(ms)) for name, ms in SPEEDS.items()]
    failed = make_record(attention="naive", status="failed", message="the first attempt")
    stray = make_record(attention="flex", seq_len=4096, samples_ms=passes(9.0))
    for record in (failed, *records, stray):
        made.write(record)
    for label, chosen in (("all_of_them", records), ("some", records[:2])):
        write_plan(made.results, label, chosen, tables=[])
    return made


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.json"))}


def archives(store: RecordStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.archives.paths()}


class TestRoundTrip:
    def test_every_byte_comes_back(self, store: RecordStore) -> None:
        before = files(store.folder)
        done = pack(store)
        assert (done.num_records, done.left) == (5, [])
        assert sorted(archives(store)) == ["all_of_them.jsonl.xz", "unplanned.jsonl.xz"]
        assert files(store.folder) == {}
        done = unpack(store)
        assert (done.num_records, done.left) == (5, [])
        assert files(store.folder) == before
        assert not store.archives.folder.exists()

    def test_equal_records_make_equal_bytes(self, store: RecordStore) -> None:
        pack(store)
        first = archives(store)
        unpack(store)
        for path in store.folder.glob("*.json"):
            os.utime(path, (1, 1))
        pack(store)
        assert archives(store) == first
        assert pack(store).archives == []

    def test_an_archive_is_json_lines_in_xz(self, store: RecordStore) -> None:
        before = files(store.folder)
        pack(store)
        packed = (store.archives.folder / "unplanned.jsonl.xz").read_bytes()
        (line,) = lzma.decompress(packed).splitlines()
        held = json.loads(line)
        assert held["record"] == json.loads(before[held["file"]])

    def test_records_of_named_sweeps_alone(self, store: RecordStore) -> None:
        assert pack(store, ["all_of_them"]).num_records == 4
        assert len(files(store.folder)) == 1

    def test_new_fields_and_numbers_that_json_lacks(self, store: RecordStore) -> None:
        record = make_record(attention="flex", seq_len=8192, samples_ms={"step": [[1e-7, 1e9]]})
        record.notes = {"loss": float("nan"), "name": "é\u2028", "big": 2**70}
        path = store.write(record)
        before = path.read_bytes()
        pack(store)
        assert '"NaN"' in before.decode()
        read = store.read(path).notes
        assert {key: str(read[key]) for key in record.notes} == {
            key: str(value) for key, value in record.notes.items()
        }
        unpack(store)
        assert path.read_bytes() == before


class TestReading:
    def test_like_files(self, store: RecordStore) -> None:
        def seen() -> tuple[object, ...]:
            fresh = RecordStore(store.results)
            heads, problems = read_heads(fresh)
            facts = {key: (head.status, head.wall_s) for key, head in heads.items()}
            found = {name: fresh.find(name) for name in heads}
            return fresh.load(), fresh.load_attempts(), list(fresh.names()), facts, problems, found

        before = seen()
        pack(store)
        assert seen() == before

    def test_the_next_attempt_is_a_file_beside_the_archive(self, store: RecordStore) -> None:
        case_id = make_record(attention="naive").case_id
        pack(store)
        assert store.attempts(case_id) == [1, 2]
        again = make_record(attention="naive", samples_ms=passes(3.0))
        path = store.write(again)
        assert (again.attempt, list(files(store.folder))) == (3, [f"{case_id}.3.json"])
        assert store.find(case_id) == again
        assert store.load()[0][case_id] == again
        assert store.place(case_id, 3) == path
        assert store.place(case_id, 1).name == "all_of_them.jsonl.xz"
        pack(store)
        assert store.attempts(case_id) == [1, 2, 3]
        assert store.find(case_id) == again
        assert store.load_attempts()[0][case_id, 1].status == "failed"

    def test_a_case_stays_in_its_archive_whatever_is_planned_later(
        self, store: RecordStore
    ) -> None:
        pack(store)
        stray = make_record(attention="flex", seq_len=4096, samples_ms=passes(8.0))
        write_plan(store.results, "a_new_sweep", [stray], tables=[])
        store.write(stray)
        pack(store)
        assert sorted(archives(store)) == ["all_of_them.jsonl.xz", "unplanned.jsonl.xz"]

    def test_another_process_packs_meanwhile(self, store: RecordStore) -> None:
        """Names that were listed as files are read from the archive where they went."""
        listed = store.names()
        pack(RecordStore(store.results))
        read = [store.read_as(name, Record, text)[0] for name, text in listed.items()]
        assert len(read) == 5

    def test_rounds_of_an_archived_record_are_removed(self, store: RecordStore) -> None:
        rounds = RoundStore(store)
        case_id = make_record(attention="flex").case_id
        kept = Rounds(case_id=case_id, num_rounds=2, conditions={})
        rounds.keep(kept)
        (path,) = rounds.folder.iterdir()
        assert path.name == f"{case_id}.2.json"
        path.rename(rounds.folder / f"{case_id}.json")
        rounds.keep(kept)
        pack(store)
        rounds.tidy()
        assert [path.name for path in rounds.folder.iterdir()] == [f"{case_id}.2.json"]
        assert rounds.find(case_id) == kept

    def test_decompressed_once(self, store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
        pack(store)
        calls: list[int] = []
        plain = lzma.decompress
        monkeypatch.setattr(lzma, "decompress", lambda data: calls.append(1) or plain(data))
        store.load()
        first = len(calls)
        for _ in range(3):
            RecordStore(store.results).load()
        assert len(calls) == first


class TestBrokenArchives:
    @pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "other lines"])
    def test_one_line_and_its_own_records_alone(
        self, store: RecordStore, damage: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        pack(store)
        path = store.archives.folder / "unplanned.jsonl.xz"
        data = path.read_bytes()
        broken = {
            "truncated": data[:-20],
            "garbage": b"<<<<<<< HEAD\n",
            "empty": b"",
            "other lines": lzma.compress(b'{"case_id": 1}\n'),
        }
        path.write_bytes(broken[damage])
        for found, problems in (store.load(), read_heads(store)):
            assert len(found) == 3
            (problem,) = problems
            assert problem.startswith(f"{path}: not a readable archive (")
        store.write(make_record(attention="flex", seq_len=4096, samples_ms=passes(7.0)))
        assert main([str(store.results)]) == 2
        assert f"attnbench-pack: {path}: not a readable archive" in capsys.readouterr().err
        assert path.read_bytes() == broken[damage]
        path.write_bytes(data)
        assert len(store.load()[0]) == 4

    def test_the_unreadable_and_the_different_stay_files(
        self, store: RecordStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        case_id = make_record(attention="flex").case_id
        archived = store.path(case_id, 1).read_bytes()
        pack(store)
        store.path(case_id, 1).write_bytes(archived.replace(b"0.9", b"0.8"))
        (store.folder / "half.json").write_bytes(archived[:100])
        (store.folder / "laid_out.json").write_bytes(archived.replace(b"\n ", b"\n  "))
        before = files(store.folder)
        assert main([str(store.results)]) == 1
        said = capsys.readouterr()
        assert files(store.folder) == before
        assert len(said.err.splitlines()) == 3
        assert "another record than the archived one; it stays a file" in said.err
        assert f"renamed to {store.path(case_id, 2).name}, it is a further attempt" in said.err
        assert "no record to pack" in said.out
        assert main([str(store.results), "--unpack"]) == 1
        assert files(store.folder).items() >= before.items()
        assert (store.archives.folder / "all_of_them.jsonl.xz").exists()

    def test_names_that_lead_elsewhere_are_no_files(self, store: RecordStore) -> None:
        text = archive.compact(next(iter(files(store.folder).values())))
        store.archives.folder.mkdir()
        path = store.archives.folder / "strange.jsonl.xz"
        path.write_bytes(archive.to_bytes({"../../outside.json": text}))
        assert len(store.load_attempts()[0]) == 5
        with pytest.raises(PackingError, match=r"outside.json is no record's file"):
            unpack(store)
        assert not (store.results.parent / "outside.json").exists()


CLAIM = """
import sys
from pathlib import Path
from harness.store.record import RecordStore
with RecordStore(Path(sys.argv[1])).claim(sys.argv[2], wait=False) as held:
    print(held, flush=True)
    sys.stdin.read()
"""


def test_refuses_while_a_run_holds_a_case(
    store: RecordStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(store.folder)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(store.results), make_record().case_id],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"True\n"
        for arguments in ([], ["--unpack"]):
            assert main([str(store.results), *arguments]) == 2
            assert "a run measures into it" in capsys.readouterr().err
        assert files(store.folder) == before
        assert archives(store) == {}
        other.communicate()
    assert main([str(store.results)]) == 0
    assert capsys.readouterr().out.startswith("5 records packed into 2 archives of 0.00 MB in ")


KILLED = """
import os, sys
from pathlib import Path
from harness.store import packing
from harness.store.record import RecordStore

left = int(sys.argv[2])

def dying(plain):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return plain(*arguments, **options)
    return call

for name in ("replace", "link", "unlink", "fsync", "chmod", "rmdir"):
    setattr(os, name, dying(getattr(os, name)))
getattr(packing, sys.argv[3])(RecordStore(Path(sys.argv[1])))
"""


@pytest.mark.parametrize("action", ["pack", "unpack"])
def test_killed_at_any_step(store: RecordStore, action: str) -> None:
    """Before each change of the disk: every record is there, and the next command finishes."""
    before = files(store.folder)
    records = store.load_attempts()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    steps = 0
    while True:
        unpack(store)
        assert files(store.folder) == before
        if action == "unpack":
            pack(store)
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(store.results), str(steps), action],
            env=environment,
            check=False,
        )
        assert RecordStore(store.results).load_attempts() == records
        pack(store)
        assert store.load_attempts() == records
        assert files(store.folder) == {}
        assert [path.suffix for path in store.archives.folder.iterdir()] == [".xz", ".xz"]
        if done.returncode == 0:
            break
        assert done.returncode == 9
        steps += 1
    assert steps > 10


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        {
            "no folder": (["{results}/none"], "RESULTS={results}/none: no such folder"),
            "no results": (["{results}/sweeps"], "without records"),
            "a file": ([__file__], f"RESULTS={__file__}: is a file; must be a folder"),
            "no sweep": (["{results}", "other"], "SWEEP=other: not in {results}; one of all_of"),
            "mistyped sweep": (["{results}", "sme"], "sme: not in {results} (did you mean some?)"),
            "both": (["{results}", "some", "--unpack"], "--unpack: makes all records files again"),
        }.values(),
    )
    def test_mistakes(
        self,
        store: RecordStore,
        arguments: list[str],
        says: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert main([item.format(results=store.results) for item in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says.format(results=store.results) in line


class TestLoad:
    def test_a_folder_is_a_frame(self, store: RecordStore) -> None:
        frame = harness.load(store.results)
        pack(store)
        assert harness.load(str(store.results)).equals(frame)
        step = frame[frame["phase"] == "step"].set_index(["attention", "seq_len"])
        medians = {key: value for key, value in step["median_ms"].items() if value == value}
        assert medians == {(name, 512): ms for name, ms in SPEEDS.items()} | {("flex", 4096): 9.0}

    def test_of_one_sweep_in_its_order(self, store: RecordStore) -> None:
        frame = harness.load(store.results, sweep="some")
        assert list(dict.fromkeys(frame["attention"])) == ["naive", "flex"]

    def test_says_what_is_wrong(self, store: RecordStore) -> None:
        with pytest.raises(ValueError, match=r"sweep=none: not in .*; one of all_of_them, some"):
            harness.load(store.results, sweep="none")
        with pytest.raises(ValueError, match=r"nowhere: no such folder"):
            harness.load("nowhere")
        next(store.folder.glob("*.json")).write_text("{")
        with pytest.warns(UserWarning, match="not a readable record"):
            harness.load(store.results)

    def test_importing_harness_imports_no_library(self) -> None:
        code = "import harness, sys; print({'pandas', 'torch', 'msgspec'} & set(sys.modules))"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout == "set()\n"
