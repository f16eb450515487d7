"""Lines for a terminal: all that commands print goes through here.

A sweep's name, a file's name, a case's id or an error may be from somebody else's folder. What a
library prints by itself meets :class:`PrintableStream`, which the commands put in the place of
standard output and error; what rich draws is in :mod:`harness.terminal`.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from harness.escapes import printable, printable_lines


def warn(line: object, *, command: str = "attnbench") -> None:
    """One line on standard error, after the command's name."""
    print(f"{command}: {printable(line)}", file=sys.stderr, flush=True)


def say(line: object) -> None:
    """One line on standard output."""
    print(printable(line))


class PrintableStream(io.TextIOWrapper):
    """A text stream that shows the codes of controls instead of writing them."""

    @property
    def styled(self) -> Styled:
        """The same stream for who has made its text printable and adds controls of its own."""
        return Styled(self)

    def write(self, text: str) -> int:
        super().write(printable_lines(text))
        return len(text)

    def write_styled(self, text: str) -> int:
        """Write text whose controls are wanted."""
        return super().write(text)


class Styled:
    """A :class:`PrintableStream` that leaves controls as they are."""

    def __init__(self, stream: PrintableStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write_styled(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
