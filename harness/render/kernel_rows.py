"""Kernels of a profiled case: how often each was called, for how long, and its short name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column

PHASES = ("forward", "backward", "optimizer", "forward_backward", "prefill", "decode", "step")

UNUSED = ("task", "warmup_steps", "measure_steps", "seed", "profile")

OF_A_KERNEL = (
    Column(key="short", header="kernel", raw=("kernel_name",)),
    Column(key="category", header="category"),
    Column(key="calls", header="calls", format=fmt.number),
    Column(key="ms", header="time (ms)", format=fmt.number),
    Column(key="mean_us", header="mean (µs)", format=fmt.number),
    Column(key="share", header="share (%)", format=fmt.percent),
)
"""Columns about a kernel, per step and rank."""

MAX_WORDS = 64

_NOISE = re.compile(r"^void |\(anonymous namespace\)::|at::native::|at::cuda::|cutlass::|c10::")

_TELLING = re.compile(
    r"(\w*(?:Functor|Ops?|kernel_cuda|_kernel_impl|Reduce|Copy|Epilogue|Softmax\w*|gemm\w*))\b"
)


def profiled(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of cases whose kernels were profiled."""
    return frame[frame["kernel_profile"].notna() & (frame["status"] == "ok")]


def phases_of(profile: dict[str, Any]) -> list[str]:
    return [name for name in PHASES if name in profile["phases"]]


def passes(profile: dict[str, Any]) -> int:
    """Steps times ranks: what sums are divided by."""
    return int(profile["steps"] * profile["ranks"])


def rows_of(profile: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    """Rows of a phase, or of the whole step."""
    return [row for row in profile["rows"] if phase in ("step", row["phase"])]


def total_ms(rows: Iterable[dict[str, Any]]) -> float:
    return float(sum(row["total_ms"] for row in rows))


def by_category(rows: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each category."""
    found: dict[str, float] = {}
    for row in rows:
        found[row["category"]] = found.get(row["category"], 0.0) + row["total_ms"]
    return found


def short_name(kernel: str) -> str:
    """A kernel's name as a table can show it: without namespaces, and with what tells it apart."""
    name = _NOISE.sub("", kernel)
    name = re.sub(r"\(anonymous namespace\)::|at::native::|at::cuda::|cutlass::|c10::", "", name)
    head, bracket, rest = name.partition("<")
    head = head.split("(")[0].strip()
    if not bracket:
        return head[:MAX_WORDS]
    telling = [word for word in _TELLING.findall(rest) if word not in head]
    return f"{head}<{telling[-1]}>"[:MAX_WORDS] if telling else head[:MAX_WORDS]
