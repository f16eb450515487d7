"""The statuses with which a case can end, and which of several attempts at a case counts."""

from __future__ import annotations

from collections.abc import Sequence

STATUSES = ("ok", "oom", "unsupported", "wrong", "timeout", "failed")
"""Statuses from best to worst; the ranks of a case agree on the worst that any of them saw."""

GOOD = frozenset({"ok", "oom", "unsupported"})
"""Results that stand: ``retry=true`` measures the others again."""

_RESULTS = (frozenset({"ok", "wrong"}), frozenset({"oom"}))
"""Statuses that later attempts of other statuses do not replace, the strongest first."""


def that_counts(statuses: Sequence[str]) -> int:
    """The place of the attempt that counts, of a case's attempts from oldest to newest.

    The newest that ran to a verdict counts: its times hold, or its answer is wrong and takes the
    times of earlier ones back. An attempt that only says what a machine lacked (a library, memory,
    time, a process that lived) does not undo what another has measured. Without a verdict an out of
    memory counts before the others, of which the newest does.
    """
    for kind in _RESULTS:
        places = [place for place, status in enumerate(statuses) if status in kind]
        if places:
            return places[-1]
    return len(statuses) - 1
