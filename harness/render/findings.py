"""One sentence that says what a table or figure shows, computed from its rows.

The sentences of a kind are alike, so that they can be compared between write-ups: who is
fastest and by how much, from which length on, and where memory runs out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from harness.analysis.host_time import host_bound
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
        )
        parts.append(part.assign(**{choice: name}))
    return pd.concat(parts, ignore_index=True) if parts else rows.iloc[:0]


def leaders(
    rows: pd.DataFrame,
    value: str,
    varied: Sequence[str] = ("attention",),
    *,
    highest: bool = False,
) -> pd.DataFrame:
    """The best row of each point at which two or more have a value.

    Points with a host-bound time are left out where kernels are ranked rather than strategies: the
    host hides which one is faster. ``margin`` is how many times better a row is than the next one,
    ``point`` numbers the points that differ in more than ``varied``.
    """
    rows = rows.assign(point=point_groups(rows, varied))
    if list(varied) != ["strategy"]:
        rows = rows[~rows["point"].isin(rows["point"][host_bound(rows)])]
    rows = rows[rows[value].notna()].sort_values(value, ascending=not highest, kind="stable")
    rows = rows[rows.groupby("point")[value].transform("size") > 1]
    if rows.empty:
        return rows.assign(margin=[])
    second = rows[rows.groupby("point").cumcount() == 1].set_index("point")[value]
    best = rows.drop_duplicates("point").sort_values("point")
    ratio = best[value] / best["point"].map(second)
    return best.assign(margin=ratio if highest else 1 / ratio)


def say_fastest(
    rows: pd.DataFrame,
    value: str,
    varied: Sequence[str] = ("attention",),
    *,
    highest: bool = False,
    word: str = "fastest",
) -> str | None:
    """``sdpa is fastest at 5 of 6 points, by 12% over the next (median), ahead of flex at 1``"""
    best = leaders(rows, value, varied, highest=highest)
    if best.empty:
        return None
    counts = best[varied[0]].value_counts()
    first, wins = str(counts.index[0]), int(counts.iloc[0])
    margin = _by(float(best.loc[best[varied[0]] == first, "margin"].median()))
    if len(best) == 1:
        return f"{first} is {word}, {margin} over the next"
    where = f"{wins} of {len(best)} points"
    if wins == len(best):
        where = "both points" if wins == 2 else f"all {wins} points"
    others = [f"{name} at {count}" for name, count in counts.iloc[1:4].items()]
    rest = f", ahead of {listed(others)}" if others else ""
    return f"{first} is {word} at {where}, {margin} over the next (median){rest}"


def _by(ratio: float) -> str:
    """``by 12%``; from twice on ``by a factor of 8.45``."""
    return f"by {_whole_percent(ratio - 1)}" if ratio < 2 else f"by a factor of {fmt.number(ratio)}"


def say_over(
    rows: pd.DataFrame,
    speedup: str,
    baseline: str,
    choice: str = "attention",
    words: str = "",
) -> str | None:
    """``the largest speed-up over naive is 2.05×, of sdpa``."""
    known = rows[rows[speedup].notna() & (rows[choice] != baseline)]
    if known.empty:
        return None
    best = best_row(known, speedup)
    gain = f"the largest speed-up {words or f'over {baseline}'} is {fmt.factor(best[speedup])}"
    return f"{gain}, of {best[choice]}{_where(best, known, choice)}"


def _where(row: pd.Series, rows: pd.DataFrame, choice: str) -> str:
    """`` at sequence length 4,096``: the two points that tell the row from the others."""
    names = [name for name in ("model", "head_dim", "seq_len") if name in rows and name != choice]
    names = [name for name in names if rows[name].nunique() > 1 and row[name] == row[name]]
    words = [POINTS[name].describe(row[name]) for name in names]
    return f" at {', '.join(words)}" if words else ""


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


def say_over_length(
    rows: pd.DataFrame, value: str, choice: str = "attention", *, highest: bool = False
) -> str | None:
    """Which choice leads at the longest sequences, and from which length on."""
    best = leaders(rows, value, (choice,), highest=highest)
    if best.empty:
        return None
    varied = ("seq_len", "kv_len", choice, "point", "margin", value)
    best = best.assign(panel=point_groups(best, [name for name in varied if name in POINTS]))
    shortest = int(rows.loc[rows[value].notna(), "seq_len"].min())
    ends: list[tuple[str, int, int]] = []
    for _, panel in best.groupby("panel"):
        panel = panel.sort_values("seq_len")
        leader = panel[choice].iloc[-1]
        lasting = (panel[choice] == leader)[::-1].cummin()[::-1]
        lengths = panel["seq_len"]
        ends.append((str(leader), int(lengths[lasting].min()), shortest))
    counts = pd.Series([leader for leader, _, _ in ends]).value_counts()
    first = str(counts.index[0])
    mine = [(start, shortest) for leader, start, shortest in ends if leader == first]
    word = "has the highest rate" if highest else "is fastest"
    if all(start == shortest for start, shortest in mine):
        since = "at every length"
    else:
        since = f"from {span((start for start, _ in mine), fmt.integer)} tokens on"
    if len(ends) == 1:
        return f"{first} {word} {since}"
    return (
        f"{first} {word} at the longest sequences of {len(mine)} of {len(ends)} settings, {since}"
    )
