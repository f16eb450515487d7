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


def to_check(found: dict[str, Finding], *, factor: float) -> dict[str, Any]:
    """What a record keeps of findings.

    ``errors`` are the relative errors by tensor, and ``tolerance`` the largest of theirs;
    ``limits`` has every comparison with the tolerance of its own, and ``factor`` is that between
    what a careful computation reaches and what is tolerated.
    """
    limits = {
        name: {"error": finding.error, "tolerance": finding.tolerance}
        for name, finding in found.items()
    }
    of_tensors = [name for name in found if " " not in name]
    return {
        "errors": {name: found[name].error for name in of_tensors},
        "tolerance": max((found[name].tolerance for name in of_tensors), default=0.0),
        "limits": limits,
        "factor": factor,
    }


def join_checks(checks: Iterable[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Checks of one case as one: of each comparison the one closest to its tolerance."""
    joined: dict[str, Any] | None = None
    for check in checks:
        if not check:
            continue
        if joined is None:
            joined = {"errors": {}, "tolerance": 0.0}
        for name, error in check["errors"].items():
            earlier = joined["errors"].get(name, error)
            joined["errors"][name] = error if not error <= earlier else earlier
        joined["tolerance"] = max(joined["tolerance"], check["tolerance"])
        for name, limit in check.get("limits", {}).items():
            limits = joined.setdefault("limits", {})
            if name not in limits or _share(limit) > _share(limits[name]):
                limits[name] = limit
        if "factor" in check:
            joined["factor"] = check["factor"]
    return joined


def _share(limit: dict[str, float]) -> float:
    error, tolerance = limit["error"], limit["tolerance"]
    return error / tolerance if tolerance else (0.0 if error == 0 else math.inf)
