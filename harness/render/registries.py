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
