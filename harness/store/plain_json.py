"""JSON that every parser reads: numbers that JSON does not have, and text that is no Unicode.

NaN, Infinity and -Infinity are written as these words in quotes, as in the JSON of protocol
buffers, and read as numbers again, except where a field holds words: see :data:`VERBATIM`. Older
files hold them without quotes, which is read as well. A lone surrogate, which a message that was
cut or decoded byte by byte may hold, becomes the replacement character.
"""

from __future__ import annotations

import json
import math
from typing import Any

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

_MAYBE = tuple(f'"{word}"'.encode() for word in NOT_FINITE)

VERBATIM = frozenset(
    {"case", "case_id", "environment", "conditions", "source", "message", "traceback"}
)
"""Keys under which these words are words."""

MAX_DEPTH = 64
"""Most lists and objects inside each other; a committed record has eight."""


def to_text(value: Any, **layout: Any) -> str:
    """The JSON of plain values; ``layout`` is that of :func:`json.dumps`, such as ``indent``."""
    try:
        text = json.dumps(value, allow_nan=False, **layout)
    except ValueError:
        text = json.dumps(_with_words(value), allow_nan=False, **layout)
    # Escapes of surrogates, of whole pairs too, are rare enough to look at the values again.
    return json.dumps(readable(json.loads(text)), **layout) if "\\ud" in text else text


def from_text(data: bytes) -> Any:
    """The values of a file, with numbers for words, and Unicode. Raises ValueError."""
    try:
        return _with_numbers(readable(json.loads(data.decode())), 0)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def has_words(data: bytes) -> bool:
    """Whether a file may hold a number as a word."""
    return any(word in data for word in _MAYBE)


def readable(value: Any) -> Any:
    """Values whose texts are Unicode: a lone surrogate becomes the replacement character."""
    if isinstance(value, str):
        return readable_text(value)
    if isinstance(value, dict):
        return {readable(key): readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


def readable_text(text: str) -> str:
    """Text that is Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _with_words(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _with_words(item) for key, item in value.items()}
    return [_with_words(item) for item in value] if isinstance(value, list | tuple) else value


def _with_numbers(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {
            key: item if key in VERBATIM else _with_numbers(item, depth + 1)
            for key, item in value.items()
        }
    return [_with_numbers(item, depth + 1) for item in value] if isinstance(value, list) else value
