"""CS336 problem mixed_precision_accumulation: what becomes of a sum in a low precision."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import best_row, sentence

CAPTION = (
    "A small term added many times, one after another. The error has two parts: the term is "
    "rounded when it is stored, which every addition repeats, and each partial sum is rounded "
    "to the accumulator's dtype."
)

_UNUSED = ("attention", "precision", "seq_len", "batch_size", "task", "device_name")


@table("accumulation")
def build(frame: pd.DataFrame) -> Table | None:
    cases = frame[frame["accumulation"].notna()]
    if cases.empty:
        return None
    cases = per_case(cases)
    found = pd.DataFrame(cases["accumulation"].tolist(), index=cases.index)
    exact = found["term"] * found["num_terms"]
    stored = found["stored_term"] * found["num_terms"]
    rows = cases.assign(
        sum_of=[
            f"{n:,} {fmt.TIMES} {x:g}"
            for n, x in zip(found["num_terms"], found["term"], strict=True)
        ],
        accumulator=found["accumulator"],
        term_dtype=found["term_dtype"],
        cast_term=found["cast_term"],
        result=found["sum"],
        error=found["sum"] - exact,
        from_term=stored - exact,
        from_sums=found["sum"] - stored,
    )
    return make_table(
        caption=CAPTION,
        rows=rows,
        without=_UNUSED,
        metrics=[
            Column(key="sum_of", header="sum of"),
            Column(key="accumulator", header="accumulator"),
            Column(key="term_dtype", header="term"),
            Column(key="cast_term", header="cast first", format=fmt.yes_no),
            Column(key="result", header="result", format=_seven_digits),
            Column(key="error", header="error", format=fmt.scientific),
            Column(key="from_term", header="of the stored term", format=fmt.scientific),
            Column(key="from_sums", header="of the partial sums", format=fmt.scientific),
        ],
    )


@finding("accumulation")
def say(rows: pd.DataFrame) -> str | None:
    sized = rows.assign(size=rows["error"].abs())
    worst, best = best_row(sized, "size"), best_row(sized, "size", highest=False)
    if worst["size"] == best["size"]:
        return None
    return sentence(
        f"a {worst['accumulator']} sum of {worst['term_dtype']} terms is off by most "
        f"({fmt.scientific(worst['error'])}) and a {best['accumulator']} sum of "
        f"{best['term_dtype']} terms by least ({fmt.scientific(best['error'])})"
    )


def _seven_digits(value: float) -> str:
    """A number with seven significant digits, as many as float32 has."""
    return f"{value:.7g}"
