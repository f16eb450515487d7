"""The largest tensors at the peak, and where they came from (memory_profiling, question e)."""

from __future__ import annotations

import pandas as pd

from harness.analysis.case_columns import MIB
from harness.cases import format as fmt
from harness.render.kernel_rows import UNUSED
from harness.render.rows import cases_of
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, sentence

CAPTION = (
    "The largest pieces of memory at the peak of one step, equal ones together, and the innermost "
    "places that took them. Those that were there before the step have the name of their tensor."
)

MAX_PLACES = 2

OURS = ("models/", "kernels/", "parallel/")


@table("largest_allocations", default=190)
def build(frame: pd.DataFrame) -> Table | None:
    cases = frame[frame["memory_profile"].notna() & (frame["status"] == "ok")]
    rows = []
    for case in cases_of(cases):
        # Records from before equal ones were counted have each by itself, among the first ten.
        together: dict[tuple[int, str, str], int] = {}
        for item in case["memory_profile"]["largest"]:
            where = _places(item["where"])
            key = (item["bytes"], item["category"], where)
            together[key] = together.get(key, 0) + item.get("count", 1)
        for (size, category, where), count in together.items():
            values = {"allocation_mib": size / MIB, "category": category, "count": count}
            rows.append({**case, **values, "where": where})
    if not rows:
        return None
    return make_table(
        caption=CAPTION,
        rows=pd.DataFrame(rows),
        lead=["model", "seq_len", "mode"],
        keep=["model", "mode"],
        without=UNUSED,
        metrics=[
            Column(key="allocation_mib", header="size (MiB)", format=fmt.number),
            Column(key="count", header="times", format=fmt.integer),
            Column(key="category", header="category"),
            Column(key="where", header="taken at"),
        ],
    )


@finding("largest_allocations")
def say(rows: pd.DataFrame) -> str | None:
    most = best_row(rows, "allocation_mib")
    return sentence(
        f"the largest allocation alive at a peak has {fmt.number(most['allocation_mib'])} MiB, "
        f"{most['category']}, taken at {most['where']}"
    )


def _places(where: list[str]) -> str:
    """The innermost place, and those of the model around it."""
    ours = [word for word in where[1:] if word.startswith(OURS)]
    return ", ".join([*where[:1], *ours[:MAX_PLACES]]) or "unknown"
