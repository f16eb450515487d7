"""Cases of command lines, and sweeps as files."""

from __future__ import annotations

from pathlib import Path

from harness.cases.case import Case
from harness.request.compose import Request, compose_request


def compose(*arguments: str) -> Request:
    return compose_request(["device=cpu", *arguments])


def one_case(*arguments: str) -> Case:
    (case,) = compose(*arguments).cases
    return case


def write_sweep(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)
