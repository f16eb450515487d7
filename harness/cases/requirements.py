"""Checks of options: a ValueError in one line that names the full key and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.cases.case import Case


def require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        raise ValueError(f"{key}={value}: must be one of {', '.join(choices)}")


def require_at_least(key: str, value: float, least: float) -> None:
    """Raise ValueError unless ``value`` is at least ``least``."""
    if value < least:
        raise ValueError(f"{key}={value}: must be at least {least}")


def require_one_process(case: Case) -> None:
    """Raise ValueError, naming the mesh axis, for a task that does not run on several ranks."""
    for axis, ranks in case.parallel.axes.items():
        raise ValueError(
            f"parallel.{axis}={ranks}: task={case.task.name} runs in one process; leave it at 1"
        )
