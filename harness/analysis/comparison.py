"""Candidates against their baseline, among cases equal in everything else."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from harness.analysis.host_time import host_bound
from harness.analysis.row_verdicts import any_apart, row_verdicts
from harness.cases import format as fmt
from harness.cases.columns import POINTS, point_groups
from harness.cases.peers import peer_groups
from harness.cases.task import WHOLE_PHASES, task_type


@dataclass(kw_only=True, slots=True, frozen=True)
class Axis:
    """One choice that candidates differ in."""

    choice: str
    columns: tuple[str, ...]
    """All columns that the choice decides."""
    needs_baseline: bool
    """Whether a group without a finished baseline is left out, rather than given another one."""
    other_baseline: str | None = None
    """The baseline, if it is not the choice that declares itself one."""

    @property
    def baseline(self) -> str | None:
        return self.other_baseline or POINTS[self.choice].baseline

    @property
    def words(self) -> str:
        """``over naive attention``, for titles and sentences."""
        looks, name = POINTS[self.choice].all_looks(), self.baseline
        return f"over {looks[name].baseline if name in looks else name}"


AXES = {
    "attention": Axis(choice="attention", columns=("attention",), needs_baseline=False),
    "compile_scope": Axis(
        choice="compile_scope", columns=("compile_scope", "compile_mode"), needs_baseline=True
    ),
    "strategy": Axis(choice="strategy", columns=("strategy",), needs_baseline=False),
    "precision": Axis(choice="precision", columns=("precision",), needs_baseline=True),
}

HIDDEN = "the device waited for its host, which hides how fast the kernels are"
"""Why backends are not ranked by host-bound times."""


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the phases that their tasks declare comparable."""
    pairs = zip(frame["task"], frame["phase"], strict=True)
    whole = [phase in task_type(task).compared_phases for task, phase in pairs]
    return frame[whole].reset_index(drop=True)


