"""The CS336 leaderboard's shape: backends by time, and which of them really differ.

The baseline is PyTorch's cuDNN attention, the fastest that comes with PyTorch on Hopper; where
it did not finish, the first backend in the tables' order stands in.
"""

from __future__ import annotations

import pandas as pd

from harness.analysis.comparison import HIDDEN, Axis, compare
from harness.analysis.evidence import is_host_bound
from harness.analysis.row_verdicts import COLUMNS, interval_cells, rule_words
from harness.cases import format as fmt
from harness.cases.columns import point_groups
from harness.render.rows import apart_from_unsupported, of_task, per_case
from harness.render.table import Column, Table, finding, make_table, table, time_column
from harness.sentences.findings import sentence, span
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Attention alone, the fastest first at each point: median times, and the rate of all passes "
    "by the FLOP formula. Ratio: time of the baseline over that of the backend, so that above 1 is "
    "faster, with {rule}.{hidden}"
)

WAITED = " but those that waited for their host"

PHASES = ("forward", "backward", "forward_backward")

AXIS = Axis(
    choice="attention",
    columns=("attention",),
    other_baseline="sdpa_cudnn",
    needs_baseline=False,
)


@table("leaderboard")
def build(frame: pd.DataFrame) -> Table | None:
    calls = of_task(frame, "attention")
    if calls.empty:
        return None
    rows = per_case(calls, phases=PHASES, values=("median_ms", "tflops"))
    rows, footnotes = apart_from_unsupported(rows)
    for value in ("median_ms", "tflops"):
        rows[f"all_{value}"] = rows[f"forward_backward_{value}"].fillna(rows[f"forward_{value}"])
    rows["all_evidence"] = rows["forward_backward_evidence"].where(
        rows["forward_backward_median_ms"].notna(), rows["forward_evidence"]
    )
    rows = _compared(rows, calls)
    only_forward = rows["forward_backward_status"].isna().all()
    built = make_table(
        caption=CAPTION.format(
            rule=rule_words(rows[rows["num_rounds"].notna()]),
            hidden=f" Also UNCLEAR where, for either, {HIDDEN}."
            if (rows["why"] == HIDDEN).any()
            else "",
        ),
        rows=rows,
        lead=["head_dim", "call_compiled", "attention"],
        keep=["attention"],
        order=["num_heads", "head_dim", "precision", "seq_len", "call_compiled", "attention"],
        metrics=[
            time_column("forward", "forward (ms)"),
            time_column("backward", "backward (ms)"),
            *([] if only_forward else [time_column("forward_backward", "both (ms)")]),
            Column(key="all_tflops", header="TFLOP/s", format=fmt.number),
            Column(key="ratio", header="ratio", format=fmt.factor),
            Column(key="interval", header="interval", raw=("ratio_low", "ratio_high"), detail=True),
            Column(key="verdict", header="verdict"),
            Column(key="baseline", header="baseline", detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            Column(key="compile_s", header="compile (s)", format=fmt.number, detail=True),
            Column(key="autotune_s", header="autotune (s)", format=fmt.number, detail=True),
        ],
    )
    built.footnotes += footnotes
    place = point_groups(built.rows, ["attention"])
    order = built.rows.assign(place=place).sort_values(["place", "all_median_ms"], kind="stable")
    built.rows = built.rows.loc[order.index].reset_index(drop=True)
    return built


@finding("leaderboard")
def say(rows: pd.DataFrame) -> str | None:
    if rows["all_tflops"].isna().all():
        return None
    plain = rows[~rows["call_compiled"].astype(bool)]
    kernels = rows["all_tflops"].where(~rows["all_evidence"].map(is_host_bound).astype(bool))
    rates = None
    if kernels.notna().any():
        some = kernels.count() < rows["all_tflops"].count()
        rates = f"rates are {span(kernels, fmt.number)} TFLOP/s over all backends"
        rates += WAITED if some else ""
    return sentence(say_fastest(rows if plain.empty else plain, "all_median_ms"), rates)


def _compared(rows: pd.DataFrame, calls: pd.DataFrame) -> pd.DataFrame:
    """The rows with baseline, ratio, its interval and the verdict over their longest phase."""
    both = calls.groupby("case_id")["phase"].transform(
        lambda names: "forward_backward" in set(names)
    )
    whole = calls[calls["phase"] == both.map({True: "forward_backward", False: "forward"})]
    found = compare(whole, AXIS).drop_duplicates("case_id").set_index("case_id")
    rows = rows.join(found[["baseline", *COLUMNS]], on="case_id")
    return rows.assign(interval=interval_cells(rows))
