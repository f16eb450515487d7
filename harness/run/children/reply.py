"""What a group of workers answers to one job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Reply:
    """How one case, or one round of it, ended."""

    outcomes: list[dict[str, Any]] = field(default_factory=list)
    """The ranks' reports in the order of arrival; incomplete if the group broke."""
    fault: str | None = None
    """``timeout`` or ``failed`` if the group had to be ended."""
    message: str = ""
    healthy: bool = True
    """Whether the group can take another case."""
    last_stages: list[str] = field(default_factory=list)
    lost: str = ""
    """Why the group broke before it came to the case, which is to blame for nothing and has to be
    measured by a new group; empty otherwise."""
