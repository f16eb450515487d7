"""The console of rich that the commands draw tables and progress with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from harness.escapes import printable_lines


class PrintableConsole(Console):
    """A console whose own codes for colours and the cursor are the only ones that it writes."""

    @property
    def file(self) -> IO[str]:
        """Its stream; of a :class:`harness.printing.PrintableStream` the styled one."""
        found = super().file
        return getattr(found, "styled", found)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments of text and style, whose text is printable."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable_lines(segment.text)
            yield segment if text == segment.text else segment._replace(text=text)
