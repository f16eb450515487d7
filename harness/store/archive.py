"""Archives: records in compressed files, one line for each, beside those that are files.

``records/archive/NAME.jsonl.xz`` holds lines of ``{"file": FILE, "record": {...}}``: the name of
the file that the record had, and what stood in it. A record's file has sorted keys and a fixed
layout, so that its line gives back every byte. Lines lie in the order of their files' names and
carry no time, so that equal records make equal archives.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from harness.escapes import printable
from harness.store.regular import MAX_BYTES, read_regular, unlisted

SUFFIX = ".jsonl.xz"

PRESET = 6
"""Of xz. On 1,853 records of 26 MB: 1.95 MB, 9 gives 1.94 and gzip 3.46; read in 0.15 s."""

MAX_ARCHIVE_BYTES = 256 * 2**20
MAX_UNPACKED_BYTES = 2**30
"""Most bytes of an archive, and of all archived records of a folder: those above take up 2 MB and
26 MB."""

PIECE_BYTES = 2**22
MEMORY_BYTES = 2**27
"""Of the decompressor; xz's largest preset needs half of it."""

_BEGINNING = b'{"file":"'

_LINE = re.compile(rb'\{"file":(?P<file>"[^"\\]+"),"record":(?P<record>\{.*\})\}')


_Stamp = tuple[Path, int, int, int]
"""An archive and what tells a changed one: time in ns, size and inode."""


class Archives:
    """The archives in one folder, each decompressed once in a process unless it changes.

    One that cannot be read costs its own records alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamps: list[_Stamp] = []
        self._contents: list[tuple[Path, dict[str, bytes], str]] = []
        """Of each archive its records, and the line that says why there are none."""
        self._records: dict[str, bytes] = {}

    def paths(self) -> list[Path]:
        """The archives, by name."""
        return [path for path, *_ in self._found()]

    def records(self) -> dict[str, bytes]:
        """The JSON of every archived record by the name of its file."""
        self._look()
        return self._records

    def problems(self) -> list[str]:
        """One line for each archive that cannot be read, or for their folder."""
        return [*unlisted(self.folder), *(problem for *_, problem in self._look() if problem)]

    def holder(self, name: str) -> Path | None:
        """The archive that holds the record of a file, if one does."""
        return next((path for path, records, _ in self._look() if name in records), None)

    def _look(self) -> list[tuple[Path, dict[str, bytes], str]]:
        """The contents of the archives, which together are limited like one."""
        stamps = self._found()
        if stamps != self._stamps:
            self._contents, self._records = [], {}
            left_bytes = MAX_UNPACKED_BYTES
            for stamp in stamps:
                found, problem = _read(*stamp, left_bytes)
                left_bytes -= sum(len(name) + len(text) for name, text in found.items())
                self._contents.append((stamp[0], found, problem))
                self._records |= found
            self._stamps = stamps
        return self._contents

    def _found(self) -> list[_Stamp]:
        try:
            entries = [item for item in os.scandir(self.folder) if item.name.endswith(SUFFIX)]
        except OSError:
            return []
        stamps = []
        for entry in sorted(entries, key=lambda item: item.name):
            # Of a link the link itself, which may lead nowhere.
            stat = os.stat(entry.path) if os.path.exists(entry.path) else os.lstat(entry.path)
            stamps.append((Path(entry.path), stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return stamps


@lru_cache(maxsize=256)
def _read(
    path: Path, mtime_ns: int, size: int, inode: int, limit_bytes: int
) -> tuple[dict[str, bytes], str]:
    """The records of an archive, and the line that says why there are none."""
    try:
        return read(path, limit_bytes), ""
    except (ValueError, OSError, MemoryError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "no memory").splitlines()[0]
        return {}, printable(f"{path}: not a readable archive ({reason})")


def read(path: Path, limit_bytes: int | None = None) -> dict[str, bytes]:
    """The JSON of each record in an archive's file, which may hold so many bytes of them.

    Raises ValueError and OSError.
    """
    return from_bytes(read_regular(path, MAX_ARCHIVE_BYTES)[0], limit_bytes)


def from_bytes(data: bytes, limit_bytes: int | None = None) -> dict[str, bytes]:
    """The JSON of each record in an archive by its file's name. Raises ValueError."""
    found: dict[str, bytes] = {}
    limit_bytes = MAX_UNPACKED_BYTES if limit_bytes is None else limit_bytes
    for number, line in enumerate(_lines(data, limit_bytes), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f'line {number} is not {{"file": ..., "record": {{...}}}}')
        name = json.loads(match["file"])
        if name in found:
            raise ValueError(f"line {number} is a second {name[:200]}")
        found[name] = match["record"]
    return found


def _lines(data: bytes, limit_bytes: int) -> Iterator[bytes]:
    """The lines of an archive, decompressed piece by piece, so that a small file makes no host run
    out of memory. Raises ValueError."""
    rest, total_bytes = b"", 0
    for piece in _pieces(data):
        total_bytes += len(piece)
        if total_bytes > limit_bytes:
            limit = f"{MAX_UNPACKED_BYTES >> 20:,} MiB of records"
            others = "" if limit_bytes == MAX_UNPACKED_BYTES else " with the archives before it"
            raise ValueError(f"over {limit}{others}")
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_BYTES:
            raise ValueError(f"a record of over {MAX_BYTES >> 20:,} MiB")
        if rest and not (rest[: len(_BEGINNING)] == _BEGINNING[: len(rest)]):
            raise ValueError("not lines of records")
    if rest:
        yield rest


def _pieces(data: bytes) -> Iterator[bytes]:
    """The text of one or more xz streams. Raises ValueError."""
    if not data:
        raise ValueError("it is empty")
    try:
        while data:
            stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MEMORY_BYTES)
            yield stream.decompress(data, PIECE_BYTES)
            while not stream.eof:
                if stream.needs_input:
                    raise ValueError("it ends in the middle")
                yield stream.decompress(b"", PIECE_BYTES)
            data = stream.unused_data
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def to_bytes(records: dict[str, bytes]) -> bytes:
    """The archive of records: their JSON on one line each, by their files' names."""
    lines = [
        b'{"file":%b,"record":%b}\n' % (json.dumps(name).encode(), records[name])
        for name in sorted(records)
    ]
    return lzma.compress(b"".join(lines), preset=PRESET)


def compact(data: bytes) -> bytes:
    """The JSON of a record's file on one line; ValueError unless it gives back every byte."""
    try:
        text = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
        if expanded(text) == data:
            return text
    except RecursionError:
        pass
    raise ValueError("not in the layout of a record's file")


def expanded(text: bytes) -> bytes:
    """The bytes of a record's file from its JSON on one line."""
    return (json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n").encode()
