"""The roof over a figure's points: what the device was measured to reach, else its datasheet."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from harness.cases import format as fmt
from harness.render.rows import of_task

MEASURED = (
    "The line is the device's roof as measured here: the rate of a large matmul, or the bandwidth "
    "of a copy times the intensity, each in its fastest pass."
)
DATASHEET = (
    "The line is the device's roof by its datasheet: its dense peak, or its memory bandwidth times "
    "the intensity."
)
NONE = "No roof is drawn: the peak of this device is unknown; sweeps=roofline measures it."


def with_measured_roof(frame: pd.DataFrame, rows: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """``rows`` with the peaks that task=roofline measured on their device in their precision.

    Returns:
        The rows, and the sentence on where their roof comes from.
    """
    measured = of_task(frame[frame["status"] == "ok"], "roofline")
    keys = ["device_name", "compute", "tf32"]
    rows = rows.copy()
    copies, matmuls = (measured[measured["phase"] == name] for name in ("copy", "matmul"))
    bandwidth = (
        (copies["work_bytes"].astype(float) / copies["min_ms"] / 1e6)
        .groupby([copies["device_name"]])
        .max()
    )
    flops = matmuls["work_flops"].astype(float) / matmuls["min_ms"] / 1e9
    rate = flops.groupby([matmuls[key] for key in keys]).max()
    found = [
        (rate.get((name, compute, tf32), np.nan), bandwidth.get(name, np.nan))
        for name, compute, tf32 in zip(*(rows[key] for key in keys), strict=True)
    ]
    roofs = pd.DataFrame(found, columns=["tflops", "gb_s"], index=rows.index)
    if roofs.notna().all(axis=1).all() and len(roofs):
        rows["peak_tflops"], rows["memory_bandwidth_gb_s"] = roofs["tflops"], roofs["gb_s"]
        return rows, MEASURED
    known = rows[["peak_tflops", "memory_bandwidth_gb_s"]].notna().all(axis=1).any()
    return rows, DATASHEET if known else NONE


def draw_roof(
    axis: Axes,
    peak_tflops: float,
    bandwidth_gb_s: float,
    low: float,
    high: float,
    *,
    in_gflops: bool = False,
) -> tuple[float, float]:
    """Draw the roof over an x range that shows its ridge; returns the range.

    ``in_gflops`` says the unit of the y axis, which is else TFLOP/s.
    """
    scale, unit = (1e3, "GFLOP/s") if in_gflops else (1.0, "TFLOP/s")
    ridge = peak_tflops * 1e3 / bandwidth_gb_s
    low, high = min(low, ridge / 8), max(high, ridge * 4)
    x = np.array([low, ridge, high])
    y = scale * np.minimum(peak_tflops, x * bandwidth_gb_s / 1e3)
    axis.plot(x, y, color="#444444", linewidth=1)
    # Left of the ridge and above the slope, where no kernel should be.
    for words, height in (
        (f"{fmt.number(scale * peak_tflops)} {unit}", 11),
        (f"{fmt.number(bandwidth_gb_s)} GB/s", 2),
    ):
        axis.annotate(
            words,
            (ridge, scale * peak_tflops),
            xytext=(-2, height),
            textcoords="offset points",
            ha="right",
            fontsize=7,
            color="#444444",
        )
    return low, high
