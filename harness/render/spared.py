"""Makes what records allow: one table that they break costs itself, and the others are made."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from harness.cases.plugins import MissingPlugin
from harness.escapes import printable
from harness.paths import ROOT

T = TypeVar("T")


def made(what: str, make: Callable[[], T], problems: list[str]) -> T | None:
    """What ``make`` returns, or None and one line more among the problems.

    Records are typed when they are read (:mod:`harness.store.shape`); what plugins put into their
    notes is not, and values of the right types may contradict each other.
    """
    try:
        return make()
    except (MemoryError, ImportError, MissingPlugin):
        raise
    except Exception as error:
        problems.append(f"{what}: left out, these records break it ({said(error)})")
        return None


def said(error: Exception) -> str:
    """An unexpected error in one line, with the place in this project that raised it."""
    words = printable(f"{type(error).__name__}: {error}")[:200]
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(ROOT)
    ]
    if not own:
        return words
    return f"{words}, at {Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}"
