"""Colours and markers: the same for a choice in every figure.

A choice declares its own where it is registered. The colours are those of Okabe and Ito (Color
Universal Design, 2008) and Paul Tol's muted scheme, which people with colour-blindness can tell
apart. A choice that declares none gets a pair that no other choice of its kind has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from itertools import product
from math import dist
from typing import Any

from matplotlib.colors import to_rgb

from harness.cases.columns import POINTS
from kernels.registry import Look, Registry
from parallel import BACKENDS, STRATEGIES

MEMORY_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#D55E00",
    "optimizer state": "#009E73",
    "activations": "#E69F00",
    "temporaries": "#CC79A7",
    "communication": "#56B4E9",
    "other": "#999999",
}
"""Colours of memory categories, from the bottom of a stack to its top."""

KERNEL_COLOURS = {
    "matmul": "#0072B2",
    "attention": "#E69F00",
    "softmax": "#D55E00",
    "normalisation": "#009E73",
    "elementwise": "#56B4E9",
    "reduction": "#CC79A7",
    "copy": "#DDCC77",
    "optimizer": "#882255",
    "communication": "#332288",
    "other": "#999999",
}
"""Colours of kernel categories, from the first in a bar to the last."""

WAITING = "#D55E00"
"""Colour of the time that a rank waits for others."""

SPARE_COLOURS = ("#44AA99", "#CC6677", "#117733", "#661100", "#6699CC", "#888888")

MARKERS = "osD^vPX<>p*hd8"

KINDS: tuple[Registry[Any], ...] = (BACKENDS, STRATEGIES)


def colour(name: str) -> str:
    """The colour of a backend, a strategy, a precision or another value."""
    return _look(name).colour or SPARE_COLOURS[_digest(name) % len(SPARE_COLOURS)]


def colour_unlike(taken: Iterable[str]) -> str:
    """The spare colour that is furthest from all of ``taken``."""
    taken = list(taken)
    return max(SPARE_COLOURS, key=lambda spare: min(dist(to_rgb(spare), to_rgb(x)) for x in taken))


def marker(name: str) -> str:
    """The marker of a value, so that lines differ by more than colour."""
    return _look(name).marker or MARKERS[_digest(name) % len(MARKERS)]


def _look(name: str) -> Look:
    """The declared look of a value; a registered choice without one gets a spare pair."""
    for registry in KINDS:
        if name in registry:
            looks = registry.given("look")
            if name in looks:
                return looks[name]
            plain = tuple(other for other in registry.names() if other not in looks)
            taken = frozenset((look.colour, look.marker) for look in looks.values())
            return _spare_looks(plain, taken)[name]
    looks_of_points = (point.looks for point in POINTS.values())
    return next((looks[name] for looks in looks_of_points if name in looks), Look())


@lru_cache
def _spare_looks(names: Iterable[str], taken: frozenset[tuple[str, str]]) -> dict[str, Look]:
    """A pair of colour and marker for each name: its own by its hash, or the next free one."""
    pairs = list(product(SPARE_COLOURS, MARKERS))
    used = set(taken)
    found = {}
    for name in names:
        start = _digest(name) % len(pairs)
        ahead = pairs[start:] + pairs[:start]
        pair = next((pair for pair in ahead if pair not in used), ahead[0])
        used.add(pair)
        found[name] = Look(colour=pair[0], marker=pair[1])
    return found


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")


def mixed_with_white(tint: str, share: float) -> tuple[float, ...]:
    """A lighter ``tint``: opaque, so that the grid does not shine through."""
    return tuple(1 - share * (1 - channel) for channel in to_rgb(tint))
