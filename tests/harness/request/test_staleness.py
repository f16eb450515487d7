"""Records that other code, or another environment, measured; and ``remeasure=``."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from fake_workers import Host, stand_in

from harness.cases import source as case_source
from harness.cases.source import source_files, source_of
from harness.request import staleness
from harness.request.compose import compose_request
from harness.request.session import run_request
from harness.request.staleness import UNKNOWN, environment_here, in_a_line, staleness_of
from harness.source import history, unchanged
from harness.source.history import differing_since
from harness.store.record import Record, RecordStore

KEYS = ("model=tiny", "attention=naive,sdpa", "device=cpu", "until=rounds")
CASES = compose_request(list(KEYS)).cases


def record_of(index: int = 0, **changes: Any) -> Record:
    case = CASES[index].to_dict()
    values = {
        "status": "ok",
        "case_id": CASES[index].id,
        "case": case,
        "source": source_of(case, {}),
    }
    return Record(**{**values, **changes})


def reason_of(record: Record, here: dict[str, Any] | None = None) -> str | None:
    return staleness_of([record], here).reasons.get(record.case_id)


class TestCode:
    def test_the_same_code_is_not_stale(self) -> None:
        assert reason_of(record_of()) is None

    @pytest.mark.parametrize(
        ("folder", "reason"),
        [
            ("kernels/backends", "other kernels"),
            ("models", "other model code"),
            ("harness/bench", "other measuring code"),
        ],
    )
    def test_other_code(self, folder: str, reason: str) -> None:
        record = record_of()
        record.source[folder] = "0" * 12
        assert reason_of(record) == reason

    def test_a_folder_that_has_gone(self) -> None:
        record = record_of()
        record.source["kernels/gone"] = "0" * 12
        assert reason_of(record) == "other kernels"

    @pytest.mark.parametrize(
        ("attention", "notes", "is_stale"),
        [
            ({"name": "flash_triton"}, {"autograd": "native"}, False),
            ({"name": "auto"}, {"autograd": "native", "attention_choice": "flash_triton"}, False),
            ({"name": "flash_triton"}, {"autograd": "native", "tiles": "rule"}, True),
            ({"name": "flash_triton"}, {}, True),
            ({"name": "ring", "kernel": "flash_triton"}, {"autograd": "native"}, True),
        ],
    )
    def test_kernels_for_any_gpu_count_unless_hoppers_alone_ran(
        self, attention: dict[str, str], notes: dict[str, str], is_stale: bool
    ) -> None:
        case = {**CASES[0].to_dict(), "attention": attention}
        record = record_of(case=case, notes=notes, source=source_of(case, notes))
        assert reason_of(record) is None
        record.source["kernels/flash/any_gpu"] = "0" * 12
        assert reason_of(record) == ("other kernels" if is_stale else None)
        record.source["kernels/flash/hopper"] = "0" * 12
        assert reason_of(record) == "other kernels"

    @pytest.mark.parametrize(
        ("precision", "notes", "is_stale"),
        [
            ("fp32", {"float32_precision": "bf16x6", "tiles": "predicted"}, False),
            ("fp32", {"tiles": "predicted"}, True),
            ("bf16_pure", {"float32_precision": "bf16x6"}, True),
            ("bf16", {"float32_precision": "bf16x6"}, True),
        ],
    )
    def test_kernels_for_hopper_do_not_count_where_calls_were_in_float32(
        self, precision: str, notes: dict[str, str], is_stale: bool
    ) -> None:
        keys = ["model=tiny", "attention=flash_triton", "device=cpu", f"precision={precision}"]
        case = compose_request(keys).cases[0].to_dict()
        record = record_of(case=case, notes=notes, source=source_of(case, notes))
        record.source["kernels/flash/hopper"] = "0" * 12
        assert (reason_of(record) == "other kernels") == is_stale
        record.source["kernels/flash/any_gpu"] = "0" * 12
        assert reason_of(record) == "other kernels"


class TestHistory:
    """Records from before sources were hashed."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A history of one commit."""
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels/a.py").write_text('"""One."""\nA = 1\n')
        (tmp_path / "kernels/b.py").write_text("B = 1\n")
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "One"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
        subprocess.run(["git", "tag", "one"], cwd=tmp_path, check=True)
        monkeypatch.setattr(history, "ROOT", tmp_path)
        for cached in (history._changed, history._blobs, history._text_now, history._text_then):
            cached.cache_clear()
        return tmp_path

    FILES = ("kernels/a.py", "kernels/b.py", "kernels/c.py")

    def test_prose_is_no_difference(self, tree: Path) -> None:
        (tree / "kernels/a.py").write_text('"""Two."""\nA = 1  # one\n')
        assert differing_since("one", self.FILES) == set()

    def test_code_is(self, tree: Path) -> None:
        (tree / "kernels/a.py").write_text("A = 2\n")
        assert differing_since("one+", self.FILES) == {"kernels/a.py"}
        assert differing_since("one", ["kernels/b.py"]) == set()

    def test_a_commit_between_two_edits_counts_by_the_first_code(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Code 2 counts as 1, which is that of the commit, and 1 as 0."""
        (tree / "kernels/a.py").write_text("A = 2\n")
        codes = [unchanged.code_of(f"A = {number}\n", ".py") for number in range(3)]
        edits = {
            ("kernels/a.py", code): unchanged.Row(
                file="kernels/a.py", code=code, counts_as=before, unless="", reason="r"
            )
            for before, code in pairwise(codes)
        }
        monkeypatch.setattr(unchanged, "_rows", lambda: edits)
        assert differing_since("one", self.FILES) == set()
        del edits["kernels/a.py", codes[2]]
        assert differing_since("one", self.FILES) == {"kernels/a.py"}

    def test_a_moved_file_is_new(self, tree: Path) -> None:
        (tree / "kernels/b.py").rename(tree / "kernels/c.py")
        subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
        assert differing_since("one", self.FILES) == {"kernels/c.py"}

    def test_unknown_commit_or_no_history(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert differing_since("0123abc", self.FILES) is None
        monkeypatch.setattr(history, "ROOT", tree / "kernels")
        history._changed.cache_clear()
        assert differing_since("one", self.FILES) is None

    def test_without_a_hash_the_revision_decides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        old = record_of(source={}, environment={"git_revision": "abc1234+"})
        files = source_files(old.case, {})

        def since(revision: str, asked: frozenset[str]) -> set[str] | None:
            assert (revision, asked) == ("abc1234+", files)
            return answer

        monkeypatch.setattr(staleness, "differing_since", since)
        answer: set[str] | None = {"kernels/backends/naive.py"}
        assert reason_of(old) == "other kernels"
        answer = None
        assert reason_of(old) == UNKNOWN
        answer = set()
        assert reason_of(old) == UNKNOWN  # Nobody knows what the tree's changes were.
        assert reason_of(record_of(source={})) == UNKNOWN


class TestEnvironment:
    HERE = environment_here("")

    def environment(self, **changes: Any) -> dict[str, Any]:
        here = {**self.HERE, "device_name": self.HERE["device_name"]["cpu"]}
        return {**here, "libraries": {}, **changes}

    def test_the_same(self) -> None:
        assert reason_of(record_of(environment=self.environment()), self.HERE) is None

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"torch": "1.0"}, "another torch (1.0, now "),
            ({"cpu_model": "Z80", "device_name": None}, "another CPU (Z80, now "),
            ({"libraries": {"no-such": "2"}}, "another no-such (2, now not installed)"),
            ({"variables": {"OMP_NUM_THREADS": "77"}}, "other numbers of threads"),
        ],
    )
    def test_another(self, changes: dict[str, Any], reason: str) -> None:
        found = reason_of(record_of(environment=self.environment(**changes)), self.HERE)
        assert found is not None
        assert found.startswith(reason)

    def test_what_this_host_lacks_a_library_for(self) -> None:
        libraries = ({"no-such": "2"}, {"numpy": "0.1"})
        records = [
            record_of(index, environment=self.environment(libraries=found))
            for index, found in enumerate(libraries)
        ]
        found = staleness_of(records, self.HERE)
        assert found.stale == {CASES[0].id, CASES[1].id}
        assert found.measurable == {CASES[1].id}

    def test_also_where_its_code_has_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staleness, "_other_code", lambda record: "other kernels")
        record = record_of(environment=self.environment(libraries={"no-such": "2"}))
        assert staleness_of([record], self.HERE).stale == {record.case_id}
        assert staleness_of([record], self.HERE).measurable == set()

    @pytest.mark.parametrize(
        ("before", "now", "is_same"),
        [
            ("2.11.0+cu130", "2.11.0", True),
            ("2.11.0", "2.11.0+cu130", True),
            ("2.11.0+cu130", "2.11.0+cpu", False),
            ("2.11.0+cu130", "2.13.0", False),
        ],
    )
    def test_metadata_may_lack_the_local_part(self, before: str, now: str, is_same: bool) -> None:
        record = record_of(environment=self.environment(torch=before))
        assert (reason_of(record, {**self.HERE, "torch": now}) is None) is is_same

    def test_what_an_old_record_does_not_say_is_no_difference(self) -> None:
        assert reason_of(record_of(environment={"torch": self.HERE["torch"]}), self.HERE) is None

    def test_another_driver(self) -> None:
        record = record_of(environment=self.environment(driver="570.1"))
        found = reason_of(record, {**self.HERE, "driver": "580.2"})
        assert found == "another driver (570.1, now 580.2)"


