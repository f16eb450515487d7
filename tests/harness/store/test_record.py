"""Records: written once, whole or not at all, found again, and shared between processes."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from records import make_record

from harness.statuses import STATUSES
from harness.store.heads import read_heads
from harness.store.record import Phase, Record, RecordError, RecordStore

TESTS = Path(__file__).parents[2] / "support"


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    made = RecordStore(tmp_path / "results")
    made.create()
    return made


def contents(store: RecordStore) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder.iterdir()}


class TestWriting:
    def test_what_was_written_is_read(self, store: RecordStore) -> None:
        record = make_record(samples_ms={"step": [[1.5, 2.25], [3.0, 0.1]]}, dp=2)
        path = store.write(record)
        assert path == store.folder / f"{record.case_id}.json"
        assert store.read(path) == record
        assert store.find(record.case_id) == record

    def test_never_over_an_existing_file(self, store: RecordStore) -> None:
        paths = [store.write(make_record(status="failed", message=str(i))) for i in range(3)]
        stem = paths[0].name.removesuffix(".json")
        assert [path.name for path in paths] == [f"{stem}.json", f"{stem}.2.json", f"{stem}.3.json"]
        messages = [store.read(path).error for path in paths]
        assert messages == [{"message": "0"}, {"message": "1"}, {"message": "2"}]
        assert [store.read(path).attempt for path in paths] == [1, 2, 3]

    def test_not_even_one_that_appears_meanwhile(
        self, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another process links its record between our look and our link."""
        record = make_record()
        first = store.write(make_record(status="failed"))
        before = contents(store)
        monkeypatch.setattr(store, "attempts", lambda case_id: [])
        path = store.write(record)
        assert path.name == f"{record.case_id}.2.json"
        assert store.read(path).attempt == 2
        assert contents(store) == {**before, path.name: path.read_bytes()}
        assert first.read_bytes() == before[first.name]

    def test_nothing_but_whole_records_is_ever_there(
        self, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """When a file gets its name it is complete; the file that it was written to goes."""
        seen = []
        link = os.link

        def watched(source: str, target: Path) -> None:
            assert not Path(target).exists()
            seen.append(Record.from_json(Path(source).read_text(encoding="utf-8")))
            link(source, target)

        monkeypatch.setattr(os, "link", watched)
        record = make_record()
        store.write(record)
        assert seen == [record]
        assert list(contents(store)) == [f"{record.case_id}.json"]

    def test_readable_by_others(self, store: RecordStore) -> None:
        assert store.write(make_record()).stat().st_mode & 0o777 == 0o644


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_space(*arguments: Any, **keywords: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "link", no_space)

    @pytest.mark.usefixtures("full")
    def test_the_record_is_kept_elsewhere(
        self, tmp_path: Path, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        monkeypatch.setenv("XDG_STATE_HOME", str(elsewhere))
        record = make_record(samples_ms={"step": [[1.0]]})
        with pytest.raises(OSError, match="No space left on device") as raised:
            store.write(record)
        (rescued,) = elsewhere.rglob("*.json")
        assert str(rescued) in str(raised.value)
        assert str(store.folder) in str(raised.value)
        assert "\n" not in str(raised.value)
        assert Record.from_json(rescued.read_text(encoding="utf-8")) == record
        assert contents(store) == {}

    def test_old_records_stay_as_they_are(
        self, tmp_path: Path, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.write(make_record())
        before = contents(store)

        def no_space(fd: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        monkeypatch.setattr(tempfile, "mkstemp", no_space_for_temporary_files)
        with pytest.raises(OSError, match="no other place took it either"):
            store.write(make_record())
        assert contents(store) == before
        monkeypatch.undo()
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(os, "fsync", no_space)
        with pytest.raises(OSError, match="it is kept as"):
            store.write(make_record())
        assert contents(store) == before


def no_space_for_temporary_files(**keywords: Any) -> tuple[int, str]:
    raise OSError(errno.ENOSPC, "No space left on device")


BROKEN = {
    "empty": "",
    "cut short": make_record().to_json()[:300],
    "not JSON": "measured: yes",
    "another JSON": "[1, 2, 3]",
    "a number": "7",
    "a field missing": json.dumps({"schema": 1, "status": "ok"}),
    "another schema": make_record().to_json().replace('"schema": 1', '"schema": 2'),
    "another status": make_record().to_json().replace('"status": "ok"', '"status": "fine"'),
    "not text": "\udcff\udcfe",
    "without its schema": make_record().to_json().replace(',\n "schema": 1', ""),
    "without its notes": make_record().to_json().replace(' "notes": {},\n', ""),
    "with NaN, without its notes": make_record(wall_s=float("nan"))
    .to_json()
    .replace(' "notes": {},\n', ""),
    "too deep": '{"case": ' + 100_000 * "[" + 100_000 * "]" + "}",
}


class TestReading:
    @pytest.mark.parametrize("kind", BROKEN)
    def test_what_is_no_record_is_named(self, kind: str, store: RecordStore) -> None:
        good = make_record(attention="sdpa_flash")
        store.write(good)
        path = store.folder / "some-case-0123456789.json"
        path.write_bytes(BROKEN[kind].encode("utf-8", "surrogateescape"))
        with pytest.raises(RecordError, match="not a readable record") as raised:
            store.read(path)
        assert str(path) in str(raised.value)
        before = contents(store)
        records, problems = store.load()
        assert records == {good.case_id: good}
        assert problems == [str(raised.value)]
        assert "\n" not in problems[0]
        assert contents(store) == before

    @pytest.mark.parametrize("kind", ["another schema", "another status", "too deep"])
    def test_nor_has_it_a_head(self, kind: str, store: RecordStore) -> None:
        store.folder.joinpath("some-case-0123456789.json").write_text(BROKEN[kind])
        heads, (problem,) = read_heads(store)
        assert heads == {}
        assert "not a readable record" in problem
        assert "\n" not in problem

    def test_an_unreadable_attempt_does_not_hide_an_older_one(self, store: RecordStore) -> None:
        first, second = make_record(seed=1), make_record(seed=1, status="failed")
        store.write(first)
        path = store.write(second)
        path.write_text("{", encoding="utf-8")
        records, problems = store.load()
        assert records == {first.case_id: first}
        assert len(problems) == 1
        assert store.find(first.case_id) == first
        assert store.write(make_record(seed=1)).name.endswith(".3.json")

    def test_the_newest_attempt_counts(self, store: RecordStore) -> None:
        """Also where a tenth sorts before a second by name."""
        for number in range(1, 11):
            store.write(make_record(status="failed", message=str(number)))
        last = store.find(make_record().case_id)
        assert last is not None
        assert last.error == {"message": "10"}
        assert store.load()[0][last.case_id] == last

    def test_ids_that_begin_alike(self, store: RecordStore) -> None:
        short, long = make_record(), make_record()
        short.case_id, long.case_id = "a-case-1", "a-case-12"
        store.write(long)
        assert store.find("a-case-1") is None
        assert store.attempts("a-case-1") == []
        assert store.write(short).name == "a-case-1.json"
        odd = make_record()
        odd.case_id = "a[b]*c-1"
        assert store.write(odd).name == "a[b]*c-1.json"
        assert store.attempts("a[b]*c-1") == [1]

    def test_ids_with_dots(self, store: RecordStore) -> None:
        """The 2.7B model's."""
        record = make_record()
        record.case_id = "train_step-2.7B-naive-0123456789"
        store.write(record)
        store.write(record)
        assert store.attempts(record.case_id) == [1, 2]
        assert list(store.load()[0]) == [record.case_id]

    def test_while_tasks_write(self, store: RecordStore) -> None:
        """Readers see whole records only, and each one that they have seen stays."""
        code = (
            "import sys; from pathlib import Path; from records import make_record;"
            "from harness.store.record import RecordStore; store = RecordStore(Path(sys.argv[1]));"
            "samples = {'step': [[1.25] * 2000]};"
            "[store.write(make_record(seed=seed, samples_ms=samples)) for seed in range(80)]"
        )
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
        writers = [
            subprocess.Popen([sys.executable, "-c", code, store.results], env=environment)
            for _ in range(2)
        ]
        seen: set[tuple[str, int]] = set()
        reads = 0
        while any(writer.poll() is None for writer in writers):
            found, problems = store.load_attempts()
            assert problems == []
            assert seen <= set(found)
            reads += len(found) > len(seen)
            seen = set(found)
        assert [writer.returncode for writer in writers] == [0, 0]
        assert reads > 1, "nothing was read while it was being written"
        # Two tasks that measured the same cases leave two attempts of each.
        found, problems = store.load_attempts()
        assert problems == []
        assert sorted(number for _, number in found) == [1] * 80 + [2] * 80
        assert len(store.load()[0]) == 80

    def test_many_are_read_without_a_look_for_garbage(
        self, store: RecordStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It would take longer than reading, and none of it is garbage."""
        for seq_len in (64, 128):
            store.write(make_record(seq_len=seq_len))
        looks_for_garbage: list[bool] = []
        read_as = store.read_as

        def watched(*arguments: Any) -> Any:
            looks_for_garbage.append(gc.isenabled())
            return read_as(*arguments)

        monkeypatch.setattr(store, "read_as", watched)
        store.load_attempts()
        assert looks_for_garbage == [False, False]
        assert gc.isenabled()

    def test_other_files_are_left_alone(self, store: RecordStore) -> None:
        (store.folder / "abc.tmp").write_text("half a rec", encoding="utf-8")
        (store.folder / ".lock").touch()
        assert store.load() == ({}, [])

    def test_no_folder_yet(self, tmp_path: Path) -> None:
        store = RecordStore(tmp_path / "nowhere")
        assert store.load() == ({}, [])
        assert store.find("anything-0") is None
        assert not store.results.exists()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
free = st.dictionaries(st.text(max_size=8).map("free {}".format), json_values, max_size=3)
"""Fields that nothing of the project reads, and that may hold anything."""
amounts = st.floats(min_value=0, max_value=1e10)


@st.composite
def phases(draw: st.DrawFn) -> dict[str, Phase]:
    num_ranks, num_samples = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    ranks = st.lists(
        st.lists(amounts, min_size=num_samples, max_size=num_samples),
        min_size=num_ranks,
        max_size=num_ranks,
    )
    clocks = st.sampled_from(["host", "cuda_event"])
    made = st.builds(Phase, clock=clocks, samples_ms=ranks)
    return draw(st.dictionaries(st.text(max_size=8), made, max_size=3))


@given(
    record=st.builds(
        Record,
        case_id=st.text(min_size=1),
        case=st.just(make_record().case),
        status=st.sampled_from(STATUSES),
        error=st.none() | free,
        phases=phases(),
        rounds=st.lists(st.integers(min_value=0, max_value=9), max_size=3),
        memory=st.lists(free, max_size=2),
        work=st.dictionaries(
            st.text(max_size=8), st.fixed_dictionaries({"flops": amounts}), max_size=2
        ),
        check=st.none()
        | st.fixed_dictionaries(
            {"errors": st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False))}
        ),
        notes=free,
        environment=free,
        wall_s=amounts,
        attempt=st.integers(min_value=1, max_value=9),
    )
)
def test_json_round_trip(record: Record) -> None:
    """Every sample to the last bit, infinities and all of Unicode."""
    text = record.to_json()
    again = Record.from_json(text)
    assert again == record
    assert again.to_json() == text
    json.loads(text, parse_constant=pytest.fail)


CLAIM = """
import sys
from pathlib import Path
from harness.store.record import RecordStore
store = RecordStore(Path(sys.argv[1]))
with store.claim(sys.argv[2], wait=sys.argv[3] == "wait") as mine:
    print("mine" if mine else "taken", flush=True)
    sys.stdin.readline()
"""


def start_claim(store: RecordStore, case_id: str, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(store.results), case_id, how],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


class TestClaims:
    def test_between_processes(self, store: RecordStore) -> None:
        case_id, other_id = "case-00000000aa", "case-00000000ab"
        holder = start_claim(store, case_id, "try")
        try:
            assert answer(holder) == "mine"
            with store.claim(case_id, wait=False) as mine:
                assert not mine
            with store.claim(other_id, wait=False) as mine:
                assert mine
            waiter = start_claim(store, case_id, "wait")
            try:
                with pytest.raises(subprocess.TimeoutExpired):
                    waiter.wait(timeout=1.0)
                # A holder that dies, however it dies, lets go.
                holder.kill()
                assert answer(waiter) == "mine"
                waiter.communicate("\n")
            finally:
                waiter.kill()
                waiter.communicate()
            with store.claim(case_id, wait=False) as mine:
                assert mine
        finally:
            holder.kill()
            holder.communicate()

    def test_the_largest_hash_has_a_lock_too(self, store: RecordStore) -> None:
        with store.claim("case-ffffffffff", wait=False) as mine:
            assert mine
        assert (store.folder / ".lock").stat().st_size == 0
