"""Records that their folder cannot take are kept elsewhere, and the next run brings them home."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from mutations import examples
from records import make_record

from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.store import rescue
from harness.store.record import Record, RecordStore

SAMPLES = {"step": [[1.0, 1.1, 0.9]]}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordStore:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = RecordStore(tmp_path / "results")
    made.create()
    return made


class TestRescue:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
        def no_space(*arguments: Any, **keywords: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as context:
            context.setattr(os, "link", no_space)
            yield context

    def fail(self, store: RecordStore, record: Record) -> str:
        with pytest.raises(OSError, match="No space left") as raised:
            store.write(record)
        return str(raised.value)

    def test_the_next_run_takes_all_of_them(
        self, store: RecordStore, full: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        record = make_record(samples_ms=SAMPLES)
        again = make_record(samples_ms={"step": [[2.0]]})
        said = [self.fail(store, record), self.fail(store, again)]
        assert "the next run into this folder takes it" in said[0]
        kept = sorted((tmp_path / "state").rglob("*.json"))
        assert len(kept) == 2, "neither overwrites the other"
        for path in (*kept, *kept[0].parents[:1]):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        full.undo()
        assert len(store.take_up_rescued()) == 2
        attempts, problems = store.load_attempts()
        assert len(attempts) == 2
        assert not problems
        assert not [*(tmp_path / "state").rglob("*.json")]
        assert store.take_up_rescued() == []

    def test_other_folders_take_none(self, store: RecordStore, full: pytest.MonkeyPatch) -> None:
        self.fail(store, make_record(samples_ms=SAMPLES))
        full.undo()
        other = RecordStore(store.results.parent / "other")
        other.create()
        assert other.take_up_rescued() == []

    def test_planted_links_and_open_folders_are_not_used(
        self, store: RecordStore, full: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        record = make_record(samples_ms=SAMPLES)
        self.fail(store, record)
        (kept,) = (tmp_path / "state").rglob("*.json")
        victim = tmp_path / "victim"
        victim.write_text("precious", encoding="utf-8")
        kept.unlink()
        kept.symlink_to(victim)
        self.fail(store, record)
        assert victim.read_text(encoding="utf-8") == "precious"
        kept.parent.chmod(0o777)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        full.setattr(tempfile, "tempdir", str(temporary))
        said = self.fail(store, record)
        (fallback,) = temporary.rglob("*.json")
        assert str(fallback) in said
        assert "move it to" in said
        assert stat.S_IMODE(fallback.parent.stat().st_mode) == 0o700
        full.undo()
        assert store.take_up_rescued() == []
        assert rescue.keep(store.results, "a.json", b"{}")

    def test_a_run_takes_it_up_and_says_so(
        self,
        store: RecordStore,
        full: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        values = next(item for item in examples() if item["case"]["task"]["name"] == "flop_balance")
        self.fail(store, Record.from_json(json.dumps(values)))
        full.undo()
        request = compose_request(
            ["task=flop_balance", "seq_len=1024", "device=cpu", f"results={store.results}"]
        )
        assert run_request(request) == 0
        assert f"the rescued record of {values['case_id']}" in capsys.readouterr().err
        assert store.find(values["case_id"]) is not None
