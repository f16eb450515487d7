"""Columns that name a rank, a layout or a step, in tables about work over several ranks."""

from __future__ import annotations

from harness.cases import format as fmt
from harness.cases.column import Point, in_order
from harness.cases.columns import POINTS
from kernels.registry import Look
from parallel import BACKENDS
from parallel.context.blocks.layouts import Contiguous
from parallel.context.documents.layout import Documents

HEADS = "heads"
"""Instead of a layout: each rank attends to whole sequences in some of the heads."""

IN_GROUPS = "heads/{}"
"""Of ranks that share a part of an outer layout, and attend to it in some of the heads each."""

LAYOUTS = {
    Contiguous.name: Look(colour="#44AA99", marker="X"),
    **in_order("zigzag", "striped", HEADS, Documents.name),
    **in_order("heads/contiguous", "heads/zigzag"),
}
"""How work is laid out over ranks; schemes of the same name have looks of their own."""

MODES = in_order("two_kernels / two_kernels", "two_kernels / fused", "fused / two_kernels")

DECLARED = {
    "split": Point(header="layout", describe="{} layout".format, looks=LAYOUTS, after="seed"),
    "kernel": Point(header="kernel", describe="kernel {}".format, choices=BACKENDS, after="scheme"),
    "transport": Point(header="transport", describe="transport {}".format, after="kernel"),
    "modes": Point(
        header="forward / backward calls",
        describe=lambda value: "",
        looks=MODES,
        optional=True,
        after="transport",
    ),
    "ranks": Point(
        header="ranks",
        describe=lambda value: fmt.counted(value, "rank"),
        format=fmt.integer,
        after="modes",
    ),
    "rank": Point(header="rank", format=fmt.integer, after="ranks"),
    "step": Point(header="step", format=fmt.integer, after="rank"),
}


def declare_points() -> None:
    """Make the columns known to tables and figures."""
    for name, point in DECLARED.items():
        POINTS.declare(name, point)
