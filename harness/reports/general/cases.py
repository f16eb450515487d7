"""Every case and phase as measured: the catch-all, with complete latency statistics."""

from __future__ import annotations

import pandas as pd

from harness.analysis.frame import declared_columns
from harness.cases import format as fmt
from harness.render.rows import marks_of
from harness.render.table import Column, Table, finding, make_table, table

CAPTION = "Every case: the latency of each phase, and why a case has none."

CHOSEN = {"attention_choice": "chosen", "float32_precision": "float32 by"}
"""What a run chose where the case left it open, and the header of each."""


@table("cases", default=80)
def build(frame: pd.DataFrame) -> Table | None:
    # A case without timing needs one row that says why, not one per phase.
    once = (frame["status"] == "ok") | ~frame["case_id"].duplicated()
    rows = frame[once].copy()
    rows.loc[rows["status"] != "ok", ["phase", "peak_memory_gib", "check_error"]] = None
    rows["mark"] = marks_of(rows, means=True)
    rows["disturbed_words"] = [", ".join(words) or None for words in rows["disturbed"]]
    rows["status_words"] = rows["status"].map({"ok": "ok", **fmt.STATUS_WORDS})
    counts = rows.loc[rows["status"] == "ok", "num_samples"]
    varied = ["num_samples"] if counts.nunique() > 1 else []
    results = [column for column in declared_columns(rows["case"]) if column.header]
    rows.loc[rows["status"] != "ok", [column.name for column in results]] = None
    chosen = [name for name in CHOSEN if rows[name].notna().any()]
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=["task", "model", "attention"],
        keep=["attention"],
        metrics=[
            *(Column(key=name, header=CHOSEN[name]) for name in chosen),
            Column(key="status_words", header="status"),
            Column(key="phase", header="phase"),
            *(Column(key=name, header="samples", format=fmt.integer) for name in varied),
            _time("median_ms", "median (ms)", mark="mark"),
            _time("iqr_ms", "IQR (ms)"),
            _time("mean_ms", "mean (ms)"),
            _time("std_ms", "std (ms)"),
            _time("min_ms", "min (ms)"),
            Column(key="disturbed_words", header="disturbed", detail=True),
            Column(key="tokens_per_s", header="tokens/s", format=fmt.number, detail=True),
            Column(key="tflops", header="TFLOP/s", format=fmt.number, detail=True),
            Column(key="mfu", header="MFU (%)", format=fmt.percent, detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            *(
                Column(key=column.name, header=column.header, format=column.format)
                for column in results
            ),
            Column(key="check_error", header="error", format=fmt.scientific),
            Column(key="reason", header="reason"),
        ],
    )
    built.is_listing = True
    return built


@finding("cases")
def say(rows: pd.DataFrame) -> str | None:
    """None, by design: the table lists everything and asks nothing."""
    return None


def _time(key: str, header: str, mark: str | None = None) -> Column:
    status = "status" if mark else None
    return Column(key=key, header=header, format=fmt.number, status=status, mark=mark)
