"""Peak memory of a record's ranks: what the case held, apart from what was there before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def own_peak_bytes(rank: Mapping[str, Any]) -> float | None:
    """Most bytes that a case held on a rank; None where they were not measured.

    On CUDA these are the bytes of tensors without those allocated before the case
    (``baseline_allocated_bytes``), and with what pools of CUDA graphs reserve beyond their
    tensors (``idle_graph_bytes``). Records from before a baseline was kept count all that was
    allocated. On a CPU it is the growth of the resident set.
    """
    peak = rank.get("peak_allocated_bytes")
    if peak is None:
        return rank.get("peak_rss_bytes")
    return peak - rank.get("baseline_allocated_bytes", 0) + rank.get("idle_graph_bytes", 0)
