"""Results folders from someone else: one bad file costs itself, is named in one line, and waits."""

from __future__ import annotations

import itertools
import json
import lzma
import os
import random
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, with_duplicates
from hypothesis import given
from hypothesis import strategies as st
from mutations import STRANGE, changed, examples, paths, plan_of, write_folder
from records import make_record, write_plan

from harness.analysis.loading import load_frame
from harness.cases.case import Case
from harness.cases.recorded import load
from harness.commands import report, status
from harness.render.files import render_sweep
from harness.render.registries import TABLES
from harness.request.compose import compose_request
from harness.run.rounds.record_builder import RecordBuilder
from harness.store import archive
from harness.store.heads import read_heads
from harness.store.packing import PackingError, pack, unpack
from harness.store.record import Record, RecordError, RecordStore
from harness.store.regular import read_regular
from harness.store.rounds import Rounds, RoundStore, why_not_joined
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


MADE = examples()
PLACES = [(index, path) for index, values in enumerate(MADE) for path in paths(values)]
SHALLOW = [place for place in PLACES if len(place[1]) <= 3]
FAST = [name for name in TABLES.names() if not name.startswith("communication_vol")]


def act(results: Path) -> None:
    """Load, report and show the status of a folder, as commands do."""
    store, said = RecordStore(results), ""
    records, problems = store.load()
    assert all("\n" not in line for line in problems)
    try:
        rendered = render_sweep(results, "all", records, problems)
        assert not [line for line in rendered.problems if "\n" in line]
    except PlanError as error:
        said = str(error)
    status.look(results)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load_frame(results, "all")
        except ValueError as error:
            said += str(error)
    assert "\n" not in said


FUZZ = fuzz(12)


@FUZZ
@given(
    place=st.sampled_from(SHALLOW) | st.sampled_from(PLACES),
    how=st.sampled_from(["replaced", "replaced", "dropped", "added"]),
    strange=st.sampled_from(STRANGE),
    seed=st.integers(0, 99),
)
def test_any_field_of_a_record_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory,
    place: tuple[int, tuple[str | int, ...]],
    how: str,
    strange: Any,
    seed: int,
) -> None:
    index, path = place
    others = random.Random(seed).sample([i for i in range(len(MADE)) if i != index], 2)
    mutated = changed(MADE[index], path, how, strange)
    chosen = [MADE[index], *(MADE[i] for i in others)]
    names = [values["case_id"] for values in chosen]
    parent = tmp_path_factory.mktemp("fuzz")
    plan = plan_of(chosen, random.Random(seed).sample(FAST, 8))
    write_folder(parent / "results", [mutated, *chosen[1:]], plan=plan, names=names)
    act(parent / "results")
    assert os.listdir(parent) == ["results"], "nothing is written outside the folder"


PLAN = plan_of(MADE[:2], ["summary", "cases"])


@FUZZ
@given(
    path=st.sampled_from([*paths(PLAN)]),
    how=st.sampled_from(["replaced", "dropped", "added"]),
    strange=st.sampled_from(STRANGE),
)
def test_any_field_of_a_plan_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory,
    path: tuple[str | int, ...],
    how: str,
    strange: Any,
) -> None:
    parent = tmp_path_factory.mktemp("fuzz")
    write_folder(parent / "results", MADE[:2], plan=changed(PLAN, path, how, strange))
    act(parent / "results")
    assert os.listdir(parent) == ["results"]


ROUNDS = {
    "case_id": "a-0123456789",
    "num_rounds": 2,
    "conditions": {"torch": "2"},
    "started_at": ["2026-01-01T00:00:00+00:00"],
    "turns_at": ["2026-01-01T00:00:00+00:00"],
    "processes": [0],
    "wall_s": 1.0,
    "outcomes": [
        [
            {
                "rank": 0,
                "status": "ok",
                "error": None,
                "clocks": {"step": "host"},
                "samples_ms": {"step": [1.0, 2.0]},
                "memory": {"source": "rss", "peak_rss_bytes": 5},
                "check": {"errors": {"o": 0.1}, "tolerance": 1.0},
                "compilation": {"compile_s": 0.0},
                "notes": {"loss": 1.0},
                "device_state": {"before": {}, "after": {}},
            }
        ]
    ],
    "schema": 1,
}


TWO_RANKS = compose_request(
    ["model=tiny", "attention=naive", "device=cpu", "parallel=ddp_torch", "parallel.dp=2"]
).cases[0]


def whole_outcome(rank: int) -> dict[str, Any]:
    """A rank's outcome with everything that joining looks at."""
    limit = {"error": 0.1, "tolerance": 1.0}
    return ROUNDS["outcomes"][0][0] | {  # type: ignore[index]
        "rank": rank,
        "clocks": {"step": "host"},
        "samples_ms": {"step": [1.0, 2.0]},
        "host_ms": {"step": [0.5]},
        "check": {"errors": {"o": 0.1}, "tolerance": 1.0, "limits": {"o": limit}},
        "memory": {"source": "rss", "peak_rss_bytes": 5, "further": 1},
        "compilation": {"compile_s": 0.0, "recompilations": 0, "further": 1},
        "notes": {"loss": 1.0, "libraries": {"x": "1"}, "attention_choice": "naive"},
        "device_state": {"before": {"power_w": 1.0}, "after": {}},
        "load": {"root": rank, "own_cpus": 1.0, "other_cpus": 2.0, "other_cpu_share": 0.5},
    }


WHOLE = ROUNDS | {
    "case_id": TWO_RANKS.id,
    "started_at": ["2026-01-01T00:00:00+00:00"] * 2,
    "turns_at": ["2026-01-01T00:00:00+00:00"] * 2,
    "processes": [0, 1],
    "outcomes": [[whole_outcome(rank) for rank in range(2)] for _ in range(2)],
}


