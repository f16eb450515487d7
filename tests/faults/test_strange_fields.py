"""Fields of records, plans and finished rounds that hold anything: fuzzed, and by type."""

from __future__ import annotations

import itertools
import json
import os
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzz, with_duplicates
from hypothesis import given
from hypothesis import strategies as st
from mutations import STRANGE, changed, examples, paths, plan_of, write_folder

from harness.analysis.loading import load_frame
from harness.commands import status
from harness.render.files import render_sweep
from harness.render.registries import TABLES
from harness.request.compose import compose_request
from harness.run.rounds.record_builder import RecordBuilder
from harness.store.record import Record, RecordStore
from harness.store.rounds import Rounds, RoundStore, why_not_joined
from harness.store.sweep_plan import PlanError, read_plan

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
