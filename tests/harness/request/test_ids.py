"""The ids of cases: committed records are found by the commands that would measure them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cases.case import Case
from harness.store.record import RecordStore

RESULTS = Path(__file__).parents[3] / "results"
RECORDS = {
    f"{folder.name}/{case_id}": record
    for folder in sorted(RESULTS.iterdir())
    if (folder / "records").is_dir()
    for (case_id, _), record in RecordStore(folder).load_attempts()[0].items()
}


def test_committed_records_bear_the_ids_of_their_cases() -> None:
    """Also those from before an option joined its choice (kernels.registry.joined_later)."""
    assert len(RECORDS) > 200
    for name, record in RECORDS.items():
        assert Case.from_dict(record.case).id == record.case_id, name


@pytest.mark.parametrize(
    ("choice", "name", "option", "value"),
    [
        ("task", "attention", "packing", "equal"),
        ("task", "attention", "compile", True),
        ("task", "train_step", "clip_grad_norm", 1.0),
        ("parallel", "fsdp", "shard_group", 2),
    ],
)
def test_an_option_that_joined_later_counts_once_it_is_used(
    choice: str, name: str, option: str, value: object
) -> None:
    record = next(item for item in RECORDS.values() if item.case[choice]["name"] == name)
    case = Case.from_dict(record.case)
    older = {**record.case, choice: {**record.case[choice]}}
    older[choice].pop(option, None)
    assert Case.from_dict(older).id == case.id
    older[choice][option] = value
    assert Case.from_dict(older).id != case.id


def test_titles_tell_modes_of_a_compiler_apart() -> None:
    steps = (item for item in RECORDS.values() if item.case["task"]["name"] == "train_step")
    case = {**next(steps).case, "compile": {"scope": "block", "mode": "default"}}
    graphs = {**case, "compile": {"scope": "block", "mode": "reduce-overhead"}}
    assert "compile=block batch" in Case.from_dict(case).title
    assert "compile=block (reduce-overhead) batch" in Case.from_dict(graphs).title
