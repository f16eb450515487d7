"""Encodes typed values as JSON files and decodes them; every file carries its schema's number."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from harness.escapes import printable
from harness.store import plain_json

T = TypeVar("T", bound=msgspec.Struct)


def encode(value: msgspec.Struct, **layout: Any) -> bytes:
    """The JSON of a struct; ``layout`` is that of :func:`json.dumps`, such as ``indent``."""
    return plain_json.to_text(msgspec.to_builtins(value), **layout).encode()


def decode(
    text: bytes,
    kind: type[T],
    *,
    schema: int,
    may_lack: frozenset[str] = frozenset(),
    shape: Any = None,
) -> T:
    """The struct in a file: with every field of a ``kind`` that forbids others, and no other.

    Fields in ``may_lack`` were added to the kind later, and older files do not have them.

    For another kind, further fields are skipped, and those with a default may be missing.
    Raises ValueError in one line if the text is no JSON, of another schema, or not of this type.

    Args:
        shape: a further type that the whole file must have, for what the kind leaves open. It
            requires the fields that the kind has to have.
    """
    try:
        found = _decoded(text, kind, shape, may_lack)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        # An error, or what msgspec does not read: NaN and Infinity, which Python used to write
        # although JSON does not have them, and lone surrogates.
        found = _converted(text, kind, shape, schema, may_lack)
    _require_schema(getattr(found, "schema", None), schema)
    return found


def _decoded(text: bytes, kind: type[T], shape: Any, may_lack: frozenset[str]) -> T:
    if plain_json.has_words(text):
        raise msgspec.DecodeError
    found = msgspec.json.decode(text, type=kind)
    if shape is not None:
        msgspec.json.decode(text, type=shape)
    elif kind.__struct_config__.forbid_unknown_fields:
        _require_fields(kind, set(msgspec.json.decode(text, type=dict[str, msgspec.Raw])), may_lack)
    return found


def _converted(text: bytes, kind: type[T], shape: Any, schema: int, may_lack: frozenset[str]) -> T:
    values = plain_json.from_text(text)
    if isinstance(values, dict):
        _require_schema(values.get("schema"), schema)
    try:
        found = msgspec.convert(values, kind)
        if kind.__struct_config__.forbid_unknown_fields:
            _require_fields(kind, set(values), may_lack)
        if shape is not None:
            msgspec.convert(values, shape)
    except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
        raise ValueError(printable(str(error)[:500])) from error
    return found


def _require_fields(kind: type[T], keys: set[str], may_lack: frozenset[str]) -> None:
    if missing := set(kind.__struct_fields__) - keys - may_lack:
        raise ValueError(f"without {', '.join(sorted(missing))}")


def _require_schema(found: object, schema: int) -> None:
    if found != schema or isinstance(found, bool):
        wrote = printable(str(found)[:20])
        raise ValueError(
            f"schema {wrote}, this version reads {schema}: use the attnbench that wrote it, or "
            "another results="
        )


@contextlib.contextmanager
def decoding_many() -> Iterator[None]:
    """Leave the garbage collector out while many files are decoded, of which nothing is garbage.

    It would look again and again at all that was decoded, for longer than decoding takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
