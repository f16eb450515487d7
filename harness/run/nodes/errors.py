"""Errors of hosts that run cases together."""

from __future__ import annotations


class HostError(RuntimeError):
    """Hosts could not connect; the message is one line with the remedy."""
