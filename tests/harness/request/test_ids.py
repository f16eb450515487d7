"""The ids of cases: committed records are found by the commands that would measure them again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cases.case import Case

RESULTS = Path(__file__).parents[3] / "results"
RECORDS = sorted(RESULTS.glob("*/records/*.json"))


def test_committed_records_bear_the_ids_of_their_cases() -> None:
    """Also those from before an option joined its choice (kernels.registry.joined_later)."""
    assert len(RECORDS) > 200
    for path in RECORDS:
        record = json.loads(path.read_text())
        assert Case.from_dict(record["case"]).id == record["case_id"], path.name
        assert path.name.startswith(record["case_id"])


@pytest.mark.parametrize(("option", "value"), [("packing", "equal"), ("compile", True)])
def test_an_option_that_joined_later_counts_once_it_is_used(option: str, value: object) -> None:
    record = json.loads(next(p for p in RECORDS if p.name.startswith("attention-")).read_text())
    case = Case.from_dict(record["case"])
    older = dict(record["case"], task={**record["case"]["task"]})
    older["task"].pop(option, None)
    assert Case.from_dict(older).id == case.id
    older["task"][option] = value
    assert Case.from_dict(older).id != case.id
