"""The statuses with which a case can end."""

from __future__ import annotations

STATUSES = ("ok", "oom", "unsupported", "wrong", "timeout", "failed")
"""Statuses from best to worst; the ranks of a case agree on the worst that any of them saw."""

GOOD = frozenset({"ok", "oom", "unsupported"})
"""Results that stand: ``retry=true`` measures the others again."""
