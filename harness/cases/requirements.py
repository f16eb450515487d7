"""Checks of options: a ValueError in one line that names the full key and what would be right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.did_you_mean import did_you_mean

if TYPE_CHECKING:
    from harness.cases.case import Case


def require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError that lists the choices unless ``value`` is one of them."""
    if value not in choices:
        meant = did_you_mean(value, choices)
        raise ValueError(f"{key}={value}: must be one of {', '.join(choices)}{meant}")


def require_at_least(key: str, value: float, least: float) -> None:
    """Raise ValueError unless ``value`` is at least ``least``."""
    if value < least:
        raise ValueError(f"{key}={value}: must be at least {least}")


def require_at_most(key: str, value: float, most: float) -> None:
    """Raise ValueError unless ``value`` is at most ``most``."""
    if value > most:
        raise ValueError(f"{key}={value}: must be at most {most:,}")


def require_one_process(case: Case) -> None:
    """Raise ValueError, naming the mesh axis, for a task that does not run on several ranks."""
    for axis, ranks in case.parallel.axes.items():
        raise ValueError(
            f"parallel.{axis}={ranks}: task={case.task.name} runs in one process; leave it at 1"
        )


def require_head_groups(num_heads: int, num_kv_heads: int | None) -> None:
    """Raise ValueError unless each key and value head serves equally many query heads."""
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ValueError(
            f"task.num_kv_heads={num_kv_heads}: must divide task.num_heads={num_heads}"
        )


def require_several(setting: str, batch_size: int, item: str) -> None:
    """Raise ValueError if a setting that gives items different lengths finds one of them alone."""
    if batch_size == 1:
        raise ValueError(
            f"{setting}: needs batch_size=2 or more, one {item} has nothing to differ from"
        )
