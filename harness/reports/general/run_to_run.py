"""The run-to-run level: how far the processes that measured one case lie apart."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from harness.analysis.row_verdicts import calibration_rows
from harness.analysis.run_to_run import run_to_run_level, run_to_run_levels
from harness.analysis.stats import median
from harness.cases import format as fmt
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import sentence

CAPTION = (
    "Cases measured in several processes, by their longest phase. Level: the standard deviation of "
    "log time between processes, less what varies within one, and at least half of it; verdicts on "
    "runs of this machine use those of all cases of a kind together, apart for cases whose device "
    "waited for its host in some round: {levels}."
)

NONE = "none, as one case in three processes tells too little"


@table("run_to_run")
def build(frame: pd.DataFrame) -> Table | None:
    rows = calibration_rows(frame)
    if rows.empty:
        return None
    pooled = run_to_run_levels(rows["repeated"])
    levels = [
        f"{level.percent} {kind.words}{f' on {kind.host}' if kind.host else ''} "
        f"({fmt.counted(level.num_cases, 'case')} in {level.num_processes} processes)"
        for kind, level in sorted(pooled.items(), key=lambda item: str(item[0]))
    ]
    owned = [run_to_run_level([case]) for case in rows["repeated"]]
    rows = rows.assign(
        mark=marks_of(rows),
        num_processes=[level.num_processes for level in owned],
        num_rounds=[len(rounds) for rounds in rows["rounds_ms"]],
        level=[level.std_log for level in owned],
        widest=[_widest(case.rounds_ms) for case in rows["repeated"]],
    )
    return make_table(
        caption=CAPTION.format(levels="; ".join(levels) or NONE),
        rows=rows,
        lead=["task", "model", "attention"],
        metrics=[
            Column(key="phase", header="phase"),
            Column(key="median_ms", header="median (ms)", format=fmt.number, mark="mark"),
            Column(key="hindered", header="host-bound in a round", format=fmt.yes_no),
            Column(key="num_processes", header="processes", format=fmt.integer),
            Column(key="num_rounds", header="rounds", format=fmt.integer),
            Column(key="level", header="level (%)", format=fmt.percent),
            Column(key="widest", header="slowest over fastest round", format=fmt.factor),
        ],
    )


def _widest(rounds_ms: Sequence[Sequence[float]]) -> float:
    medians = list(map(median, rounds_ms))
    return max(medians) / min(medians)


@finding("run_to_run")
def say(rows: pd.DataFrame) -> str:
    worst = rows.sort_values("level", kind="stable").iloc[-1]
    return sentence(
        f"processes lie apart by {100 * rows['level'].median():.2g}% in the median case and by "
        f"{100 * worst['level']:.2g}% in the worst, which takes {fmt.number(worst['median_ms'])} ms"
    )
