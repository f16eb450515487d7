"""The text's communication_accounting problem, answer by answer, for any model and mesh."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.predictions.feed_forward import Mesh
from harness.render.table import Column, Table, finding, make_table, table
from harness.sentences.findings import by_name, sentence, span

CAPTION = (
    "Feed-forward blocks of two linear layers, by formula: activations saved for backward and "
    "what is sent in bfloat16, weights, gradients and AdamW's state in float32; GB of 1e9 bytes. "
    "CS336's worked answers stand beside ours at the problem's own sizes."
)

UNUSED = (
    *("attention", "precision", "seq_len", "batch_size", "head_dim", "num_heads"),
    *("num_kv_heads", "causal", "kv_len", "layout", "call_compiled", "compile_scope"),
    *("compile_mode", "mode", "device", "device_name", "memory_source"),
)

SIZES = {"blocks": "num_blocks", "D": "d_model", "F": "d_ff"}
"""Sizes of the stack, by their names in the text; a column shows those that vary."""

TEXT_SIZES = {"d_model": 16384, "d_ff": 53248, "num_blocks": 126, "fsdp": 16, "tp": 4}

TEXT = {
    "num_parameters": 2.199e11,
    "static_gb": 3518.0,
    "activation_mb_per_token": 17.55,
    "gpus_static": 43.98,
    "least_fsdp_empty": 37.03,
    "gather_ms": 4.5,
    "least_batch": 39_872.0,
    "least_batch_per_device": 623.0,
}
"""Worked answers printed in the text; those of (c) leave out M_X and count TP as added time."""


@table("communication_accounting")
def build(frame: pd.DataFrame) -> Table | None:
    cases = frame[frame["communication_accounting"].notna()].drop_duplicates("case_id")
    cases = cases[cases["status"] == "ok"]
    if cases.empty:
        return None
    tasks = [case["task"] for case in cases["case"]]
    varied = {
        letter: key for letter, key in SIZES.items() if len({task[key] for task in tasks}) > 1
    }
    parts = []
    for _, case in cases.iterrows():
        task = case["case"]["task"]
        answers = {**case["communication_accounting"], **_both_axes(task)}
        at_text = all(task[key] == value for key, value in TEXT_SIZES.items())
        lines = [
            {
                "part": part,
                "quantity": words.format(**task, **answers),
                "value": answers[key],
                "text": TEXT.get(key) if at_text else None,
                "formula": formula,
            }
            for part, key, words, formula in LINES
        ]
        sizes = " x ".join(f"{task[key]:,}" for key in varied.values())
        repeated = pd.DataFrame([case] * len(lines)).reset_index(drop=True)
        parts.append(pd.concat([repeated, pd.DataFrame(lines)], axis=1).assign(sizes=sizes))
    rows = pd.concat(parts, ignore_index=True)
    built = make_table(
        caption=CAPTION,
        rows=rows,
        without=UNUSED,
        order=[],
        metrics=[
            *([Column(key="sizes", header=" x ".join(varied), point=True)] if varied else []),
            Column(key="part", header="part", detail=True),
            Column(key="quantity", header="quantity", point=True),
            Column(key="value", header="value", format=_figure),
            Column(key="text", header="text", format=_printed),
            Column(key="formula", header="formula"),
        ],
    )
    built.footnotes.append(
        "The text's 623 tokens a device of part (c) leave out M_X and add the exchange of "
        "activations to the gathering of weights; N_FSDP = 37.03 is the ratio that a whole number "
        "has to exceed."
    )
    return built


@finding("communication_accounting")
def say(rows: pd.DataFrame) -> str | None:
    found = []
    for _, case in rows.groupby("case_id", sort=False):
        values = case.set_index("quantity")["value"].astype(float)
        if not {PARAMETERS, TOKENS_A_DEVICE} <= set(values.index):
            continue
        size = f"{values[PARAMETERS] / 1e9:,.0f} billion"
        found.append((_figure(values[TOKENS_A_DEVICE]), size))
    if not found:
        return None
    both = rows.loc[rows["quantity"] == IN_TURNS_A_DEVICE, "value"].astype(float).dropna()
    best = rows.loc[rows["quantity"].str.startswith(BEST_SPLIT), ["quantity", "value"]]
    # Those with as many tokens beside each other.
    parts = [(f"{tokens} tokens a device", size) for tokens, size in sorted(set(found))]
    if len(parts) > MOST_MODELS:
        sizes = rows.loc[rows["quantity"] == PARAMETERS, "value"] / 1e9
        tokens = rows.loc[rows["quantity"] == TOKENS_A_DEVICE, "value"]
        models = span(sizes, "{:,.0f}".format)
        parts = [(f"{span(tokens, _figure)} tokens a device", f"{models} billion")]
    return sentence(
        f"a step is bound by computing once it has {by_name(parts)} parameters",
        f"where gathering weights and exchanging activations take turns, from "
        f"{span(both, _figure)} on"
        if len(both)
        else None,
        _say_best(best),
    )


def _say_best(best: pd.DataFrame) -> str | None:
    """``split 4 x 16 instead, 79.9 are enough``, where one split is said to be best."""
    known = best[best["value"].notna()].drop_duplicates()
    if len(known) != 1:
        return None
    name, value = known.iloc[0]
    split = name.removeprefix(BEST_SPLIT).partition(" (")[0]
    return f"split {split} instead, {_figure(value)} are enough"


PARAMETERS, TOKENS_A_DEVICE = "parameters", "the same, a device (tokens)"

IN_TURNS_A_DEVICE = "both in turns, a device (tokens)"
BEST_SPLIT = "least batch a device, X x Y = "

FLOAT8_SHARE = 0.5
"""Of bfloat16's bytes."""

