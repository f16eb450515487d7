"""Results that a newer attempt at the same case has overtaken without giving one itself."""

from __future__ import annotations

from collections.abc import Mapping

from harness.store.record import Record

MEANINGS: Mapping[str, str] = {
    "failed": "it ended in an error",
    "timeout": "it took too long",
    "oom": "it ran out of memory",
}
"""Endings that leave a doubt whether the case would run now, in the order of footnotes. A case that
a machine does not support says nothing about those that do."""


def overtaken_by(later: Record | None) -> list[str]:
    """The doubt that a newer attempt leaves in a case's result, in words of :data:`MEANINGS`."""
    return [later.status] if later is not None and later.status in MEANINGS else []
