"""How every case of a results folder ended, without reading all that was measured.

A record is written with one key a line and the keys of the record itself indented by one
space, so that a few of them can be found in the text: ten thousand records in about a second.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from harness.store.record import SCHEMA, RecordError, RecordStore, file_case


@dataclass(kw_only=True, slots=True, frozen=True)
class Head:
    """What status needs to know of a case's newest record."""

    status: str
    wall_s: float
    written_s: float
    """By the clock of the file system."""
    message: str = ""
    """First line of the error, where there is one that says more than the status."""


def read_heads(store: RecordStore) -> tuple[dict[str, Head], list[str]]:
    """The newest readable record of every case by its id, and one line per unreadable file."""
    attempts: dict[str, list[tuple[int, str]]] = {}
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(store.folder):
            found = file_case(name)
            if found is not None:
                attempts.setdefault(found[0], []).append((found[1], name))
    heads: dict[str, Head] = {}
    problems: list[str] = []
    for case_id, files in attempts.items():
        for _, name in sorted(files, reverse=True):
            try:
                heads[case_id] = _read(store, name)
                break
            except RecordError as error:
                problems.append(str(error))
    return heads, problems


def _read(store: RecordStore, name: str) -> Head:
    path = f"{store.folder}{os.sep}{name}"
    try:
        with open(path, "rb") as file:
            text = file.read()
            written_s = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        raise RecordError(f"{path}: not a readable record ({error.strerror})") from error
    status, schema, wall_s = (_value(text, key) for key in (b"status", b"schema", b"wall_s"))
    complete = schema == str(SCHEMA).encode() and text.endswith(b"}\n")
    if complete and status in (b'"ok"', b'"oom"'):
        with contextlib.suppress(ValueError):
            return Head(status=status[1:-1].decode(), wall_s=float(wall_s), written_s=written_s)
    record = store.read(store.folder / name)
    message = (record.error or {}).get("message", "")
    return Head(
        status=record.status,
        wall_s=record.wall_s,
        written_s=written_s,
        message=message.partition("\n")[0],
    )


def _value(text: bytes, key: bytes) -> bytes:
    """A value of the record itself, as JSON; from the end, as the long values come before."""
    start = text.rfind(b'\n "' + key + b'": ')
    line = text[start + len(key) + 6 : text.find(b"\n", start + 1)] if start >= 0 else b""
    return line.removesuffix(b",")
