"""The types that fields of records are made of: numbers that fit a table, and texts of a length."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LARGE = 2**62
"""Beyond this an integer fits no column of a table."""

Integer = Annotated[int, Meta(ge=-LARGE, le=LARGE)]
Count = Annotated[int, Meta(ge=0, le=LARGE)]
Amount = Annotated[float, Meta(ge=0, le=1e30)]
"""A measured quantity; neither NaN nor infinite."""
Milliseconds = Annotated[float, Meta(ge=0, le=3.2e10)]
"""At most a year, and in a file neither NaN nor infinite."""

Text = Annotated[str, Meta(max_length=1_000_000)]
Name = Annotated[str, Meta(min_length=1, max_length=1_000)]

Scalar = bool | Integer | float | Text | None
Simple = Scalar | list[Scalar] | dict[str, Scalar]
"""A value of an option: nothing is nested deeper."""
