"""Columns of the frame: what tables call them, how captions say them, and their order.

Columns that every case has are here. A task, a profiler, a cache, a strategy or a backend that
has something of its own declares it in ``columns``, and a family of tables declares the columns
of rows that it makes itself with :meth:`Points.declare`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.cases.column import Point, Points, in_order
from harness.cases.task import task_type
from kernels.caches import CACHES
from kernels.registry import Look
from parallel import BACKENDS, STRATEGIES

MODELS = ("tiny", "small", "medium", "large", "xl", "2.7B", "llama3_8b", "leaderboard")
"""Table 1 of the CS336 text, between a size for laptops and two beyond it."""

PRECISIONS = {
    "fp32": Look(colour="#555555", marker="o", baseline="fp32"),
    "tf32": Look(colour="#E69F00", marker="s"),
    "bf16": Look(colour="#0072B2", marker="D"),
    "bf16_pure": Look(colour="#56B4E9", marker="^"),
    "fp16": Look(colour="#D55E00", marker="v"),
}

COMPILE_SCOPES = {
    "none": Look(baseline="no compilation"),
    "block": Look(colour="#009E73", marker="P"),
    "model": Look(colour="#0072B2", marker="X"),
}

DENSE = "dense"

BATCH_LAYOUTS = {
    "none": DENSE,
    "equal": "packed equal",
    "ragged": "packed ragged",
    "padded": "padded ragged",
}
"""Each ``task.packing`` as tables name it, the usual one first."""


NO_MASK = "none"
"""A window or a cap that is not set, as tables name it; before the others."""


def _but_for_none(shown: fmt.Format) -> fmt.Format:
    return lambda value: NO_MASK if value == NO_MASK else shown(value)


def _say_nothing(value: Any) -> str:
    return ""


POINTS = Points(
    {
        "task": Point(header="task", describe=_say_nothing),
        "model": Point(
            header="model", describe=lambda value: f"model {value}", looks=in_order(*MODELS)
        ),
        "attention": Point(
            header="attention", describe=lambda value: f"attention {value}", choices=BACKENDS
        ),
        "head_dim": Point(
            header="head_dim", describe=lambda value: f"head_dim {int(value)}", format=fmt.integer
        ),
        "value_dim": Point(
            header="value_dim",
            describe=lambda value: f"values of {fmt.counted(value, 'column')}",
            format=fmt.integer,
        ),
        "num_heads": Point(
            header="heads", describe=lambda value: fmt.counted(value, "head"), format=fmt.integer
        ),
        "num_kv_heads": Point(
            header="KV heads",
            describe=lambda value: fmt.counted(value, "KV head"),
            format=fmt.integer,
        ),
        "causal": Point(
            header="causal",
            describe=lambda value: "causal" if value else "not causal",
            format=fmt.yes_no,
        ),
        "window": Point(
            header="window",
            describe=lambda value: "" if value == NO_MASK else f"window {fmt.integer(value)}",
            format=_but_for_none(fmt.integer),
            looks=in_order(NO_MASK),
        ),
        "prefix_len": Point(
            header="prefix",
            describe=lambda value: f"prefix of {fmt.counted(value, 'key')}" if value else "",
            format=fmt.integer,
        ),
        "softcap": Point(
            header="softcap",
            describe=lambda value: "" if value == NO_MASK else f"softcap {value:g}",
            format=_but_for_none("{:g}".format),
            looks=in_order(NO_MASK),
        ),
        "sinks": Point(
            header="sinks", describe=lambda value: "sinks" if value else "", format=fmt.yes_no
        ),
        "seq_len": Point(
            header="seq_len",
            describe=lambda value: f"sequence length {fmt.integer(value)}",
            format=fmt.integer,
        ),
        "kv_len": Point(
            header="keys", describe=lambda value: fmt.counted(value, "key"), format=fmt.integer
        ),
        "layout": Point(
            header="batch layout",
            describe=lambda value: "" if value == DENSE else f"{value} batch",
            looks=in_order(*BATCH_LAYOUTS.values()),
        ),
        "batch_size": Point(
            header="batch", describe=lambda value: f"batch {fmt.integer(value)}", format=fmt.integer
        ),
        "cache": Point(
            header="cache",
            describe=fmt.unless("none", "{} cache"),
            looks=in_order("none"),
            choices=CACHES,
        ),
        "lengths": Point(header="lengths", describe=fmt.unless("equal", "{} lengths")),
        "rotary": Point(header="rotary", describe=fmt.unless("none", "rotary {}")),
        "cuda_graph": Point(
            header="CUDA graph",
            describe=lambda value: "as a CUDA graph" if value else "",
            format=fmt.yes_no,
        ),
        "precision": Point(header="precision", looks=PRECISIONS),
        "compile_scope": Point(
            header="compile", describe=fmt.unless("none", "compiled by {}"), looks=COMPILE_SCOPES
        ),
        "compile_mode": Point(
            header="compile mode", describe=fmt.unless("default", "compile mode {}")
        ),
        "checkpoint": Point(
            header="checkpointing",
            describe=fmt.unless("none", "checkpointing {}"),
            looks=in_order("none", "selective", "every 3", "every 2", "block"),
        ),
        "profile": Point(header="profile", describe=fmt.unless("none", "profile {}")),
        "strategy": Point(
            header="parallel", describe=fmt.unless("none", "parallel {}"), choices=STRATEGIES
        ),
        "world_size": Point(
            header="ranks",
            describe=lambda value: "" if value == 1 else f"{value} ranks",
            format=fmt.integer,
        ),
        "mode": Point(header="mode", describe=lambda value: f"mode {value}"),
        "warmup_steps": Point(
            header="warm-up steps",
            describe=lambda value: fmt.counted(value, "warm-up step"),
            format=fmt.integer,
        ),
        "measure_steps": Point(
            header="measured steps",
            describe=lambda value: fmt.counted(value, "measured step"),
            format=fmt.integer,
        ),
        "seed": Point(header="seed", describe=_say_nothing, format=fmt.integer),
        "scheme": Point(
            header="attention", describe=lambda value: f"attention {value}", choices=BACKENDS
        ),
        "device": Point(header="device"),
        "device_name": Point(header="device name", optional=True),
        "memory_source": Point(
            header="memory source",
            describe=lambda value: {"rss": "memory is growth of the resident set"}.get(value, ""),
            optional=True,
        ),
    }
)

SHAPE_POINTS = ("head_dim", "value_dim", "num_heads", "num_kv_heads", "causal", "kv_len", "layout")
"""Given by the model in a training step, and by the task when attention is measured alone."""

USUAL = {"value_dim": "head_dim", "num_kv_heads": "num_heads", "kv_len": "seq_len"}
"""Points that say nothing where they are as large as another."""

OBSERVED = ("memory_source",)
"""Known only after the measurement, so that cases are matched without it."""


def redundant_points(rows: pd.DataFrame, chosen: Iterable[str] = ()) -> set[str]:
    """Points that follow from others in these rows, and need not be shown.

    Args:
        chosen: points that a table or figure arranges by. The scheme, which the attention names
            too, is one in reports on split sequences, and is needed there alone.
    """
    scheme = {"scheme"} - set(chosen)
    if not any(task_type(name).gives_shape for name in rows["task"].unique()):
        return {*SHAPE_POINTS} | scheme
    return {name for name, other in USUAL.items() if rows[name].equals(rows[other])} | scheme


def point_groups(rows: pd.DataFrame, varied: Iterable[str]) -> pd.Series:
    """A number per row, equal for rows whose points differ at most in ``varied``."""
    excluded = {*varied, *OBSERVED}
    keys = [name for name in POINTS if name in rows and name not in excluded]
    return rows.groupby(keys, dropna=False, sort=False).ngroup()


def caption_of(rows: pd.DataFrame, names: Iterable[str]) -> str:
    """One sentence on what all rows have in common: ``All rows: bf16, batch 4, cpu.``"""
    words = []
    for name in names:
        values = rows[name].dropna()
        if len(values) and (word := POINTS[name].describe(values.iloc[0])):
            words.append(word)
    return f"All rows: {', '.join(words)}." if words else ""


def sort_by_points(rows: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Rows in the fixed order of each named column; stable, and missing values last."""
    names = list(names)
    keys = pd.DataFrame(index=rows.index)
    for name in names:
        distinct = sorted(rows[name].dropna().unique(), key=POINTS[name].rank)
        keys[name] = rows[name].map({value: place for place, value in enumerate(distinct)})
    return rows.loc[keys.sort_values(names, kind="stable").index].reset_index(drop=True)


def sorted_values(rows: pd.DataFrame, name: str) -> list[Any]:
    """The distinct values of a point, in the order of tables."""
    return sorted(rows[name].unique(), key=POINTS[name].rank)
