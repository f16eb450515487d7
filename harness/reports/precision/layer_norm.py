"""CS336 problem benchmarking_mixed_precision (b): layer normalisation in low precision."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import per_case
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import sentence, span

CAPTION = (
    "Layer normalisation with inputs and outputs in one dtype and its statistics (mean, "
    "differences from it, variance) in another, against float64 on the same stored inputs. Sums "
    "add one element after another in their dtype. Lost: rows that are not finite, where squares "
    "or their sum left the range; errors are relative, in the Euclidean norm, over the other rows. "
    "Largest square: what a dtype has to hold before anything is added."
)

UNUSED = ("attention", "precision", "seq_len", "batch_size", "task", "device_name")


@table("layer_norm")
def build(frame: pd.DataFrame) -> Table | None:
    cases = frame[frame["layer_norm"].notna()]
    if cases.empty:
        return None
    cases = per_case(cases)
    found = pd.DataFrame(cases["layer_norm"].tolist(), index=cases.index)
    rows = cases.assign(
        **{str(name): found[name] for name in found.columns if name not in ("name", "rows")},
        lost=found["lost_rows"] / found["rows"],
    )
    keys = ["width", "input_mean", "input_std", "statistics", "dtype"]
    return make_table(
        caption=CAPTION,
        rows=rows.sort_values(keys, kind="stable").reset_index(drop=True),
        without=UNUSED,
        metrics=[
            Column(key="width", header="width", format=fmt.integer),
            Column(key="input_mean", header="mean", format=_plain, group="inputs"),
            Column(key="input_std", header="deviation", format=_plain, group="inputs"),
            Column(key="dtype", header="inputs, outputs"),
            Column(key="statistics", header="statistics"),
            Column(key="largest_square", header="largest square", format=fmt.number, detail=True),
            Column(key="lost", header="lost (%)", format=fmt.percent),
            Column(key="variance_error", header="variance error", format=fmt.scientific),
            Column(key="output_error", header="output error", format=fmt.scientific),
        ],
    )


@finding("layer_norm")
def say(rows: pd.DataFrame) -> str | None:
    own = rows[rows["statistics"] == rows["dtype"]]
    parts = [_say_own(str(name), part) for name, part in own.groupby("dtype") if name != WIDE]
    wide = rows[(rows["statistics"] == WIDE) & (rows["dtype"] != WIDE)]
    if len(wide):
        lost = "no row is lost" if not wide["lost"].any() else "rows are lost as well"
        errors = [
            f"{span(part['output_error'], fmt.scientific)} in {name}"
            for name, part in wide.groupby("dtype")
        ]
        parts.append(
            f"with statistics in {WIDE} {lost} and outputs are off by their own rounding, "
            f"{' and '.join(errors)}"
        )
    return sentence(*parts)


WIDE = "float32"


def _say_own(name: str, part: pd.DataFrame) -> str:
    """What a dtype does to statistics that are computed in it."""
    over = part[part["lost"] > 0]
    lost = (
        f"loses {100 * over['lost'].max():.0f}% of rows to overflow at a deviation of "
        f"{_plain(over['input_std'].iloc[0])}"
        if len(over)
        else "overflows nowhere"
    )
    return (
        f"statistics in {name}: it {lost}, and variances are off by up to "
        f"{fmt.scientific(part['variance_error'].max())}"
    )


def _plain(value: float) -> str:
    return f"{value:,g}"
