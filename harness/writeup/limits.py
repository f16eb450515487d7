"""Limits of the results in sentences: disturbed, stale and foreign rows, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd

from harness.analysis import disturbance
from harness.cases import format as fmt
from harness.store.record import Record
from harness.writeup.document import Gap

NAMED = 4
"""Hosts, reasons or gaps that a sentence names."""


def limits_of(
    records: Sequence[Record], frames: Sequence[pd.DataFrame], gaps: Sequence[Gap]
) -> list[tuple[str, str]]:
    """A heading and a sentence for each limit that these results have.

    Args:
        frames: rows of :func:`harness.writeup.document.facts_of`, one for each case and phase.
    """
    found = [("Without a number", _without_number(records))]
    if frames:
        rows = pd.concat(frames)
        found += [
            ("Disturbed", _disturbed(rows)),
            ("Bound by the host", _host_bound(rows)),
            ("Older than the code", _stale(rows)),
            ("Hosts", _hosts(rows)),
            ("Revisions", _revisions(records)),
        ]
    found.append(("Not measured", _not_measured(gaps)))
    return [(heading, words) for heading, words in found if words]


def _without_number(records: Sequence[Record]) -> str:
    counts = Counter(record.status for record in records if record.status != "ok")
    if not counts:
        return ""
    words = ", ".join(f"{count} {fmt.STATUS_WORDS[name]}" for name, count in counts.most_common())
    return f"{counts.total()} of {fmt.counted(len(records), 'case')} have no result: {words}."


def _disturbed(rows: pd.DataFrame) -> str:
    ran = rows[rows["status"] == "ok"]
    words = (
        ran.explode("disturbed")
        .dropna(subset="disturbed")
        .drop_duplicates(["case_id", "disturbed"])
    )
    if words.empty:
        return ""
    counts = words["disturbed"].value_counts()
    said = "; ".join(
        f"{word} in {counts[word]} ({meaning})"
        for word, meaning in disturbance.MEANINGS.items()
        if word in counts
    )
    return (
        f"{words['case_id'].nunique()} of {ran['case_id'].nunique()} cases with a result were "
        f"disturbed in a phase, and are marked {fmt.DAGGER}: {said}."
    )


def _host_bound(rows: pd.DataFrame) -> str:
    waiting = rows[rows["host_bound"].astype(bool)]["case_id"].nunique()
    if not waiting:
        return ""
    return (
        f"In {fmt.counted(waiting, 'case')} the device waited for its host over 5% of a phase "
        f"({fmt.DOUBLE_BAR}): such times do not rank kernels."
    )


def _stale(rows: pd.DataFrame) -> str:
    number = rows[rows["stale"].astype(bool)]["case_id"].nunique()
    if not number:
        return ""
    return (
        f"{fmt.counted(number, 'case')} ran other kernels, model code or schemes than those of now "
        f"({fmt.DIAMOND})."
    )


def _hosts(rows: pd.DataFrame) -> str:
    cases = rows.drop_duplicates("case_id")
    cases = cases[cases["status"] == "ok"]
    hosts = cases["host"].dropna().value_counts()
    unknown = int(cases["host"].isna().sum())
    if len(hosts) + bool(unknown) < 2:
        return ""
    named = [f"{host} ({count})" for host, count in hosts.head(NAMED).items()]
    if len(hosts) > NAMED:
        named.append(f"{len(hosts) - NAMED} others")
    if unknown:
        named.append(f"not recorded ({unknown})")
    return (
        f"Cases were measured on several hosts, whose times may differ: {', '.join(named)}. "
        f"Ratios between hosts are marked {fmt.TRIANGLE}."
    )


def _revisions(records: Sequence[Record]) -> str:
    revisions = {record.environment.get("git_revision") for record in records} - {None}
    if len(revisions) < 2:
        return ""
    return (
        f"Cases were measured by {len(revisions)} revisions of this project; those whose measured "
        "code has changed since are the older ones above."
    )


def _not_measured(gaps: Sequence[Gap]) -> str:
    if not gaps:
        return "Every case of every sweep has a result."
    named = "; ".join(gap.what for gap in gaps[:NAMED])
    rest = f"; and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
    return f"{named}{rest}."
