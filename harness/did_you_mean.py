"""The hint in errors about names: which of the known names was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_BEGINS = 0.8
"""How much of a name's beginning must be as typed: two signs of five may have changed places."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the closest of the known names; empty if none is close."""
    close = closest(name, known)
    return f" (did you mean {close}?)" if close is not None else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant, whatever its case; None if none is close.

    Of several that begin with what was typed, the first; then the closest as a whole; then one
    that begins almost so, as ``flash_triton`` for ``falsh``.
    """
    typed = name.casefold()
    names = {item.casefold(): item for item in reversed(list(known))}
    in_order = list(reversed(names))
    if longer := [item for item in in_order if typed and item.startswith(typed)]:
        return names[longer[0]]
    if close := difflib.get_close_matches(typed, in_order, n=1):
        return names[close[0]]
    beginnings = {item[: len(typed)]: item for item in reversed(in_order)}
    close = difflib.get_close_matches(typed, beginnings, n=1, cutoff=_BEGINS)
    return names[beginnings[close[0]]] if close else None
