"""Footnotes on the cases of a table: why some ended, which revisions and hosts measured them."""

from __future__ import annotations

import re
from textwrap import shorten

import pandas as pd

from harness.cases import format as fmt

ENDED = ("failed", "timeout", "wrong")
"""Statuses that a table says in a word, and whose reason is an error's."""

MOST_REASONS = 3

LONGEST_REASON = 160


def reasons(cases: pd.DataFrame) -> list[str]:
    """A footnote with the first reasons of cases that ended with an error, and their numbers."""
    ended = cases[cases["status"].isin(ENDED) & cases["reason"].notna()]
    words = [
        f"{fmt.STATUS_WORDS[status]}, {_in_short(reason)}"
        for status, reason in zip(ended["status"], ended["reason"], strict=True)
    ]
    counts = pd.Series(words, dtype=object).value_counts(sort=False)
    found = [f"{text} ({fmt.counted(int(number), 'case')})" for text, number in counts.items()]
    if len(found) > MOST_REASONS:
        found[MOST_REASONS:] = [f"{len(found) - MOST_REASONS} more in the report"]
    return [f"Without a result: {'; '.join(found)}."] if found else []


def _in_short(reason: str) -> str:
    """An error's first line, without the number of the rank that met it."""
    first = reason.strip().partition("\n")[0]
    return shorten(re.sub(r"^rank \d+", "a rank", first), LONGEST_REASON, placeholder=" ...")


def revisions(cases: pd.DataFrame) -> list[str]:
    """A footnote with the revisions that measured the cases, where there are several."""
    counts = cases["revision"].value_counts()
    if len(counts) < 2:
        return []
    if cases["source"].map(bool).all() and not cases["stale"].any():
        return [f"Measured by {len(counts)} revisions whose measured code is that of now."]
    found = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    words = [f"{revision} ({fmt.counted(int(number), 'case')})" for revision, number in found]
    return [f"Measured by {len(words)} revisions: {', '.join(words)}."]


def hosts(cases: pd.DataFrame) -> list[str]:
    """A footnote with the hosts that measured the cases, where they may be several."""
    counts = cases["host"].value_counts()
    found = sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    words = [f"{host} ({fmt.counted(int(number), 'case')})" for host, number in found]
    unknown = int(cases["host"].isna().sum())
    if unknown and words:
        words.append(f"not recorded ({fmt.counted(unknown, 'case')})")
    if len(words) < 2:
        return []
    noun = "hosts" if unknown else f"{len(found)} hosts,"
    return [f"Measured on {noun} whose times may differ: {', '.join(words)}."]
