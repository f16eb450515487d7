"""Families of schemes: how attention is split over ranks, whichever layout and transport it has."""

from __future__ import annotations

from functools import cache

from kernels.registry import Look
from parallel import BACKENDS
from parallel.context.heads.nested import SplitsGroups
from parallel.context.heads.split import SplitsHeads

RINGS, GATHERS, HEADS, HYBRIDS = "rings", "gathers", "heads (Ulysses)", "hybrids"

FAMILIES = {
    RINGS: Look(colour="#0072B2", marker="o"),
    GATHERS: Look(colour="#D55E00", marker="s"),
    HEADS: Look(colour="#009E73", marker="^"),
    HYBRIDS: Look(colour="#CC79A7", marker="D"),
}
"""Keys come step by step; all at once; whole sequences in some of the heads; heads within groups of
ranks and keys between them."""


@cache
def family_of(scheme: str) -> str:
    """The family of a registered scheme; one that says nothing of itself is its own."""
    target = BACKENDS[scheme].target
    if issubclass(target, SplitsGroups):
        return HYBRIDS
    if issubclass(target, SplitsHeads):
        return HEADS
    gathers = getattr(target, "gathers", None)
    if gathers is None:
        return scheme
    return GATHERS if gathers else RINGS
