"""The checks of the soak (``python -m tests.soak``) notice what they are there to notice."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fault_folders import wait_until

from tests.soak import checks as checks_module
from tests.soak.checks import Checks
from tests.soak.sweep import MARK, Ended, Sweep


@pytest.fixture
def checks(tmp_path: Path) -> Checks:
    """Of a sweep of two cases, of which one is recorded and was seen."""
    made = Checks(Sweep(path=tmp_path, num_cases=2))
    made.sweep.records.mkdir()
    write(made, "a-0123456789.json", attempt=1)
    assert not made.complete(made.look())
    assert made.violations == []
    return made


def write(checks: Checks, name: str, **values: object) -> Path:
    path = checks.sweep.records / name
    text = json.dumps({"case_id": name.partition(".")[0], "status": "ok"} | values)
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_is_broken_by_further_records_and_planted_files(checks: Checks) -> None:
    write(checks, "b-0123456789.json", attempt=1, status="failed")
    found = write(checks, "b-0123456789.2.json", case_id="b-0123456789", attempt=2)
    (checks.sweep.records / "c-0123456789.json").write_text("{")
    assert checks.complete(checks.look())
    found.with_name("c-0123456789.json").unlink()
    assert checks.complete(checks.look())
    assert checks.violations == []


def test_a_record_that_is_lost(checks: Checks) -> None:
    (checks.sweep.records / "a-0123456789.json").unlink()
    checks.look()
    assert checks.violations == ["record a-0123456789.json is lost"]


def test_a_record_that_is_changed(checks: Checks) -> None:
    write(checks, "a-0123456789.json", attempt=1, wall_s=2.0)
    checks.look()
    assert checks.violations == ["record a-0123456789.json is changed"]


def test_a_case_that_is_measured_again(checks: Checks) -> None:
    write(checks, "a-0123456789.2.json", case_id="a-0123456789", attempt=2)
    checks.look()
    assert checks.violations == ["a-0123456789 was measured again: ['ok', 'ok']"]


def test_a_traceback(checks: Checks) -> None:
    checks.commands_said([Ended(code=0, said="all is well")])
    assert checks.violations == []
    checks.commands_said([Ended(code=1, said="Traceback (most recent call last):\n  ...")])
    assert len(checks.violations) == 1


@pytest.mark.parametrize("code", [0, -1])
def test_a_report_that_is_not_made(
    checks: Checks, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda sweep, function: Ended(code=code, said=""))
    checks.report()
    assert "no report was made" in checks.violations
    assert len(checks.violations) == (1 if code == 0 else 2)


def test_a_process_that_is_left(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "GONE_S", 0.0)
    environment = os.environ | {MARK: checks.sweep.token}
    with subprocess.Popen(["sleep", "1000"], env=environment, start_new_session=True) as left:
        wait_until(checks.sweep.processes, "it has its mark")
        checks.nothing_left()
    assert left.returncode == -9
    (line,) = checks.violations
    assert str(left.pid) in line
    checks.nothing_left()
    assert len(checks.violations) == 1
