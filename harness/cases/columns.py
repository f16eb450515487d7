"""The columns that say what was measured: their headers, their words and their order.

Models come in order of size and backends with the naive one first, in every table and figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.cases import format as fmt
from parallel.collectives import COLLECTIVES

MODEL_ORDER = ("tiny", "small", "medium", "large", "xl", "2.7B", "llama3_8b", "leaderboard")
"""Table 1 of the CS336 text, between a size for laptops and two beyond it."""

ATTENTION_ORDER = ("naive", "compiled")
"""The baseline and its compiled form; the others follow by name."""

PRECISION_ORDER = ("fp32", "tf32", "bf16", "bf16_pure", "fp16")

COMPILE_ORDER = ("none", "block", "model")

BATCH_LAYOUTS = {
    "none": "dense",
    "equal": "packed equal",
    "ragged": "packed ragged",
    "padded": "padded ragged",
}
"""What tables call each ``task.packing``, the usual one first."""


def _always(value: Any) -> str:
    return str(value)


def _plain(value: float) -> str:
    """A size that somebody typed, with no more digits than that."""
    return f"{value:,.10g}"


def _rank_in(order: tuple[str, ...]) -> Callable[[Any], Any]:
    """Sort key: the listed names first, in their order, with their variants behind them."""
    places = {name: place for place, name in enumerate(order)}

    def rank(value: Any) -> tuple[int, str]:
        name = "" if fmt.is_missing(value) else str(value)
        return places.get(name.split("(")[0], len(places)), name

    return rank


SPLIT_ORDER = ("contiguous", "zigzag", "striped")

SCHEME_ORDER = ("ring", "zigzag", "striped", "llama3", "zigzag_llama3")
"""Rings, then gathers, each from the simplest on; peers follow by name."""

MODES_ORDER = ("two_kernels / two_kernels", "two_kernels / fused", "fused / two_kernels")

attention_rank = _rank_in(ATTENTION_ORDER)
modes_rank = _rank_in(MODES_ORDER)
split_rank = _rank_in(SPLIT_ORDER)
scheme_rank = _rank_in(SCHEME_ORDER)
model_rank = _rank_in(MODEL_ORDER)
precision_rank = _rank_in(PRECISION_ORDER)
compile_rank = _rank_in(COMPILE_ORDER)
layout_rank = _rank_in(tuple(BATCH_LAYOUTS.values()))


@dataclass(kw_only=True, slots=True, frozen=True)
class Point:
    """One column that names the measured point."""

    header: str
    describe: Callable[[Any], str]
    """The value in words, for captions; empty where it goes without saying."""
    format: fmt.Format = fmt.text
    rank: Callable[[Any], Any] | None = None
    """Sort key, where the values' own order is not the right one."""
    optional: bool = False
    """Unknown for cases that never started, which does not make it vary."""

    def varies(self, values: pd.Series) -> bool:
        return values.nunique(dropna=self.optional) > 1


