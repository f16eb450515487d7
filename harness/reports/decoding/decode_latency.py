"""Decoding from a cache: time of a step, and how near it comes to the memory's bandwidth."""

from __future__ import annotations

import pandas as pd

from harness.cases import format as fmt
from harness.render.rows import apart_from_unsupported
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.decoding.step_rows import UNUSED, decoded, operators_or_kernels
from harness.sentences.findings import percent_span, say_out_of_memory, sentence
from harness.sentences.leaders import say_fastest

CAPTION = (
    "Steps of new tokens against caches of seq_len tokens: median time, new tokens per second of "
    "the whole batch, bytes that have to move over that time, and their share of the bandwidth of "
    "a large copy, which the same process measured."
)

IN_CACHE = (
    "Over 100% of the copy: keys and values that fit the processor's own cache (a CPU's L3; a "
    "GPU's L2 is emptied before each pass) are read faster than memory is by a large copy."
)


def caption_of(rows: pd.DataFrame) -> str:
    """The caption, with a sentence for each column that these rows fill."""
    what = operators_or_kernels(rows)
    about = {
        "predicted_us": "Predicted is the time of those bytes at the copy's bandwidth.",
        "roof_share": f"The share of the roof counts FLOPs besides, at {_flops_rate(rows)}.",
        "kernels_per_layer": f"{what.capitalize()} are those that a layer runs.",
        "launches": "Launches are those of the host in a step.",
    }
    return " ".join([CAPTION, *(text for key, text in about.items() if rows[key].notna().any())])


def _flops_rate(rows: pd.DataFrame) -> str:
    measured, datasheet = "the rate of a large matmul in the same process", "the datasheet's peak"
    old = rows.loc[rows["roof_share"].notna(), "from_datasheet"]
    if old.all():
        return datasheet
    return f"{measured} or, of older records, {datasheet}" if old.any() else measured


@table("decode_latency", default=30)
def build(frame: pd.DataFrame) -> Table | None:
    rows = decoded(frame)
    if rows.empty:
        return None
    rows, footnotes = apart_from_unsupported(rows)
    for name, phase in (("prefill", "prefill"), ("mixed", "step")):
        rows[f"{name}_us"] = rows[f"{phase}_median_ms"] * 1e3
        rows[f"{name}_iqr_us"] = rows[f"{phase}_iqr_ms"] * 1e3
    built = make_table(
        caption=caption_of(rows),
        rows=rows,
        lead=["heads", "batch_size", "seq_len", "attention"],
        keep=["attention", "batch_size", "seq_len"],
        without=UNUSED,
        metrics=[
            Column(
                key="step_us",
                header="step (µs)",
                format=fmt.number,
                status="decode_status",
                mark="decode_mark",
                iqr="step_iqr_us",
            ),
            Column(
                key="prefill_us",
                header="prefill (µs)",
                format=fmt.number,
                mark="prefill_mark",
                iqr="prefill_iqr_us",
                detail=True,
            ),
            Column(
                key="mixed_us",
                header="mixed step (µs)",
                format=fmt.number,
                mark="step_mark",
                iqr="mixed_iqr_us",
            ),
            Column(key="tokens_per_s", header="tokens/s", format=fmt.number),
            Column(key="gb_s", header="GB/s", format=fmt.number),
            Column(key="copy_share", header="of the copy (%)", format=fmt.percent),
            Column(key="roof_share", header="of the roof (%)", format=fmt.percent),
            Column(key="predicted_us", header="predicted (µs)", format=fmt.number, detail=True),
            Column(
                key="kernels_per_layer",
                header=f"{operators_or_kernels(rows)} a layer",
                format=fmt.count,
            ),
            Column(key="launches", header="launches", format=fmt.count, detail=True),
            Column(key="peak_memory_gib", header="peak memory (GiB)", format=fmt.number),
            Column(key="check_error", header="error", format=fmt.scientific, detail=True),
        ],
    )
    built.footnotes += footnotes
    if bool((rows["copy_share"] > 1).any()):
        built.footnotes.append(IN_CACHE)
    return built


@finding("decode_latency")
def say(rows: pd.DataFrame) -> str | None:
    known = rows[rows["copy_share"].notna()]
    most = None
    if len(known):
        most = f"steps reach {percent_span(known['copy_share'])} of the copy bandwidth"
    return sentence(
        say_fastest(rows, "step_us", evidence="decode_evidence"), most, say_out_of_memory(rows)
    )
