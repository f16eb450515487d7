"""Errors beside their tolerances, as the gate finds them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """One comparison: an error, the tolerance, and in words what differs and where."""

    name: str
    error: float
    """Infinite for a value that is not finite."""
    tolerance: float
    said: str
    """A sentence on the error, such as ``relative error of dq is 0.2 in head 3``."""

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance

    @property
    def is_of_tensor(self) -> bool:
        """Whether it says which tensor is wrong, and not only that two do not fit together."""
        return "=" not in self.name and "factor" not in self.name

    @property
    def share(self) -> float:
        """The error as a multiple of its tolerance."""
        if self.holds and self.tolerance == 0:
            return 0.0
        return self.error / self.tolerance if self.tolerance else math.inf


def number(error: float) -> float:
    """An error as a number that compares: infinity for one that is not finite."""
    return error if math.isfinite(error) else math.inf


def worst(findings: Iterable[Finding]) -> dict[str, Finding]:
    """By name the finding closest to its tolerance, or farthest beyond it."""
    found: dict[str, Finding] = {}
    for finding in findings:
        if finding.name not in found or finding.share > found[finding.name].share:
            found[finding.name] = finding
    return found


def to_check(
    found: dict[str, Finding], *, factor: float, before: dict[str, Any] | None
) -> dict[str, Any]:
    """What a record keeps of them, joined with an earlier check of the same case.

    ``errors`` are the relative errors by tensor, and ``tolerance`` the largest of theirs;
    ``limits`` has every comparison with the tolerance of its own.
    """
    limits = dict((before or {}).get("limits", {}))
    for name, finding in found.items():
        earlier = limits.get(name)
        if earlier is None or finding.share > _share(earlier):
            limits[name] = {"error": finding.error, "tolerance": finding.tolerance}
    errors = dict((before or {}).get("errors", {}))
    for name in found:
        if " " not in name:
            errors[name] = limits[name]["error"]
    tolerance = max((limits[name]["tolerance"] for name in errors if name in limits), default=0.0)
    earlier_tolerance = (before or {}).get("tolerance", 0.0)
    return {
        "errors": errors,
        "tolerance": max(tolerance, earlier_tolerance),
        "limits": limits,
        "factor": factor,
    }


def _share(limit: dict[str, float]) -> float:
    error, tolerance = limit["error"], limit["tolerance"]
    return error / tolerance if tolerance else (0.0 if error == 0 else math.inf)
