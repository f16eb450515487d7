"""One sentence that says what a table or figure shows, computed from its rows.

The sentences of a kind are alike, so that they can be compared between write-ups. Who is fastest,
and from which length on, is in :mod:`harness.sentences.leaders`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from harness.analysis import likeness
from harness.analysis.evidence import is_host_bound
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups
from parallel import BACKENDS, STRATEGIES


def sentence(*parts: str | None) -> str:
    """One sentence from the parts that are not empty: ``A is first; B runs out of memory.``"""
    words = "; ".join(part for part in parts if part)
    if not words:
        return ""
    return f"{words if _begins_with_a_name(words) else words[0].upper() + words[1:]}."


def _begins_with_a_name(words: str) -> bool:
    """Whether the first word is one that users type, which keeps its case in a sentence."""
    first, *rest = words.split()
    first = first.rstrip(",:;")
    # A pair of options: ``a / b``.
    chosen = first in BACKENDS or first in STRATEGIES or rest[:1] == ["/"]
    return chosen or any(character.isdigit() or character in "_(=/" for character in first)


def best_row(rows: pd.DataFrame, value: str, *, highest: bool = True) -> pd.Series:
    """The first row with the highest (or lowest) value."""
    values = rows[value].to_numpy(dtype=float)
    return rows.iloc[int(np.nanargmax(values if highest else -values))]


def span(values: Iterable[float], format: fmt.Format = fmt.factor) -> str:
    """``1.40× to 2.05×``; one value where both ends read alike."""
    known = [value for value in values if not fmt.is_missing(value)]
    low, high = format(min(known)), format(max(known))
    return low if low == high else f"{low} to {high}"


def percent_span(shares: Iterable[float]) -> str:
    """``12% to 38%`` of values that are parts of 1."""
    return span(shares, _whole_percent)


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f}%" if abs(share) >= 0.095 else f"{100 * share:.1f}%"


def listed(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *most, last = [str(name) for name in names]
    return f"{', '.join(most)} and {last}" if most else last


def by_name(values: Iterable[tuple[str, str]], unit: str = "") -> str:
    """``1.87× the mean with ring and 1.00× with zigzag and striped``; the unit once.

    Args:
        values: in words, each with the name that has it; alike ones behind each other are joined.
        unit: follows the first value.
    """
    joined: list[tuple[str, list[str]]] = []
    for value, name in values:
        if joined and joined[-1][0] == value:
            joined[-1][1].append(name)
        else:
            joined.append((value, [name]))
    units = [f" {unit}" if unit else "", *[""] * len(joined)]
    parts = [
        f"{value}{behind} with {listed(names)}"
        for (value, names), behind in zip(joined, units, strict=False)
    ]
    several = any(len(names) > 1 for _, names in joined)
    return ", ".join(parts) if several else listed(parts)


def from_wide(rows: pd.DataFrame, suffix: str, choice: str = "attention") -> pd.DataFrame:
    """Rows with one column per choice, ``{name}_{suffix}``, as one row per choice: ``value``."""
    names = [name for name in POINTS if name in rows and name != choice]
    parts = []
    for column in rows.columns:
        if not str(column).endswith(f"_{suffix}"):
            continue
        name = str(column).removesuffix(f"_{suffix}")
        part = rows[names].assign(
            value=rows[column],
            status=rows.get(f"{name}_status"),
            host_bound=rows.get(f"{name}_host_bound"),
            evidence=rows.get(
                f"{name}_{suffix.removesuffix('_median_ms').removesuffix('_tflops')}_evidence"
            ),
        )
        parts.append(part.assign(**{choice: name}))
    return pd.concat(parts, ignore_index=True) if parts else rows.iloc[:0]


def by_margin(ratio: float) -> str:
    """``by 12%``; from twice on ``by a factor of 8.45``."""
    return f"by {_whole_percent(ratio - 1)}" if ratio < 2 else f"by a factor of {fmt.number(ratio)}"


def say_over(
    rows: pd.DataFrame,
    speedup: str,
    verdict: str,
    baseline: str,
    choice: str = "attention",
    words: str = "",
    *,
    evidence: str | None = None,
) -> str | None:
    """``5 of 8 are FASTER than naive, by 1.10× to 2.05×, most by sdpa``, by their verdicts.

    Args:
        evidence: the column with the evidence of times that rank kernels. Those of a host do not,
            and are left out with all that is compared with them.
    """
    known = rows[rows[speedup].notna() & (rows[choice] != baseline)]
    if evidence is not None and evidence in rows:
        known = known[~_hidden(rows, choice, baseline, evidence)[known.index]]
    faster = known[known[verdict] == "FASTER"]
    if known.empty:
        return None
    over = words.removeprefix("over ") or baseline
    if faster.empty:
        if known[verdict].isin(["SLOWER", "SAME"]).any():
            return f"none of {len(known)} is FASTER than {over}"
        return None
    best = best_row(faster, speedup)
    if len(known) == 1:
        name = best[choice]
        return f"{name} is FASTER than {over}, by {fmt.factor(best[speedup])}"
    verb = "is" if len(faster) == 1 else "are"
    most = "" if len(faster) == 1 else "most by "
    return (
        f"{len(faster)} of {len(known)} {verb} FASTER than {over}, by {span(faster[speedup])}, "
        f"{most}{best[choice]}{_where(best, known, choice)}"
    )


def _hidden(rows: pd.DataFrame, choice: str, baseline: str, evidence: str) -> pd.Series:
    """Which rows have a time of the host, or are compared with one."""
    bound = rows[evidence].map(is_host_bound).astype(bool)
    points = point_groups(rows, [choice])
    hidden = bound | points.isin(points[bound & (rows[choice] == baseline)])
    return hidden.astype(bool)


def _where(row: pd.Series, rows: pd.DataFrame, choice: str) -> str:
    """`` at sequence length 4,096``: the points that tell the row from the others."""
    names = [name for name in _TELLING if name in rows and name != choice]
    names = [name for name in names if rows[name].nunique() > 1 and row[name] == row[name]]
    words = [POINTS[name].describe(row[name]) for name in names]
    return f" at {', '.join(words)}" if words else ""


_TELLING = ("model", "precision", "head_dim", "seq_len")


def say_unlike(differences: Iterable[list[str]], what: str, baseline: str) -> str | None:
    """``efficiency is not claimed of 7 of 8 rows, measured with other clocks than the one rank``

    Args:
        differences: of each row from the ``baseline``, by :mod:`harness.analysis.likeness`.
        what: is not claimed of rows with differences.
    """
    rows = list(differences)
    words = {word for row in rows for word in row}
    if not words:
        return None
    number = sum(map(bool, rows))
    how = " or ".join(phrase for word, phrase in likeness.PHRASES.items() if word in words)
    measured = f"measured {how} than {baseline}"
    if number == len(rows):
        return f"{what} is not claimed, as {'it was' if number == 1 else 'all were'} {measured}"
    return f"{what} is not claimed of {number} of {len(rows)}, {measured}"


def told(rows: pd.DataFrame, ratio: str, verdict: str) -> pd.DataFrame:
    """The rows whose ratio of times has a verdict; nobody can tell what the others say."""
    return rows[rows[ratio].notna() & rows[verdict].isin(["FASTER", "SLOWER", "SAME"])]


def say_out_of_memory(rows: pd.DataFrame, choice: str = "attention") -> str | None:
    """Which choices run out of memory: ``naive runs out of memory from 16,384 tokens on``."""
    out = rows[rows["status"] == "oom"]
    if out.empty:
        return None
    names = sorted(out[choice].dropna().unique())
    if rows["seq_len"].nunique() > 1:
        shortest = out.groupby(choice)["seq_len"].min()
        first = shortest.min()
        names = [str(name) for name in shortest.index[shortest == first]]
        where = f" first, at {fmt.integer(first)} tokens"
    elif out["model"].notna().any():
        smallest = min(out["model"].dropna(), key=POINTS["model"].rank)
        where = f" with model {smallest}"
    else:
        where = ""
    verb = "runs" if len(names) == 1 else "run"
    return f"{listed(names)} {verb} out of memory{where}"


def say_growth(rows: pd.DataFrame, value: str) -> str | None:
    """``takes 14.2× to 16.0× as long for 4× the length``, between the two longest sequences."""
    known = rows[rows[value].notna()]
    ratios, steps = [], []
    for _, mine in known.groupby(point_groups(known, ["seq_len", "kv_len"])):
        mine = mine.sort_values("seq_len")
        if len(mine) > 1:
            ratios.append(mine[value].iloc[-1] / mine[value].iloc[-2])
            steps.append(mine["seq_len"].iloc[-1] / mine["seq_len"].iloc[-2])
    if not ratios or len(set(steps)) > 1:
        return None
    return f"takes {span(ratios)} as long for {steps[0]:g}{fmt.TIMES} the length at the longest"
