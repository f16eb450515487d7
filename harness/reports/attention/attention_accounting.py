"""CS336 problem pytorch_attention: the memory of the first length that does not fit, by tensor.

Lengths beyond the measured ones are doubled until the prediction exceeds the device's memory. What
was not measured says so: its row is a prediction, of the formulas whose peaks the measured rows
hold against the allocator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.columns import point_groups
from harness.render.rows import of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import percent_span, sentence, span
from kernels import accounting

CAPTION = (
    "Memory of attention alone at its peak, by tensor and formula, in GiB: from the longest "
    "sequence that was measured, doubled until it does not fit. Kept for backward: what is in use "
    "between the passes, over that of half the length, and what it were if the scores were "
    "computed again instead of kept. The sum says nothing of what the allocator needs besides: a "
    "tensor takes a free block of its whole size."
)

PREDICTED = "not measured"
OUT_OF_MEMORY = "OOM"
MAX_DOUBLINGS = 10
MOST = 0.5
"""Of the peak: tensors of less are details, which narrow terminals leave out."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Held:
    """What a case holds by formula, in bytes."""

    parts: dict[str, float]
    """At the peak."""
    kept: float
    """Between the passes."""
    kept_without_scores: float

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


@table("attention_accounting")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    # A case with a number of keys of its own has no other length.
    alike = [case["task"].get("kv_len") is None for case in calls["case"]]
    calls = calls[calls["device_memory_gib"].notna() & pd.Series(alike, index=calls.index)]
    if calls.empty:
        return None
    cases = per_case(calls)
    rows: list[dict[Any, Any]] = []
    for _, group in cases.groupby(point_groups(cases, ["seq_len", "kv_len"]), sort=False):
        rows += _lengths(group.sort_values("seq_len"))
    if not rows:
        return None
    parts = list(dict.fromkeys(name for row in rows for name in row["parts"]))
    found = pd.DataFrame(rows)
    for name in parts:
        found[f"part {name}"] = [row["parts"].get(name, 0.0) / GIB for row in rows]
    return make_table(
        caption=CAPTION,
        rows=found,
        lead=["attention", "head_dim", "seq_len"],
        keep=["head_dim", "seq_len"],
        without=["kv_len"],
        metrics=[
            *(
                Column(
                    key=f"part {name}",
                    header=name.replace("_", " "),
                    format=fmt.number,
                    detail=not (found[f"part {name}"] > MOST * found["needs"]).any(),
                )
                for name in parts
            ),
            Column(key="needs", header="all, predicted", format=fmt.number),
            Column(key="measured", header="all, measured"),
            Column(
                key="predicted_over_measured",
                header="predicted / measured",
                format=fmt.factor,
                detail=True,
            ),
            Column(key="device_memory_gib", header="device has", format=fmt.number),
            Column(key="fits", header="sum fits", format=fmt.yes_no),
            Column(key="kept", header="kept for backward", format=fmt.number),
            Column(key="growth", header="of half the length", format=fmt.factor, detail=True),
            Column(key="kept_without", header="without scores", format=fmt.number),
        ],
    )


@finding("attention_accounting")
def say(rows: pd.DataFrame) -> str | None:
    out = rows[~rows["fits"].astype(bool)]
    first = out[out["seq_len"] == out["seq_len"].min()]
    if first.empty:
        return None
    scores = first["scores_share"].dropna()
    doubled = first["growth"].dropna()
    known = rows["predicted_over_measured"].dropna()
    measured = (first["measured"] == OUT_OF_MEMORY).all()
    needs = span(first["needs"], fmt.number)
    return sentence(
        f"the first length whose tensors do not fit is {fmt.integer(first['seq_len'].iloc[0])}, "
        f"{'as measured' if measured else 'by prediction and not measured'}: it needs {needs} GiB "
        f"of {fmt.number(first['device_memory_gib'].iloc[0])}"
        + (f", {percent_span(scores)} of it for scores" if len(scores) else ""),
        _early(rows[rows["fits"].astype(bool) & (rows["measured"] == OUT_OF_MEMORY)]),
        f"what is kept for backward grows {span(doubled)} when the length doubles, to "
        f"{span(first['kept'], fmt.number)} GiB, and would be "
        f"{span(first['kept_without'], fmt.number)} GiB with scores computed again"
        if len(doubled)
        else None,
        f"predictions are {percent_span(known)} of measured peaks" if len(known) else None,
    )


def _early(rows: pd.DataFrame) -> str | None:
    """The first length that ran out of memory although its tensors together would not."""
    if rows.empty:
        return None
    first = rows[rows["seq_len"] == rows["seq_len"].min()]
    return (
        f"{fmt.integer(first['seq_len'].iloc[0])} ran out of memory too, although its tensors are "
        f"{span(first['needs'], fmt.number)} GiB"
    )


def _lengths(group: pd.DataFrame) -> list[dict[Any, Any]]:
    """Rows from the longest length that ran to the first that does not fit."""
    ran = group[group["status"] == "ok"]
    if ran.empty:
        return []
    longest = ran.iloc[-1].to_dict()
    rows: list[dict[Any, Any]] = []
    for doubling in range(MAX_DOUBLINGS):
        length = int(longest["seq_len"]) * 2**doubling
        held = _held({**longest["case"], "seq_len": length})
        if held is None:
            return []
        same = group[group["seq_len"] == length]
        row = same.iloc[-1].to_dict() if len(same) else {**longest, "seq_len": length}
        fits = held.peak <= longest["device_memory_gib"] * GIB
        cells = _cells(held, row if len(same) else None)
        growth = cells["kept"] / rows[-1]["kept"] if rows else float("nan")
        rows.append(row | cells | {"fits": fits, "growth": growth})
        if not fits:
            break
    return rows


def _cells(held: Held, measured: dict[Any, Any] | None) -> dict[str, Any]:
    if measured is None:
        words = PREDICTED
    elif measured["status"] == "oom":
        words = OUT_OF_MEMORY
    else:
        words = fmt.number(measured["peak_memory_gib"])
    return {
        "parts": held.parts,
        "needs": held.peak / GIB,
        "scores_share": held.parts.get("scores", float("nan")) / held.peak,
        "measured": words,
        "predicted_over_measured": (measured or {}).get("predicted_over_measured"),
        "kept": held.kept / GIB,
        "kept_without": held.kept_without_scores / GIB,
    }


def _held(values: dict[str, Any]) -> Held | None:
    """None where this version cannot read the case, or predicts nothing of it."""
    try:
        case = Case.from_dict(values)
    except (ValueError, TypeError, KeyError):
        return None
    problem = case.task.attention_problem(case)
    parts, kept = case.task.predicted_memory(case), case.task.predicted_before_backward(case)
    if problem is None or parts is None or kept is None:
        return None
    without = accounting.memory(problem, keeps_scores=False)
    return Held(parts=parts, kept=sum(kept.values()), kept_without_scores=sum(without.values()))
