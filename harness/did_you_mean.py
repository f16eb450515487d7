"""The hint in errors about names: which of the known names was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` with the closest of the known names; empty if none is close.

    Of several that begin with what was typed, the first.
    """
    known = list(known)
    longer = [item for item in known if name and item.startswith(name)]
    close = longer or difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""
