"""Which of several attempts at a case counts, and what is said of the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_workers import Host, stand_in
from records import make_record, write_plan

import harness
from harness.analysis.frame import build_frame
from harness.cases import format as fmt
from harness.commands import compare
from harness.commands.status import look
from harness.render.files import render_sweep, to_markdown
from harness.render.table import OVERTAKEN, build_table
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.statuses import STATUSES, that_counts
from harness.store.heads import read_heads
from harness.store.record import Record, RecordStore
from harness.writeup.collecting import collect

KEYS = ["model=tiny", "attention=naive", "seq_len=16", "batch_size=1", "device=cpu"]


@pytest.mark.parametrize(
    ("statuses", "place"),
    [
        ("ok", 0),
        ("ok ok", 1),
        ("ok unsupported", 0),
        ("ok failed", 0),
        ("ok timeout oom", 0),
        ("ok wrong", 1),
        ("ok wrong unsupported", 1),
        ("wrong ok failed", 1),
        ("oom unsupported", 0),
        ("oom failed oom", 2),
        ("failed oom timeout", 1),
        ("oom ok", 1),
        ("unsupported failed", 1),
        ("failed unsupported", 1),
    ],
)
def test_the_rule(statuses: str, place: int) -> None:
    assert that_counts(statuses.split()) == place


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    store = RecordStore(tmp_path)
    store.create()
    return store


def attempt(status: str, *, revision: str = "0123abc", host: str = "gpu7") -> Record:
    record = make_record(
        task="attention",
        mode="forward",
        samples_ms={"forward": [[3.0, 3.1]]} if status == "ok" else {},
        status=status,
        message="" if status == "ok" else f"it was {status}\nfor a reason",
    )
    record.environment |= {"git_revision": revision, "host": host}
    return record


def write(store: RecordStore, *statuses: str) -> str:
    for number, status in enumerate(statuses):
        record = attempt(status, revision=f"{number}" * 7)
        store.write(record)
    write_plan(store.results, "all", [record], tables=["attention_summary"])
    return record.case_id


def report(store: RecordStore) -> str:
    return render_sweep(store.results, "all", *store.load()).report.read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", ["unsupported", "oom", "timeout", "failed"])
def test_an_attempt_without_a_result_hides_none(store: RecordStore, ending: str) -> None:
    case_id = write(store, "ok", ending)
    records, _ = store.load()
    assert (records[case_id].attempt, records.later[case_id].status) == (1, ending)
    frame = harness.load(store.results)
    assert frame["status"].tolist() == ["ok"]
    assert frame["median_ms"].tolist() == [3.05]

    text = report(store)
    assert "1 case: 1 ok." in text
    # Nor is it hidden itself.
    word = fmt.STATUS_WORDS[ending]
    others = f"| 1, ok, by 0000000 on gpu7 | 2, {word}, by 1111111 on gpu7: it was {ending} for a "
    assert f"| {case_id} {others}reason |" in text
    is_marked = ending != "unsupported"
    assert (f"3.05{fmt.OPEN_TRIANGLE_DOWN}" in text) == is_marked
    assert (f"{OVERTAKEN}: {ending} (" in text) == is_marked


def test_a_wrong_result_withdraws_earlier_times(store: RecordStore) -> None:
    case_id = write(store, "ok", "wrong", "unsupported")
    records, _ = store.load()
    assert (records[case_id].status, records.withdrawn[case_id].attempt) == ("wrong", 1)
    assert harness.load(store.results)["median_ms"].isna().all()
    text = report(store)
    assert "1 case: 1 wrong result." in text
    assert "3.05" not in text
    counts = "2, wrong result, by 1111111 on gpu7"
    assert f"| {counts} | 1, ok, by 0000000 on gpu7: its times are withdrawn |" in text
    assert f"| {counts} | 3, unsupported, by 2222222 on gpu7: it was unsupported" in text


def test_the_mark_is_that_of_the_case_alone() -> None:
    one, other = attempt("ok"), make_record(task="attention", mode="forward", attention="sdpa")
    other.phases = one.phases
    table = build_table(
        "attention_summary", build_frame([one, other], later={one.case_id: attempt("failed")})
    )
    assert table is not None
    marked = [
        line
        for line in to_markdown(table).splitlines()
        if fmt.OPEN_TRIANGLE_DOWN in line and "|" in line
    ]
    assert len(marked) == 1
    assert "naive" in marked[0]


@pytest.mark.parametrize("ending", STATUSES)
def test_heads_say_which_counts(store: RecordStore, ending: str) -> None:
    case_id = write(store, "failed", "ok", ending)
    heads, _ = read_heads(store)
    head = heads[case_id]
    kept = ending not in ("ok", "wrong")
    assert (head.status, head.counts) == (ending, 2 if kept else None)
    (case,) = look(store.results).cases
    assert case.status == ending
    assert ("attempt 2 counts" in case.detail) == kept


def test_of_one_revision_the_same_rule(store: RecordStore) -> None:
    for status, revision in (("ok", "aaaaaaa"), ("failed", "aaaaaaa"), ("ok", "bbbbbbb")):
        store.write(attempt(status, revision=revision))
    sides = compare._sides("aaaa", "bbbb", store.results, None)
    assert [frame["status"].tolist() for frame in sides.frames] == [["ok"], ["ok"]]


def test_a_write_up_offers_to_measure_again(store: RecordStore) -> None:
    write(store, "ok", "failed")
    gaps = [gap for gap in collect([store.results]).gaps if gap.what.startswith("all:")]
    assert [gap.what for gap in gaps] == [
        "all: 1 case with a newer attempt that gave no result (1 failed)"
    ]
    assert "retry=true" in gaps[0].command


class TestRuns:
    @pytest.fixture
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Host:
        return stand_in(monkeypatch)

    def run(self, results: Path, *arguments: str) -> int:
        return run_request(compose_request([*KEYS, f"results={results}", *arguments]))

    def test_a_run_that_cannot_says_what_is_kept(
        self, host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path) == 0
        host.statuses["naive", 0] = "unsupported"
        assert self.run(tmp_path, "remeasure=all") == 0
        said = capsys.readouterr().out
        assert "1 case: 1 unsupported" in said
        assert "1 case keeps an earlier result: of the newest attempts 1 unsupported" in said
        assert self.run(tmp_path) == 0
        assert len(host.turns) == 2, "what was recorded is measured again"

    def test_retry_is_for_the_newest_attempt_too(self, host: Host, tmp_path: Path) -> None:
        assert self.run(tmp_path) == 0
        host.statuses["naive", 0] = "failed"
        assert self.run(tmp_path, "remeasure=all") == 1
        assert self.run(tmp_path) == 1
        assert len(host.turns) == 2
        assert self.run(tmp_path, "retry=true") == 1
        assert len(host.turns) == 3
        host.statuses.clear()
        assert self.run(tmp_path, "retry=true") == 0
        assert self.run(tmp_path, "retry=true") == 0
        assert len(host.turns) == 4
