# ruff: noqa: RUF001 - sentences use typographic signs
"""Sentences that once said of all rows what held for some."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from harness.reports.context import balance_measured
from harness.reports.profiles import attention_parts
from harness.sentences.findings import say_over


def test_flops_of_a_softmax_are_a_range_where_head_dims_differ() -> None:
    rows = pd.DataFrame({"time_ratio": [0.2, 0.3], "flops_ratio": [5 / 256, 5 / 320]})
    assert attention_parts.say(rows) == (
        "The softmax takes 0.20× to 0.30× the time of the matmuls in attention, with 0.0156× to "
        "0.0195× their FLOPs."
    )
    assert str(attention_parts.say(rows[:1])).endswith("with 0.0195× their FLOPs.")


def test_what_balance_brings_says_of_how_many_rows() -> None:
    rows = pd.DataFrame(
        {
            "scheme": ["ring", "zigzag", "zigzag"],
            "imbalance": [1.5, 1.0, 1.0],
            "speedup": [float("nan"), 1.4, 0.9],
            "predicted_speedup": [float("nan"), 1.5, 1.5],
            "speedup_verdict": [None, "FASTER", "UNCLEAR"],
        }
    )
    said = "balance brings 1.40× over contiguous parts, where FLOPs alone predict 1.50×"
    assert str(balance_measured.say(rows)).endswith(f"{said} (told for 1 of 2).")
    assert str(balance_measured.say(rows[:2])).endswith(f"{said}.")


@pytest.mark.parametrize(
    ("of_host", "said"),
    [
        (None, "2 of 2 are FASTER than naive, by 1.50× to 3.00×, most by sdpa"),
        ("sdpa", "flex is FASTER than naive, by 1.50×"),
        ("naive", None),
    ],
)
def test_a_host_s_time_is_no_lead_of_a_kernel(of_host: str | None, said: str | None) -> None:
    def evidence(attention: str) -> dict[str, Any]:
        return {"host_bound": attention == of_host}

    rows = pd.DataFrame(
        [
            {
                "seq_len": 512,
                "attention": name,
                "speedup": speedup,
                "verdict": verdict,
                "proof": evidence(name),
            }
            for name, speedup, verdict in (
                ("naive", 1.0, "SAME"),
                ("sdpa", 3.0, "FASTER"),
                ("flex", 1.5, "FASTER"),
            )
        ]
    )
    assert say_over(rows, "speedup", "verdict", "naive", evidence="proof") == said
