"""Text from records, plans and other people's folders, made harmless where it meets a format.

A record's words are whatever a library's message, a file's name or another person put there. On a
terminal they could move the cursor, in Markdown and HTML become code and links, in a spreadsheet
formulas. LaTeX has its own in :mod:`harness.render.latex`, and HTML that of Jinja.
"""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile(
    # C0 and C1 controls, line and paragraph separators, marks that turn the direction of text or
    # have no width, and lone surrogates.
    r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u061c\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)

_SPACE = re.compile(r"[\t\n\r\f\v]+")

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\x00")

_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?%?|[-+]?(inf|nan)", re.IGNORECASE)


def printable(text: object) -> str:
    """Text on one line of a terminal: white space is a space, and controls show their code."""
    found = str(text)
    if found.isascii() and found.isprintable():
        return found
    return _UNPRINTABLE.sub(_code, _SPACE.sub(" ", found))


def printable_lines(text: object) -> str:
    """Text of several lines, each :func:`printable`."""
    found = str(text)
    # Most text is one line without a control, and a table has thousands of them.
    if found.isascii() and found.isprintable():
        return found
    return "\n".join(map(printable, found.split("\n")))


def markdown(text: object) -> str:
    """Text inside a line or a table cell of Markdown: no HTML, no link, no further column."""
    escaped = printable(text).replace("|", "\\|").replace("<", "&lt;").replace("](", "]\\(")
    return _LINK.sub(r"\\\g<0>", escaped) if "[" in escaped else escaped


_LINK = re.compile(r"(?<!\\)\[(?=[^\]]*\](\\\(|:|\[))|(?<!\\)!\[")
"""The bracket that begins a link or an image, or its definition."""


def code(text: object) -> str:
    """Text between two backticks of Markdown, or in a fenced block: one line, and no backtick."""
    return printable(text).replace("`", "'")


def spreadsheet(value: object) -> object:
    """A cell of CSV, on one line, with the codes of controls, since it may be shown on a terminal.

    A text that a spreadsheet would calculate begins with an apostrophe.
    """
    if not isinstance(value, str):
        return value
    plain = value if value.isprintable() else printable(value)
    is_formula = value.startswith(_FORMULA) and not _NUMBER.fullmatch(value)
    return "'" + plain if is_formula and len(value) > 1 else plain


def _code(match: re.Match[str]) -> str:
    number = ord(match[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
