"""Who is first at each measured point, as far as verdicts tell.

A row is first where the verdict on every other row at its point is SLOWER. Rows that are the SAME
as the best are level with it; what is UNCLEAR leaves the point open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from harness.analysis.evidence import is_evidence, is_host_bound, too_few_rounds, words_between
from harness.analysis.host_time import host_bound
from harness.cases.columns import point_groups

Name = Callable[[pd.Series], str]
"""How sentences call a row."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Standing:
    """The rows of one point, ranked by verdict."""

    best: pd.Series
    """The row with the best value."""
    names: tuple[str, ...]
    """Its name, and those of all others that no verdict calls slower."""
    is_open: bool
    """Whether a verdict between the best and one of the others is missing."""
    margin: float
    """How many times better the best is than the next; 1 or more."""
    rounds: int | None
    """Their number where they are too few for a verdict; else None."""

    @property
    def first(self) -> str | None:
        """The name of the one that is first; None where others are level or it cannot be told."""
        return None if self.is_open or len(self.names) > 1 else self.names[0]


def evidence_key(value: str, rows: pd.DataFrame) -> str:
    """The column with the evidence for ``value``: ``step_evidence`` for ``step_median_ms``."""
    for ending in ("_median_ms", "_tflops", "_ms"):
        if value.endswith(ending) and (key := f"{value.removesuffix(ending)}_evidence") in rows:
            return key
    return "evidence"


def rankable(
    rows: pd.DataFrame, value: str, varied: Sequence[str], evidence: str | None = None
) -> pd.DataFrame:
    """The rows at points where two or more have a value, with ``point`` and ``evidence``.

    Points with a host-bound time are left out where kernels are ranked rather than strategies: the
    host hides which one is faster.
    """
    key = evidence or evidence_key(value, rows)
    # A column of None would not keep mappings apart from missing values.
    proof = rows[key] if key in rows else pd.Series(None, index=rows.index, dtype=object)
    rows = rows.assign(point=point_groups(rows, varied), evidence=proof.astype(object))
    if list(varied) != ["strategy"]:
        told = rows["evidence"].map(is_evidence).astype(bool)
        bound = rows["evidence"].map(is_host_bound).astype(bool).where(told, host_bound(rows))
        rows = rows[~rows["point"].isin(rows["point"][bound.astype(bool)])]
    rows = rows[rows[value].notna()]
    return rows[rows.groupby("point")[value].transform("size") > 1]


def standings(
    rows: pd.DataFrame,
    value: str,
    varied: Sequence[str] = ("attention",),
    *,
    highest: bool = False,
    evidence: str | None = None,
    name: Name | None = None,
) -> list[Standing]:
    """The standing at each point at which two or more rows have a value.

    Args:
        value: a time, or a rate over the same work (``highest``).
        varied: columns in which the rows of one point may differ.
        evidence: the column with their evidence; :func:`evidence_key` by default.
        name: of a row; its value in the first column of ``varied`` by default.
    """
    rows = rankable(rows, value, varied, evidence)
    rows = rows.sort_values(["point", value], ascending=[True, not highest], kind="stable")
    found = []
    for _, group in rows.groupby("point"):
        best, others = group.iloc[0], group.iloc[1:]
        words = words_between([best["evidence"]] * len(others), others["evidence"].tolist())
        names = [name(row) if name else str(row[varied[0]]) for _, row in group.iterrows()]
        behind = [word == "SLOWER" for word in words]
        second = others[value].iloc[0]
        found.append(
            Standing(
                best=best,
                names=(
                    names[0],
                    *(word for word, slower in zip(names[1:], behind, strict=True) if not slower),
                ),
                is_open=any(word not in ("SLOWER", "SAME") for word in words),
                margin=float(best[value] / second if highest else second / best[value]),
                rounds=too_few_rounds(group["evidence"].tolist()),
            )
        )
    return found
