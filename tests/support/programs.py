"""Looks for programs that some tests need; without them a test skips, or fails in CI."""

from __future__ import annotations

import os
import shutil

import pytest

REQUIRED_VARIABLE = "ATTNBENCH_TEST_TOOLS"
"""Set to ``required`` where a missing program must fail the tests."""


def need(program: str | None, name: str, package: str) -> str:
    """The program's path; skips the test where it is not installed, or fails it."""
    if program is not None:
        return program
    words = f"{name} is not installed: apt-get install {package}"
    if os.environ.get(REQUIRED_VARIABLE) == "required":
        pytest.fail(words)
    pytest.skip(words)


def need_program(name: str, package: str) -> str:
    return need(shutil.which(name), name, package)