def fullest_mode(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep the mode that includes the others, where a point was measured in several."""
    if frame.empty:
        return frame
    pairs = zip(frame["task"], frame["mode"], strict=True)
    ranks = [
        modes.index(mode) if mode in (modes := task_type(task).modes) else 0 for task, mode in pairs
    ]
    rank = pd.Series(ranks, index=frame.index)
    fullest = rank.groupby(point_groups(frame, ["mode"])).transform("max")
    return frame[rank == fullest]


def compare_strategies(frame: pd.DataFrame) -> pd.DataFrame:
    """Strategies against PyTorch's DDP, and against those that they name as their peers."""
    by_peer = _compare_with_peers(frame)
    compared = compare(frame, AXES["strategy"])
    # Without DDP another strategy is the baseline, which may be that of its peer as well.
    both_ways = {*_pairs(by_peer), *((other, one) for one, other in _pairs(by_peer))}
    compared = compared[[pair not in both_ways for pair in _pairs(compared)]]
    return pd.concat([compared, by_peer], ignore_index=True)


def _pairs(compared: pd.DataFrame) -> list[tuple[str, str]]:
    """Cases and their baselines by their ids."""
    if compared.empty:
        return []
    return list(zip(compared["case_id"], compared["baseline_id"], strict=True))


def _compare_with_peers(frame: pd.DataFrame) -> pd.DataFrame:
    """Strategies against their peers, where options of both are equal."""
    found = [frame.iloc[:0]]
    for peers, candidates in peer_groups([dict(case["parallel"]) for case in frame["case"]]):
        names = frame["strategy"].iloc[peers].unique()
        if len(names) == 1:
            axis = replace(AXES["strategy"], other_baseline=names[0], needs_baseline=True)
            found.append(compare(frame.iloc[sorted(peers + candidates)], axis))
    return pd.concat(found, ignore_index=True)


def compare(frame: pd.DataFrame, axis: Axis) -> pd.DataFrame:
    """The candidates of every group, with their baseline and the columns of the verdict.

    These are those of :data:`harness.analysis.row_verdicts.COLUMNS`; the ratio is the baseline's
    time over the candidate's, so more than 1 is faster. ``axis`` is the choice that the two differ
    in. ``apart_mark`` holds the symbols of footnotes where both were measured long after each
    other, and where they were on different hosts; of two devices nothing is compared. Backends are
    UNCLEAR where either time is host-bound (:data:`HIDDEN`).
    Empty where nothing differs in the choice alone.
    """
    names = sorted(frame[axis.choice].unique(), key=POINTS[axis.choice].rank)
    names.sort(key=lambda name: name != axis.baseline)
    pair = pd.DataFrame({"point": point_groups(frame, axis.columns), "phase": frame["phase"]})
    rows = frame.assign(
        group=pair.groupby(["point", "phase"]).ngroup(),
        place=frame[axis.choice].map({name: index for index, name in enumerate(names)}),
    )
    usable = rows[rows["status"] == "ok"]
    if axis.needs_baseline:
        usable = usable[usable[axis.choice] == axis.baseline]
    first = usable.sort_values(["group", "place"], kind="stable").drop_duplicates("group")
    first = first.set_index("group")
    rows = rows[rows["group"].isin(first.index)]
    baseline = first.loc[rows["group"]]
    baseline.index = rows.index
    rows = rows.assign(
        baseline=baseline[axis.choice],
        baseline_id=baseline["case_id"],
        baseline_ms=baseline["median_ms"],
        apart_mark=_marks(rows, baseline),
        axis=axis.choice,
    )
    rows = rows[rows["case_id"] != rows["baseline_id"]]
    baseline = baseline.loc[rows.index]
    rows["baseline_host_bound"] = host_bound(baseline)
    compared = pd.concat([rows, row_verdicts(baseline, rows)], axis=1)
    if axis.choice == "attention":
        hidden = hides_kernels(compared) & compared["verdict"].notna()
        compared.loc[hidden, "verdict"] = "UNCLEAR"
        compared.loc[hidden, "why"] = HIDDEN
    return compared


def hides_kernels(rows: pd.DataFrame) -> pd.Series:
    """The compared rows whose own time or whose baseline's is that of a host."""
    return host_bound(rows) | rows["baseline_host_bound"].astype(bool)


def _marks(rows: pd.DataFrame, baseline: pd.DataFrame) -> list[str]:
    apart = _apart(rows["rounds_started_at"], baseline["rounds_started_at"])
    hosts = host_marks(rows["machine"], baseline["machine"])
    return [one + other for one, other in zip(apart, hosts, strict=True)]


def host_marks(machines: pd.Series, baseline: pd.Series) -> list[str]:
    """The mark of each pair that was measured on two hosts."""
    pairs = zip(machines, baseline, strict=True)
    return [fmt.TRIANGLE if one.is_other(other) else "" for one, other in pairs]


def _apart(started: pd.Series, baseline: pd.Series) -> list[str]:
    """The mark of each pair that was measured neither in turns nor soon after each other."""
    pairs = zip(started, baseline, strict=True)
    return [fmt.PILCROW if any_apart(*pair) else "" for pair in pairs]


def fullest_phase(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case: of the phase that includes the others, or its only one."""
    places = {phase: place for place, phase in enumerate(WHOLE_PHASES)}
    place = frame["phase"].map(places).fillna(len(places))
    ordered = frame.assign(place=place).sort_values("place", kind="stable")
    return ordered.drop_duplicates("case_id").drop(columns="place").sort_index()


def paired(
    one: pd.DataFrame, other: pd.DataFrame, *, has_samples: bool, same_within: float
) -> pd.DataFrame:
    """The rows of ``other`` with those of ``one``, both indexed alike, beside them.

    Adds ``a_value``, ``a_status``, ``a_machine``, the columns of the verdict (``ratio`` is one over
    other) and ``outcome``: the verdict, or ``lost`` and ``gained`` where only one side has a
    result. Without samples, as for memory, there is no interval, and the words are LESS and MORE.
    """
    if has_samples:
        found = row_verdicts(one, other, band=same_within)
    else:
        ratio = one["value"] / other["value"]
        found = pd.DataFrame({"ratio": ratio, "ratio_low": np.nan, "ratio_high": np.nan})
        found = found.assign(band=same_within, why="")
        found["verdict"] = [_memory_word(value, same_within) for value in ratio]
    statuses = zip(one["status"], other["status"], found["verdict"], strict=True)
    words = [word or _one_sided(*pair) for *pair, word in statuses]
    found["outcome"] = pd.Series(words, index=other.index, dtype=object)
    sides = other.assign(a_value=one["value"], a_status=one["status"], a_machine=one["machine"])
    return pd.concat([sides, found], axis=1)


def _memory_word(ratio: float, same_within: float) -> str | None:
    if ratio != ratio:
        return None
    if abs(ratio - 1) <= same_within:
        return "SAME"
    return "LESS" if ratio > 1 else "MORE"


def _one_sided(a_status: str, b_status: str) -> str | None:
    """The outcome where not both have a result."""
    if a_status == "ok" != b_status:
        return "lost"
    return "gained" if b_status == "ok" != a_status else None
