"""docs/reference.md is what the docstrings of the public names say."""

from __future__ import annotations

import runpy

from conftest import ROOT

import attnbench

WRITER = runpy.run_path(str(ROOT / ".ci" / "write_reference.py"))


def test_the_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == WRITER["page"](), "run .venv/bin/python .ci/write_reference.py"
    for name in attnbench.__all__:
        assert f"\n### {name}\n\n```text\n{name}(" in page, name