def test_one_line_says_how_many_and_since_when() -> None:
    found = staleness.Staleness()
    assert in_a_line(found) == ""
    found.reasons = {"a": "other kernels", "b": "other kernels", "c": "another driver (1, now 2)"}
    found.revisions = {"a": "570eca7", "b": "570eca7", "c": "570eca7"}
    assert in_a_line(found) == (
        "2 recorded with other kernels since 570eca7, 1 with another driver (1, now 2); "
        "remeasure=stale measures those 3 again"
    )
    assert in_a_line(found, num_peers=2).endswith("measures those 3 again, in turns with 2 others")
    found.reasons = {"a": UNKNOWN}
    assert in_a_line(found) == (
        "1 recorded by code that is not known here; remeasure=all measures everything again"
    )


class TestRemeasure:
    @pytest.fixture
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Host:
        host = stand_in(monkeypatch)
        here = environment_here("")
        host.environment = {
            **here,
            "device_name": here["device_name"]["cpu"],
            "git_revision": "abc",
        }
        return host

    def run(self, results: Path, *arguments: str) -> None:
        run_request(compose_request([*KEYS, f"results={results}", *arguments]))

    def test_stale_and_all(
        self,
        host: Host,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        store = RecordStore(tmp_path)
        self.run(tmp_path)
        self.run(tmp_path, "remeasure=stale")
        assert sorted(host.turns) == [("naive", 0), ("sdpa", 0)]
        assert "recorded with" not in capsys.readouterr().err

        # Another naive since.
        real = case_source.hashes
        naive = source_files(CASES[0].to_dict(), {})

        def changed(files: frozenset[str], options: frozenset[str]) -> dict[str, str]:
            found = real(files, options)
            return {**found, "kernels/backends": "1" * 12} if files == naive else found

        case_source._hashes_of.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(case_source, "hashes", changed)
            self.run(tmp_path)
            said = capsys.readouterr().err
            line = "1 recorded with other kernels since abc; remeasure=stale measures it again"
            assert f"attnbench: {line}\n" in said
            assert len(host.turns) == 2
            self.run(tmp_path, "remeasure=stale")
            assert host.turns[2:] == [("naive", 0)]
            assert store.attempts(CASES[0].id) == [1, 2]
            assert store.attempts(CASES[1].id) == [1]
            self.run(tmp_path, "remeasure=stale")
            assert len(host.turns) == 3
        case_source._hashes_of.cache_clear()
        self.run(tmp_path, "remeasure=all")
        assert sorted(host.turns[3:]) == [("naive", 0), ("sdpa", 0)]
        newest = store.find(CASES[0].id)
        assert newest is not None
        assert newest.attempt == 3

    def test_choices(self) -> None:
        with pytest.raises(ValueError, match="remeasure=some: must be one of none, stale, all"):
            compose_request([*KEYS, "remeasure=some"])

    def test_a_host_that_submits_says_nothing_of_those_that_measure(self) -> None:
        from harness.run.slurm.launcher import Slurm

        assert not Slurm.measures_here


class TestInTurns:
    """``remeasure=stale`` where cases take turns: two comparisons of three backends."""

    NAMES = ("naive", "sdpa", "flex")
    TURNS = ("interleave=3", "until=rounds")
    OTHER = "other kernels"

    @pytest.fixture(autouse=True)
    def host(self, monkeypatch: pytest.MonkeyPatch) -> Host:
        host = stand_in(monkeypatch)
        device = environment_here("")["device_name"]["cpu"]
        host.environment = {**environment_here(""), "device_name": device}
        return host

    @pytest.fixture(autouse=True)
    def stale(self, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], str]:
        """By backend and length, why its first attempt is stale."""
        reasons: dict[tuple[str, int], str] = {}

        def reason(record: Record) -> str | None:
            key = (record.case["attention"]["name"], record.case["seq_len"])
            return reasons.get(key) if record.attempt == 1 else None

        monkeypatch.setattr(staleness, "_other_code", reason)
        return reasons

    def run(self, results: Path, *arguments: str, names: tuple[str, ...] = NAMES) -> None:
        keys = ["model=tiny", f"attention={','.join(names)}", "seq_len=64,128", "device=cpu"]
        run_request(compose_request([*keys, f"results={results}", *(arguments or self.TURNS)]))

    def attempts(self, results: Path) -> dict[tuple[str, int], list[int]]:
        store = RecordStore(results)
        return {
            (record.case["attention"]["name"], record.case["seq_len"]): store.attempts(case_id)
            for case_id, record in store.load()[0].items()
        }

    def again(self, results: Path) -> set[tuple[str, int]]:
        """The cases with a second attempt, whose first one is kept."""
        found = self.attempts(results)
        assert all(numbers in ([1], [1, 2]) for numbers in found.values())
        return {key for key, numbers in found.items() if numbers == [1, 2]}

    def test_the_comparison_of_a_stale_case_is_measured_again(
        self, tmp_path: Path, stale: dict[tuple[str, int], str]
    ) -> None:
        self.run(tmp_path)
        stale["sdpa", 64] = self.OTHER
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {(name, 64) for name in self.NAMES}
        records = RecordStore(tmp_path).load()[0].values()
        starts = {tuple(r.notes["rounds_started_at"]) for r in records if r.case["seq_len"] == 64}
        assert len(starts) == 1, "they began their rounds together"
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {(name, 64) for name in self.NAMES}

    def test_also_where_rounds_are_added_until_decided(
        self, tmp_path: Path, stale: dict[tuple[str, int], str]
    ) -> None:
        turns = ("interleave=1", "until=decided", "budget_s=0")
        self.run(tmp_path, *turns)
        stale["sdpa", 64] = self.OTHER
        self.run(tmp_path, *turns, "remeasure=stale")
        assert self.again(tmp_path) == {(name, 64) for name in self.NAMES}

    def test_without_turns_the_stale_case_alone(
        self, tmp_path: Path, stale: dict[tuple[str, int], str]
    ) -> None:
        alone = ("interleave=1", "until=rounds")
        self.run(tmp_path, *alone)
        stale["sdpa", 64] = self.OTHER
        self.run(tmp_path, *alone, "remeasure=stale")
        assert self.again(tmp_path) == {("sdpa", 64)}

    def test_a_backend_that_is_added_is_measured_alone(self, tmp_path: Path) -> None:
        self.run(tmp_path, names=("naive", "sdpa"))
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert len(self.attempts(tmp_path)) == 6
        assert self.again(tmp_path) == set()

    def test_what_has_no_time_takes_no_turns(
        self, tmp_path: Path, stale: dict[tuple[str, int], str], host: Host
    ) -> None:
        host.statuses["flex", 0] = "failed"
        self.run(tmp_path)
        stale["sdpa", 64] = self.OTHER
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {("naive", 64), ("sdpa", 64)}

    def test_what_this_host_cannot_measure_takes_nothing_with_it(
        self,
        tmp_path: Path,
        stale: dict[tuple[str, int], str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Else its old record would be compared with new ones."""
        self.run(tmp_path)
        stale["sdpa", 64] = self.OTHER
        monkeypatch.setattr(
            staleness, "_lacks_a_library", lambda found: found.case["attention"]["name"] == "sdpa"
        )
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {("sdpa", 64)}

    def test_stopped_between_two_records(
        self, tmp_path: Path, stale: dict[tuple[str, int], str], host: Host
    ) -> None:
        """The stale case is recorded, and no longer stale when the others go on."""
        self.run(tmp_path)
        stale["naive", 64] = self.OTHER
        host.turns.clear()

        def stop() -> None:
            raise KeyboardInterrupt

        host.at["sdpa", 2] = stop
        with pytest.raises(KeyboardInterrupt):
            self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {("naive", 64)}
        assert len(host.turns) == 7
        host.at.clear()
        self.run(tmp_path, *self.TURNS, "remeasure=stale")
        assert self.again(tmp_path) == {(name, 64) for name in self.NAMES}
        assert host.turns[7:] == [("sdpa", 2), ("flex", 2)]

    def test_a_plan_and_a_line_say_so(
        self,
        tmp_path: Path,
        stale: dict[tuple[str, int], str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("COLUMNS", "400")
        self.run(tmp_path)
        stale["sdpa", 64] = self.OTHER
        capsys.readouterr()
        self.run(tmp_path)
        assert (
            "remeasure=stale measures it again, in turns with 2 others" in capsys.readouterr().err
        )
        self.run(tmp_path, *self.TURNS, "remeasure=stale", "plan=true")
        said = capsys.readouterr().out
        rows = [line.split() for line in said.splitlines() if line.startswith(self.NAMES)]
        states = {(row[0], int(row[1])): " ".join(row[4:]) for row in rows}
        again = "to measure (in turns with stale)"
        assert states == {
            **{(name, 64): again for name in self.NAMES},
            **{(name, 128): "recorded (ok)" for name in self.NAMES},
            ("sdpa", 64): "to measure (stale)",
        }
        assert "3 of 6 cases to measure" in said


def test_the_folder_of_this_project_has_a_history_or_says_unknown() -> None:
    record = record_of(source={}, environment={"git_revision": "0" * 7})
    assert reason_of(record) == UNKNOWN
    assert (ROOT / "kernels").is_dir()
