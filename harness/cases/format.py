"""How numbers and words look in a cell: three significant digits, statuses in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Format = Callable[[Any], str]

STATUS_WORDS = {
    "oom": "OOM",
    "unsupported": "unsupported",
    "wrong": "wrong result",
    "timeout": "timeout",
    "failed": "failed",
}

ABSENT = "–"  # noqa: RUF001 - an en dash is what a table shows where a number does not apply
DAGGER = "†"
DOUBLE_DAGGER = "‡"
SECTION = "§"
PILCROW = "¶"
DOUBLE_BAR = "‖"
DIAMOND = "◇"
TRIANGLE = "△"
OPEN_TRIANGLE_DOWN = "▽"
CIRCLED_SLASH = "⊘"
STAR = "⋆"
PLUS_MINUS = "±"
TIMES = "×"  # noqa: RUF001 - the multiplication sign


def is_missing(value: Any) -> bool:
    return value is None or value != value


def number(value: float) -> str:
    """Three significant digits, without an exponent where that reads well: 0.123, 12.3, 1,230."""
    if math.isinf(value):
        return str(value)
    if value == 0:
        return "0"
    digits = f"{value:.2e}"
    exponent = int(digits[digits.index("e") + 1 :])
    if exponent < -4:
        return digits
    return f"{float(digits):,.{max(0, 2 - exponent)}f}"


def decimals(value: float) -> int:
    """Digits after the point that give ``value`` three significant ones."""
    digits = f"{value:.2e}"
    return max(0, 2 - int(digits[digits.index("e") + 1 :])) if value else 0


def with_spread(value: float, spread: float) -> str:
    """``12.3 ± 0.4``: the spread to as many decimals as the value."""
    if is_missing(spread) or not value:
        return number(value)
    return f"{number(value)} {PLUS_MINUS} {spread:,.{decimals(value)}f}"


def integer(value: float) -> str:
    return f"{int(value):,}"


def count(value: float) -> str:
    """How often something happens: 80, 1,200; an average over several, 2.50, as a number."""
    return integer(value) if float(value).is_integer() else number(value)


def counted(value: float, noun: str, plural: str = "") -> str:
    """``1 case``, ``1,200 cases``."""
    return f"{integer(value)} {noun if value == 1 else plural or noun + 's'}"


def percent(value: float) -> str:
    return f"{100 * value:,.1f}"


def rough_percent(value: float) -> str:
    """A percentage to one decimal below ten, and whole above: 0.4, 8.5, 12, 116."""
    return f"{100 * value:,.{1 if 100 * value < 9.95 else 0}f}"


def scientific(value: float) -> str:
    return f"{value:.1e}"


def factor(value: float) -> str:
    """A ratio, to two decimals while it is small: 0.98×, 12.3×."""
    return f"{value:.2f}{TIMES}" if abs(value) < 9.995 else f"{number(value)}{TIMES}"


def text(value: Any) -> str:
    return str(value)


def yes_no(value: Any) -> str:
    return "yes" if value else "no"


def unless(usual: Any, words: str) -> Callable[[Any], str]:
    """Says a value in ``words``, such as ``{} cache``; nothing where it is the usual one."""
    return lambda value: "" if value == usual else words.format(value)
