"""Transports that read peers' memory, where the ranks of one sequence are on several hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.cases.case import Case
from harness.cases.transport import transport_on_hosts
from parallel.context.attention import SYMMETRIC


def on_hosts(case: Case, ranks_on_host: int) -> tuple[Case, str | None]:
    """A case with a transport that reaches all ranks of a sequence, or why its own does not.

    Args:
        ranks_on_host: of every host.
    """
    attention: Any = case.attention
    transport = transport_on_hosts(case, ranks_on_host)
    if transport == SYMMETRIC and not case.has_sequences_on_one_host(ranks_on_host):
        return case, (
            f"attention.transport={SYMMETRIC} needs all ranks that share a sequence on one host: "
            f"parallel.cp={case.parallel.cp} x parallel.tp={case.parallel.tp} ranks, and "
            f"{ranks_on_host} run on each"
        )
    if transport == getattr(attention, "transport", None):
        return case, None
    return replace(case, attention=replace(attention, transport=transport)), None
