"""The tables and figures that can be made, by name; a plan checks names without their imports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.registry import Registry

TABLES: Registry[Callable[[Any], Any]] = Registry(
    "table", decorator="table", packages=("harness.reports",)
)
FIGURES: Registry[Callable[[Any], Any]] = Registry(
    "figure", decorator="figure", packages=("harness.reports",)
)


def made_by_default(registry: Registry[Callable[[Any], Any]]) -> list[str]:
    """Choices that a command without ``sweeps=`` makes, ordered by their ``default``."""
    places = registry.given("default")
    return sorted(places, key=lambda name: (places[name], name))
