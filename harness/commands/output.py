"""Standard output and error of the commands: what cannot be written never ends a command.

A reader may go away (``| head``), a terminal may be closed, a disk may be full, a descriptor may be
closed from the start, and an encoding may lack the characters of a table. From the first write that
fails the rest of that stream goes nowhere, and a command finishes what it does. A reader that has
gone had read enough; of any other loss the command says so in one line, and its exit code is not 0.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import sys
from collections.abc import Callable
from typing import IO, Any, cast

from harness.printing import PrintableStream, warn

LEGIBLE = "attnbench-legible"
"""The name of the handler that replaces characters which an encoding lacks."""

SIMILAR = dict(
    zip(
        "\u00d7\u00b5\u00b1\u2260\u00b2\u2026\u2013\u2014\u2212"
        "\u2500\u2501\u2502\u2578\u257a\u2022\u22c6\u2020\u2021"
        "\u00b6\u00a7\u2016\u2192\u2190\u2265\u2264\u2018\u2019"
        "\u25c7\u25b3\u25bd\u2298",
        "xu~!2.-----|--**+#$S|><><''o^v0",
        strict=True,
    )
)
"""One character for one, so that the columns of a table stay where they are."""


GOES_ON = "the command goes on, and all that it measures is recorded"


class Streams:
    """The standard streams of one command.

    Args:
        command: its name, for the line about a lost output.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_terminal = False
        self.measures = False
        """Whether the command does more than write its output. If so, it also says that its reader
        has gone, and it may have no output from the start, as in the background."""
        self.lost: OSError | None = None
        """Why standard output could not be written, unless its reader had read enough."""

    def install(self) -> None:
        """Put steady streams in the place of ``sys.stdout`` and ``sys.stderr``."""
        global _installed
        _installed = self
        codecs.register_error(LEGIBLE, replace_character)
        _open_closed()
        self._is_terminal = os.isatty(1)
        sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = _steady(sys.stdout, 1, self._output_lost)
        sys.stderr = _steady(sys.stderr, 2, lambda error: None)

    def _output_lost(self, error: OSError) -> None:
        if self.measures and error.errno == errno.EBADF:
            return
        if error.errno != errno.EPIPE and not self._is_terminal:
            self.lost = error
        elif not self.measures:
            return
        end = f"; {GOES_ON}" if self.measures else ""
        warn(
            f"standard output cannot be written ({error.strerror}){end}",
            command=self._command,
        )


_installed: Streams | None = None


def begin_measuring() -> None:
    """Tell the streams of this process's command that it measures.

    From here on a line leaves when it is printed, through a pipe as well: measuring takes minutes.
    """
    if _installed is not None:
        _installed.measures = True
        # A test may have put a stream of its own there.
        if isinstance(sys.stdout, PrintableStream):
            sys.stdout.reconfigure(line_buffering=True)


def replace_character(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement of the first character that cannot be encoded, for codecs."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if "\ud800" <= character <= "\udfff":
        # A byte of a file's name that is no text, or half of a character.
        return f"\\u{ord(character):04x}", error.start + 1
    return SIMILAR.get(character, "?"), error.start + 1


def _open_closed() -> None:
    """Open /dev/null in the place of closed standard descriptors.

    Otherwise a file opened later, such as a record, would get their numbers, and what somebody
    prints would end up in it. Writing to standard output fails as before.
    """
    for wanted in (0, 1, 2):
        try:
            os.fstat(wanted)
        except OSError:
            fd = os.open(os.devnull, os.O_RDWR if wanted == 2 else os.O_RDONLY)
            if fd != wanted:
                os.dup2(fd, wanted)
                os.close(fd)
            os.set_inheritable(wanted, True)


def _steady(stream: IO[str] | None, fd: int, on_lost: Callable[[OSError], None]) -> IO[str]:
    """A text stream like ``stream`` whose writes do not fail."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if stream is not None:
        stream.flush()
    is_prompt = fd == 2 or os.isatty(fd)
    return PrintableStream(
        cast(io.BufferedWriter, io.BufferedWriter(cast(Any, _SteadyFile(fd, on_lost)))),
        encoding=encoding,
        errors=LEGIBLE,
        line_buffering=is_prompt,
    )


class _SteadyFile(io.RawIOBase):
    """A file descriptor whose content goes nowhere once it cannot be written."""

    def __init__(self, fd: int, on_lost: Callable[[OSError], None]) -> None:
        super().__init__()
        self._fd = fd
        self._on_lost = on_lost
        self.name = f"<fd {fd}>"
        self.mode = "wb"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:
                # Another program has made the terminal that it shares non-blocking.
                select.select([], [self._fd], [])
            except OSError as error:
                self._discard()
                self._on_lost(error)
                return len(data)

    def _discard(self) -> None:
        """Let everything that is written from now on go nowhere, also by libraries in C."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._fd, inheritable=True)
        os.close(nowhere)
