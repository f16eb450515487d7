"""Memory of a model's cache by type of attention, and from where on it does not fit."""

from __future__ import annotations

import pandas as pd

from harness.analysis.case_columns import GIB
from harness.cases import format as fmt
from harness.cases.column import Point
from harness.cases.columns import POINTS
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.decoding.step_rows import UNUSED
from harness.sentences.findings import by_name, listed, sentence
from kernels.registry import Look

CAPTION = (
    "Cache of all layers by formula, equal to what the caches allocate: bytes of a token, and of "
    "the whole batch. The largest batch holds sequences of this length, the longest sequences "
    "stand in this batch, in the given memory with nothing else in it. MHA, GQA and MQA keep keys "
    "and values of every head, of a group's, or of one; MLA a latent with its rotary part."
)

NO_USE = (*UNUSED, "task", "attention", "seed", "device", "device_name", "head_dim", "num_heads")
ATTENTION_TYPES = {
    "mha": Look(colour="#555555", marker="X"),
    "gqa": Look(colour="#0072B2", marker="<"),
    "mqa": Look(colour="#E69F00", marker=">"),
    "mla": Look(colour="#AA4499", marker="p"),
}

POINTS.declare("shape", Point(header="model", describe="model {}".format, after="heads"))
POINTS.declare(
    "attention_type",
    Point(
        header="type",
        describe=lambda value: str(value).upper(),
        format=lambda value: str(value).upper(),
        looks=ATTENTION_TYPES,
        after="shape",
    ),
)

SHOWN = ("shape", "attention_type", "batch_size", "seq_len")


def counted(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per case of task=kv_memory that counted, with its results as columns."""
    cases = frame[frame["kv_memory"].notna() & (frame["status"] == "ok")]
    cases = cases.drop_duplicates("case_id").reset_index(drop=True)
    if cases.empty:
        return cases
    tasks = [case["task"] for case in cases["case"]]
    results = pd.DataFrame(list(cases["kv_memory"]))
    return cases.assign(
        shape=[task["shape"] for task in tasks],
        attention_type=[task["attention_type"] for task in tasks],
        device_gib=[task["device_gib"] for task in tasks],
        **{str(name): results[name] for name in results},
        total_gib=results["total_bytes"] / GIB,
        of_device=results["total_bytes"] / GIB / [task["device_gib"] for task in tasks],
    )


@table("kv_memory", default=60)
def build(frame: pd.DataFrame) -> Table | None:
    rows = counted(frame)
    if rows.empty:
        return None
    rows["fits_words"] = rows["fits"].map({True: "yes", False: "OOM"})
    built = make_table(
        caption=CAPTION,
        rows=rows,
        lead=SHOWN,
        keep=SHOWN,
        without=(*NO_USE, "num_kv_heads", "layers", "cache"),
        metrics=[
            Column(key="bytes_per_token", header="bytes a token", format=fmt.integer),
            Column(key="total_gib", header="total (GiB)", format=fmt.number),
            Column(key="fits_words", header="fits"),
            Column(key="of_device", header="of the memory (%)", format=fmt.percent),
            Column(key="largest_batch", header="largest batch", format=fmt.integer),
            Column(key="longest_len", header="longest sequences", format=fmt.integer),
        ],
    )
    sizes = sorted(rows["device_gib"].unique())
    words = listed(fmt.number(size) for size in sizes)
    built.footnotes.append(f"Memory to be filled: {words} GiB.")
    return built


@finding("kv_memory")
def say(rows: pd.DataFrame) -> str | None:
    parts, ratios = [], []
    for shape, part in rows.groupby("shape", sort=False):
        per_token = part.groupby("attention_type")["bytes_per_token"]
        if {"mha", "mla"} <= set(per_token.groups) and (per_token.nunique() == 1).all():
            ratio = per_token.first()["mha"] / per_token.first()["mla"]
            ratios.append((fmt.factor(ratio), str(shape)))
    if ratios:
        parts.append(
            f"keys and values of all heads take {by_name(ratios, 'the bytes of a latent')}"
        )
    out = rows[~rows["fits"].astype(bool)]
    if len(out):
        fit = "does not fit" if len(out) == 1 else "do not fit"
        parts.append(f"{len(out)} of {fmt.counted(len(rows), 'cache')} {fit}")
    return sentence(*parts)
