"""Transports that read peers' memory, where the ranks of one sequence are on several hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.cases.case import Case
from parallel.context.attention import SYMMETRIC

AUTO = "auto"


def on_hosts(case: Case, ranks_on_host: int) -> tuple[Case, str | None]:
    """A case with a transport that reaches all ranks of a sequence, and why its own does not.

    A scheme's ``auto`` asks whether GPUs of this host read each other's memory. Which ranks are
    on this host it is not told, so that it becomes here what it is without such GPUs.

    Args:
        ranks_on_host: of every host.
    """
    attention: Any = case.attention
    transport = getattr(attention, "transport", None)
    if transport not in (AUTO, SYMMETRIC) or case.has_sequences_on_one_host(ranks_on_host):
        return case, None
    if transport == SYMMETRIC:
        return case, (
            f"attention.transport={SYMMETRIC} needs all ranks that share a sequence on one host: "
            f"parallel.cp={case.parallel.cp} x parallel.tp={case.parallel.tp} ranks, and "
            f"{ranks_on_host} run on each"
        )
    # A scheme of two levels sends as the rings between its groups do.
    sending = getattr(attention, "ring_type", attention).transports[0]
    return replace(case, attention=replace(attention, transport=sending)), None
