"""Time of one layer of a decoding step by its parts, one bar for each attention."""

from __future__ import annotations

import pandas as pd
from matplotlib.patches import Patch

from harness.cases import format as fmt
from harness.cases.columns import sorted_values
from harness.drawing.panels import panels
from harness.render.figure import CaptionedFigure, figure
from harness.reports.decoding.fusion_rows import PARTS, parts_of, profiled_steps
from harness.reports.decoding.step_rows import UNUSED
from harness.sentences.findings import by_name, sentence, span

CAPTION = (
    "Kernel time of one layer of a decoding step by the part that launched it, from a profile; on "
    "a CPU of operators."
)

COLOURS = {
    "positions": "#BBBBBB",
    "rotary_q": "#0072B2",
    "rotary_k": "#56B4E9",
    "rotary_qk": "#0072B2",
    "append": "#009E73",
    "rotary_append": "#117733",
    "up_projection": "#882255",
    "absorb_q": "#CC79A7",
    "attention": "#E69F00",
    "scores": "#DDCC77",
    "mask": "#999933",
    "softmax": "#D55E00",
    "values": "#AA7744",
    "absorb_v": "#AA4499",
    "fused": "#332288",
    fmt.ABSENT: "#777777",
}


@figure("fusion_breakdown")
def build(frame: pd.DataFrame) -> CaptionedFigure | None:
    rows = profiled_steps(frame)
    if rows.empty:
        return None
    across = ["attention", "profile", "seed", *UNUSED]
    bars = int(rows["attention"].nunique())
    drawing, drawn, common = panels(rows, across, width_in=5.2, height_in=1.1 + 0.42 * bars)
    used: set[str] = set()
    totals: dict[str, list[float]] = {}
    for axis, group in drawn:
        names = sorted_values(group, "attention")
        for place, name in enumerate(names):
            left = 0.0
            for part, us in _sums(group[group["attention"] == name].iloc[0]).items():
                axis.barh(place, us, left=left, height=0.7, color=COLOURS[part])
                left += us
                used.add(part)
            axis.text(left * 1.01, place, f" {fmt.number(left)}", va="center", fontsize=8)
            totals.setdefault(str(name), []).append(left)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlim(left=0)
        axis.grid(axis="y", visible=False)
        axis.set_xlabel("kernel time of a layer (µs)")
    order = [part for part in (*PARTS, fmt.ABSENT) if part in used]
    words = {fmt.ABSENT: "elsewhere"}
    handles = [
        Patch(facecolor=COLOURS[part], label=words.get(part, part.replace("_", " ")))
        for part in order
    ]
    drawing.legend(handles=handles, loc="outside lower center", ncols=min(6, len(handles)))
    parts = [(f"{span(us, fmt.number)} µs", name) for name, us in totals.items()]
    return CaptionedFigure(
        caption=f"{CAPTION} {common}".strip(),
        figure=drawing,
        finding=sentence(f"the kernels of a layer take {by_name(parts)}"),
    )


def _sums(case: pd.Series) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in parts_of(case):
        found[row["part"]] = found.get(row["part"], 0.0) + row["us"]
    return found
