"""The transport of a scheme, where the ranks of one sequence may be on several hosts."""

from __future__ import annotations

from typing import Any

from harness.cases.case import Case

AUTO = "auto"


def transport_on_hosts(case: Case, ranks_on_host: int) -> str | None:
    """The transport that a case asks for, or what ``auto`` is where peers' memory is out of reach.

    A scheme's ``auto`` asks whether GPUs of its host read each other's memory. Which ranks are on
    that host it is not told. None for an attention without transports.

    Args:
        ranks_on_host: of every host.
    """
    attention: Any = case.attention
    transport: str | None = getattr(attention, "transport", None)
    if transport != AUTO or case.has_sequences_on_one_host(ranks_on_host):
        return transport
    # A scheme of two levels sends as the rings between its groups do.
    sending: str = getattr(attention, "ring_type", attention).transports[0]
    return sending
