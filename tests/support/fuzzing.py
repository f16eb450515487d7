"""How many examples the tests with generated input try, and JSON with keys that stand twice.

``ATTNBENCH_FUZZ=50`` tries fifty times as many, other ones in each run; without it they are the
same few in every run.
"""

from __future__ import annotations

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("ATTNBENCH_FUZZ", "1"))


def fuzz(max_examples: int) -> settings:
    """Settings of a test that tries this many examples, or a multiple of them."""
    return settings(
        max_examples=max_examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def with_duplicates(value: Any) -> str:
    """JSON text in which every key of every object stands twice, first with another value."""
    if isinstance(value, dict):
        pairs = [(json.dumps(key), with_duplicates(item)) for key, item in value.items()]
        return (
            "{" + ", ".join(f'{key}: {{"x": [null]}}, {key}: {text}' for key, text in pairs) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(with_duplicates, value)) + "]"
    return json.dumps(value)