def record_of(rounds: Rounds) -> Record:
    """The record of the rounds as the runner makes it after those of an earlier run."""
    run = RecordBuilder(TWO_RANKS, 2)
    run.environments = [{"torch": "2", "host": "n", "boot_id": "b"}] * 2
    run.take_up(rounds)
    assert len(run.rounds_ms("step")) == len(run.loads()) // 2 == 2
    return run.to_record()


@fuzz(150)
@given(
    path=st.sampled_from([*paths(WHOLE, depth=7)]),
    how=st.sampled_from(["replaced", "dropped", "added"]),
    strange=st.sampled_from(STRANGE),
)
def test_any_field_of_finished_rounds_may_be_anything(
    tmp_path_factory: pytest.TempPathFactory,
    path: tuple[str | int, ...],
    how: str,
    strange: Any,
) -> None:
    """They are set aside in one line, or make a record that is good."""
    store = RecordStore(tmp_path_factory.mktemp("rounds"))
    store.create()
    rounds = RoundStore(store)
    rounds.folder.mkdir()
    file = rounds.folder / f"{TWO_RANKS.id}.json"
    file.write_text(json.dumps(changed(WHOLE, path, how, strange)), encoding="utf-8")
    said, found = "", None
    try:
        found = rounds.find(TWO_RANKS.id)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    assert said or isinstance(found, Rounds)
    if found is not None and why_not_joined(found, 2, 2, {"torch": "2"}) is None:
        assert store.read(store.write(record_of(found))).status == "ok"


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("status",), "failed", "did not end well"),
        (("clocks",), {}, "phases are not the same"),
        (("samples_ms", "step"), [1.0], "other numbers of samples"),
        (("load",), {"root": 5}, "load during one of them is not whole"),
        (("check", "tolerance"), None, "tolerance"),
        (("rank",), 7, "ranks are not the same"),
        (("memory", "further"), "of another type", None),
        (("load",), {}, None),
    ],
)
def test_one_rank_of_finished_rounds_that_differs(
    tmp_path: Path, place: tuple[str, ...], value: Any, said: str | None
) -> None:
    store = RecordStore(tmp_path)
    store.create()
    rounds = RoundStore(store)
    rounds.folder.mkdir()
    file = rounds.folder / f"{TWO_RANKS.id}.json"
    file.write_text(json.dumps(changed(WHOLE, ("outcomes", 1, 1, *place), "replaced", value)))
    if said is not None:
        with pytest.raises(ValueError, match=said):
            rounds.find(TWO_RANKS.id)
        return
    found = rounds.find(TWO_RANKS.id)
    assert found is not None
    assert record_of(found).status == "ok"
    reason = why_not_joined(found, 2, 4, {"torch": "2"})
    assert reason == "they are of another number of ranks than 4"


@pytest.mark.parametrize(
    "words", ["a\nb", "\x1b[2J", "x" * 100_000], ids=["lines", "escape", "long"]
)
def test_what_finished_rounds_say_of_themselves_is_told_in_one_short_line(
    tmp_path: Path, words: str
) -> None:
    store = RoundStore(RecordStore(tmp_path))
    store.folder.mkdir()
    file = store.folder / "a-0123456789.json"
    file.write_text(json.dumps(ROUNDS | {"conditions": {words: words}}), encoding="utf-8")
    kept = store.find("a-0123456789")
    assert kept is not None
    reason = why_not_joined(kept, 2, 1, {"torch": "2"})
    assert reason == "torch was None and is 2"
    reason = why_not_joined(kept, 2, 1, {})
    lines = [reason or ""]
    for change in ({"case_id": words}, {"schema": words}, {words: 1}):
        file.write_text(json.dumps(ROUNDS | change), encoding="utf-8")
        with pytest.raises(ValueError, match=r"case|schema|field") as raised:
            store.find("a-0123456789")
        lines.append(str(raised.value))
    for line in lines:
        assert line.isprintable()
        assert len(line) < 1000


def test_of_a_key_that_stands_twice_the_last_counts(tmp_path: Path) -> None:
    """As Python and most other parsers read it, in records, plans and finished rounds alike."""
    store = RecordStore(tmp_path / "results")
    write_folder(store.results, MADE, plan=PLAN)
    rounds = RoundStore(store)
    rounds.folder.mkdir()
    (rounds.folder / "a-0123456789.json").write_text(json.dumps(ROUNDS), encoding="utf-8")
    before = *store.load(), read_plan(store.results, "all"), rounds.find("a-0123456789")
    for path in store.results.rglob("*.json"):
        path.write_text(with_duplicates(json.loads(path.read_bytes())), encoding="utf-8")
    again = RecordStore(store.results)
    after = *again.load(), read_plan(store.results, "all"), rounds.find("a-0123456789")
    assert after == before
    act(store.results)


def test_every_field_of_a_record_with_a_value_of_every_kind(tmp_path: Path) -> None:
    """It is read, or set aside in one line; places inside the fields have some of the values."""
    store = RecordStore(tmp_path)
    store.create()
    path = store.path(MADE[0]["case_id"], 1)
    whole = {place: index for index, place in reversed(SHALLOW)}
    assert {"case", "phases", "memory", "notes", "round_states"} <= {place[0] for place in whole}
    values = itertools.cycle(STRANGE)
    problems = []
    for place, index in whole.items():
        for strange in STRANGE if len(place) == 1 else [next(values)]:
            text = json.dumps(changed(MADE[index], place, "replaced", strange))
            path.write_text(text, encoding="utf-8")
            problems += store.load()[1]
    assert len(problems) > len(whole)
    assert all(problem.isprintable() for problem in problems)


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
