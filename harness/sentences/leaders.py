"""Sentences on who is first, as far as verdicts tell: at how many points, and from which length on.

Nothing is called fastest whose lead no verdict confirms: ties name all that are level, and points
that cannot be told are counted as such.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import pandas as pd

from harness.cases import format as fmt
from harness.cases.columns import point_groups, sorted_values
from harness.sentences.findings import by_margin, listed, span
from harness.sentences.ranking import Name, Standing, standings


def say_fastest(
    rows: pd.DataFrame,
    value: str,
    varied: Sequence[str] = ("attention",),
    *,
    highest: bool = False,
    word: str = "fastest",
    evidence: str | None = None,
    name: Name | None = None,
) -> str | None:
    """``sdpa is fastest at 5 of 6 points in bf16, by 12% over the next (median), flex at 1``

    Only verdicts say who is first (:func:`harness.sentences.ranking.standings`): those that are
    level are all named, and points that cannot be told are counted. One part for each precision.
    """
    parts = []
    for precision, part in _by_precision(rows, varied):
        found = standings(part, value, varied, highest=highest, evidence=evidence, name=name)
        if found:
            parts.append(_say_standings(found, word, precision))
    if parts and all(_NONE_TOLD in part for part in parts):
        # Once for all precisions.
        found = standings(rows, value, varied, highest=highest, evidence=evidence, name=name)
        return _say_standings(found, word, "")
    return "; ".join(parts) or None


_NONE_TOLD = "cannot be told"


def _by_precision(rows: pd.DataFrame, varied: Sequence[str]) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each precision behind `` in bf16``; all of them where nothing names one."""
    if "precision" in varied or "precision" not in rows or rows["precision"].isna().any():
        return [("", rows)]
    return [
        (f" in {precision}", rows[rows["precision"] == precision])
        for precision in sorted_values(rows, "precision")
    ]


def _say_standings(found: Sequence[Standing], word: str, precision: str) -> str:
    """Who is first, who is level and what is open, over the points of one precision."""
    firsts = Counter(standing.first for standing in found if standing.first)
    level = Counter(
        standing.names for standing in found if not standing.is_open and not standing.first
    )
    still_open = [standing for standing in found if standing.is_open]
    if len(found) == 1:
        return _say_one(found[0], word, precision)
    parts = []
    if firsts:
        (first, wins), *others = firsts.most_common()
        margin = median(standing.margin for standing in found if standing.first == first)
        over = by_margin(margin) + (" over the next (median)" if wins > 1 else " over the next")
        parts.append(f"{first} is {word} at {_of_points(wins, len(found))}{precision}, {over}")
        parts += [f"{name} at {count}" for name, count in others]
    for names, count in level.most_common():
        where = f"at {count}" if parts else f"at {_of_points(count, len(found))}{precision}"
        parts.append(f"{listed(names)} are level {where}")
    if not parts:
        return f"which is {word} {_NONE_TOLD} at {_any_of(len(found))}{precision}{_why(still_open)}"
    if still_open:
        parts.append(f"and at {len(still_open)} it {_NONE_TOLD}{_why(still_open)}")
    return ", ".join(parts)


def _say_one(standing: Standing, word: str, precision: str) -> str:
    if standing.first:
        return f"{standing.first} is {word}{precision}, {by_margin(standing.margin)} over the next"
    if standing.is_open:
        among = f" of {listed(standing.names)}" if len(standing.names) <= 4 else ""
        return f"which{among} is {word}{precision} {_NONE_TOLD}{_why([standing])}"
    return f"{listed(standing.names)} are level{precision}"


def _why(still_open: Sequence[Standing]) -> str:
    """`` (only 1 or 2 rounds)`` where too few rounds are the reason; else nothing."""
    numbers = sorted({standing.rounds for standing in still_open if standing.rounds is not None})
    if not numbers:
        return ""
    words = " or ".join(str(number or "no") for number in numbers)
    return f" (only {words} round{'' if numbers == [1] else 's'})"


def _of_points(count: int, total: int) -> str:
    if count == total:
        return "both points" if count == 2 else f"all {count} points"
    return f"{count} of {total} points"


def _any_of(total: int) -> str:
    return "either point" if total == 2 else f"any of {total} points"


def say_over_length(
    rows: pd.DataFrame,
    value: str,
    choice: str = "attention",
    *,
    highest: bool = False,
    evidence: str | None = None,
) -> str | None:
    """Which choice is first at the longest sequences, and from which length on, by verdicts."""
    word = "has the highest rate" if highest else "is fastest"
    parts = []
    for precision, part in _by_precision(rows, (choice,)):
        found = standings(part, value, (choice,), highest=highest, evidence=evidence)
        if found:
            parts.append(_say_lengths(found, part[part[value].notna()], choice, word, precision))
    return "; ".join(dict.fromkeys(parts)) or None


def _say_lengths(
    found: Sequence[Standing], known: pd.DataFrame, choice: str, word: str, precision: str
) -> str:
    """The leader at the longest sequences of most settings, and how far down it stays first.

    A setting is all that a panel of a figure has in common. Lengths that have a time but no
    standing, such as host-bound ones, end the reach of a leader.
    """
    best = pd.DataFrame([standing.best for standing in found])
    rows = pd.concat([known.assign(place=-1), best.assign(place=range(len(best)))])
    rows["panel"] = point_groups(rows, ["seq_len", "kv_len", choice])
    ends: list[tuple[Standing, int | None]] = []
    for _, panel in rows.groupby("panel"):
        mine = panel[panel["place"] >= 0].sort_values("seq_len", ascending=False)
        if mine.empty:
            continue
        ordered = [found[place] for place in mine["place"]]
        several = panel[panel["place"] < 0].groupby("seq_len").size()
        ends.append((ordered[0], _reach(ordered, sorted(several.index[several > 1]))))
    firsts = Counter(standing.first for standing, _ in ends if standing.first)
    if not firsts:
        level = {standing.names for standing, _ in ends if not standing.is_open}
        if len(level) == 1 and all(not standing.is_open for standing, _ in ends):
            return f"{listed(*level)} are level at the longest sequences{precision}"
        still_open = [standing for standing, _ in ends if standing.is_open]
        which = "which has the highest rate" if "rate" in word else "which is fastest"
        return f"{which} at the longest sequences{precision} {_NONE_TOLD}{_why(still_open)}"
    first, wins = firsts.most_common(1)[0]
    starts = [start for standing, start in ends if standing.first == first]
    if all(start is None for start in starts):
        since = "at every length"
    else:
        shortest = int(known["seq_len"].min())
        reached = [shortest if start is None else start for start in starts]
        since = f"from {span(reached, fmt.integer)} tokens on"
    if len(ends) == 1:
        return f"{first} {word}{precision} {since}"
    said = f"{first} {word}{precision} at the longest sequences of {wins} of {len(ends)} settings"
    rest = [f"{name} at {count}" for name, count in firsts.most_common()[1:]]
    if open_or_level := len(ends) - sum(firsts.values()):
        rest.append(f"none alone at {open_or_level}")
    return ", ".join([f"{said}, {since}", *rest])


def _reach(ordered: Sequence[Standing], lengths: Sequence[int]) -> int | None:
    """The shortest length from which the first stays first; None for all of them.

    Args:
        ordered: standings, the longest first.
        lengths: at which two or more were measured.
    """
    firsts = {int(standing.best["seq_len"]): standing.first for standing in ordered}
    longest = max(firsts)
    start = longest
    for length in sorted((length for length in lengths if length <= longest), reverse=True):
        if firsts.get(int(length)) != firsts[longest]:
            return start
        start = int(length)
    return None