MOST_MODELS = 3
"""More of them are said as a range."""


LINES: tuple[tuple[str, str, str, str], ...] = (
    ("a", "num_parameters", "parameters", "2 D F blocks"),
    ("a", "static_gb", "weights, gradients, AdamW (GB)", "16 bytes a parameter"),
    ("a", "activation_mb_per_token", "activations (MB a token)", "2 (D + F) blocks bytes"),
    ("a", "activation_gb", "activations, {tokens:,} tokens (GB)", "tokens times that"),
    ("a", "gpus_static", "GPUs of {gpu_gb:g} GB, without activations", "static / GPU"),
    ("a", "gpus_with_activations", "GPUs of {gpu_gb:g} GB, {tokens:,} tokens", "all / GPU"),
    ("b", "least_fsdp_empty", "least N_FSDP for {device_gb:g} GB, no tokens", "static / N < M"),
    (
        *("b", "least_fsdp", "least N_FSDP for {device_gb:g} GB, {tokens:,} tokens a device"),
        "(static + A/2) / N + A/2 < M",
    ),
    ("c", "gather_ms", "gathering a block's weights (ms)", "4 D F / (Y W M_X)"),
    ("c", "least_batch", "least batch bound by compute (tokens)", "N C / (Y W M_X)"),
    ("c", "least_batch_per_device", "the same, a device (tokens)", "C / (Y W M_X)"),
    ("c", "least_d_ff", "least d_ff for tensor parallelism", "N C / (X W M_Y)"),
    (
        *("d", "in_turns", "gathering and exchanging in turns (tokens)"),
        "N C / (Y W M_X) / (1 - N C / (X W M_Y F))",
    ),
    ("d", "in_turns_per_device", IN_TURNS_A_DEVICE, "the same / N"),
    ("d", "any_split_per_device", "the best split, a device (tokens)", "(C / W)^2 / (M_X M_Y F)"),
    (
        *("d", "best_split_per_device", BEST_SPLIT + "{best_x} x {best_y} (tokens)"),
        "the least of N = X Y",
    ),
    ("d", "float8_per_device", "weights sent in float8, a device (tokens)", "C / (2 Y W M_X)"),
)


def _both_axes(task: dict[str, Any]) -> dict[str, Any]:
    """Answers of part (d), from a case's options: batches that hide both kinds of transfer."""
    mesh = Mesh(
        fsdp=task["fsdp"],
        tp=task["tp"],
        fsdp_axes=task["fsdp_axes"],
        tp_axes=task["tp_axes"],
        flops_per_s=task["tflops"] * 1e12,
        bytes_per_s=task["link_gb_s"] * 1e9,
    )
    devices, d_ff = mesh.num_devices, task["d_ff"]
    in_turns, best = mesh.least_batch_in_turns(d_ff), mesh.best_split(d_ff)
    return {
        "in_turns": in_turns,
        "in_turns_per_device": None if in_turns is None else in_turns / devices,
        "any_split_per_device": mesh.least_batch_of_any_split(d_ff) / devices,
        "best_split_per_device": None if best is None else best.least_batch() / devices,
        "best_x": None if best is None else best.fsdp,
        "best_y": None if best is None else best.tp,
        "float8_per_device": FLOAT8_SHARE * mesh.least_batch() / devices,
    }


def _printed(value: Any) -> str:
    """The text's own figures, with no more digits than it gives: 219.9e9."""
    return f"{value / 1e9:.1f}e9" if value >= 1e9 else _figure(value)


def _figure(value: Any) -> str:
    is_whole = float(value).is_integer()
    return f"{value:,.0f}" if is_whole or abs(value) >= 1000 else fmt.number(value)