# Those from split to step are of tables about ranks alone, heads, shape and attention_type of those
# about caches; the frame has no such columns.
POINTS: dict[str, Point] = {
    "task": Point(header="task", describe=lambda value: ""),
    "model": Point(header="model", describe=lambda value: f"model {value}", rank=model_rank),
    "attention": Point(
        header="attention", describe=lambda value: f"attention {value}", rank=attention_rank
    ),
    "head_dim": Point(
        header="head_dim", describe=lambda value: f"head_dim {int(value)}", format=fmt.integer
    ),
    "num_heads": Point(
        header="heads", describe=lambda value: fmt.counted(value, "head"), format=fmt.integer
    ),
    "num_kv_heads": Point(
        header="KV heads", describe=lambda value: fmt.counted(value, "KV head"), format=fmt.integer
    ),
    "causal": Point(
        header="causal",
        describe=lambda value: "causal" if value else "not causal",
        format=fmt.yes_no,
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
        describe=lambda value: "" if value == BATCH_LAYOUTS["none"] else f"{value} batch",
        rank=layout_rank,
    ),
    "batch_size": Point(
        header="batch", describe=lambda value: f"batch {fmt.integer(value)}", format=fmt.integer
    ),
    "heads": Point(header="heads", describe=lambda value: f"heads {value}"),
    "shape": Point(header="model", describe=lambda value: f"model {value}"),
    "attention_type": Point(
        header="type",
        describe=lambda value: str(value).upper(),
        format=lambda value: str(value).upper(),
        rank=_rank_in(("mha", "gqa", "mqa", "mla")),
    ),
    "cache": Point(
        header="cache",
        describe=lambda value: "" if value == "none" else f"{value} cache",
        rank=_rank_in(("none", "contiguous")),
    ),
    "new_tokens": Point(
        header="new tokens",
        describe=lambda value: "" if value == 1 else f"{int(value)} new tokens",
        format=fmt.integer,
    ),
    "lengths": Point(
        header="lengths",
        describe=lambda value: "" if value == "equal" else f"{value} lengths",
    ),
    "layers": Point(
        header="layers",
        describe=lambda value: "" if value == 1 else f"{int(value)} layers",
        format=fmt.integer,
    ),
    "prompts": Point(
        header="prompts",
        describe=lambda value: "" if value == "none" else f"with prompts {value}",
    ),
    "rotary": Point(
        header="rotary", describe=lambda value: "" if value == "none" else f"rotary {value}"
    ),
    "cuda_graph": Point(
        header="CUDA graph",
        describe=lambda value: "as a CUDA graph" if value else "",
        format=fmt.yes_no,
    ),
    "precision": Point(header="precision", describe=_always, rank=precision_rank),
    "compile_scope": Point(
        header="compile",
        describe=lambda value: "" if value == "none" else f"compiled by {value}",
        rank=compile_rank,
    ),
    "compile_mode": Point(
        header="compile mode",
        describe=lambda value: "" if value == "default" else f"compile mode {value}",
    ),
    "checkpoint": Point(
        header="checkpointing",
        describe=lambda value: "" if value == "none" else f"checkpointing {value}",
        rank=_rank_in(("none", "selective", "every 3", "every 2", "block")),
    ),
    "profile": Point(
        header="profile",
        describe=lambda value: "" if value == "none" else f"profile {value}",
    ),
    "call_compiled": Point(
        header="torch.compile",
        describe=lambda value: "attention through torch.compile" if value else "",
        format=fmt.yes_no,
    ),
    "strategy": Point(
        header="parallel", describe=lambda value: "" if value == "none" else f"parallel {value}"
    ),
    "world_size": Point(
        header="ranks",
        describe=lambda value: "" if value == 1 else f"{value} ranks",
        format=fmt.integer,
    ),
    "collective": Point(
        header="operation", describe=lambda value: str(value), rank=_rank_in(COLLECTIVES)
    ),
    "size_mib": Point(header="size (MiB)", describe=lambda value: f"{value:g} MiB", format=_plain),
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
    "seed": Point(header="seed", describe=lambda value: "", format=fmt.integer),
    "split": Point(header="layout", describe=lambda value: f"{value} layout", rank=split_rank),
    "scheme": Point(
        header="attention", describe=lambda value: f"attention {value}", rank=scheme_rank
    ),
    "kernel": Point(header="kernel", describe=lambda value: f"kernel {value}", rank=attention_rank),
    "transport": Point(header="transport", describe=lambda value: f"transport {value}"),
    "modes": Point(
        header="forward / backward calls",
        describe=lambda value: "",
        rank=modes_rank,
        optional=True,
    ),
    "ranks": Point(
        header="ranks", describe=lambda value: fmt.counted(value, "rank"), format=fmt.integer
    ),
    "rank": Point(header="rank", describe=_always, format=fmt.integer),
    "step": Point(header="step", describe=_always, format=fmt.integer),
    "device": Point(header="device", describe=_always),
    "device_name": Point(header="device name", describe=_always, optional=True),
    "memory_source": Point(
        header="memory source",
        describe=lambda value: {"rss": "memory is growth of the resident set"}.get(value, ""),
        optional=True,
    ),
}

SHAPE_POINTS = ("head_dim", "num_heads", "num_kv_heads", "causal", "kv_len", "layout")
"""Given by the model in a training step, and by the task when attention is measured alone."""


WITHOUT_MODEL = (
    *("attention", "flop_balance", "collectives", "roofline", "decode", "prefill"),
    "kv_memory",
)
"""Tasks that give the shape of the attention call themselves."""

OBSERVED = ("memory_source",)
"""Known only after the measurement, so that cases are matched without it."""


def redundant_points(rows: pd.DataFrame) -> set[str]:
    """Points that follow from others in these rows, and need not be shown."""
    if not rows["task"].isin(WITHOUT_MODEL).any():
        return set(SHAPE_POINTS)
    usual = {"num_kv_heads": "num_heads", "kv_len": "seq_len"}
    return {name for name, other in usual.items() if rows[name].equals(rows[other])}


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
        rank = POINTS[name].rank
        if rank is None:
            keys[name] = rows[name]
        else:
            distinct = sorted(rows[name].dropna().unique(), key=rank)
            keys[name] = rows[name].map({value: place for place, value in enumerate(distinct)})
    return rows.loc[keys.sort_values(names, kind="stable").index].reset_index(drop=True)
