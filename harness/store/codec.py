"""Encodes typed values as JSON files and decodes them; every file carries its schema's number."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def encode(value: msgspec.Struct, **layout: Any) -> bytes:
    """The JSON of a struct; ``layout`` is that of :func:`json.dumps`, such as ``indent``."""
    return json.dumps(msgspec.to_builtins(value), **layout).encode()


def decode(text: bytes, kind: type[T], *, schema: int) -> T:
    """The struct in a file, whose other fields are skipped unless ``kind`` forbids them.

    Raises ValueError if the text is no JSON, of another schema, or not of this type.
    """
    try:
        found = msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        # An error, or NaN and Infinity, which Python writes although JSON does not have them.
        values = json.loads(text)
        if isinstance(values, dict):
            _require_schema(values.get("schema"), schema)
        try:
            found = msgspec.convert(values, kind)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
    _require_schema(getattr(found, "schema", None), schema)
    return found


def _require_schema(found: object, schema: int) -> None:
    if found != schema:
        raise ValueError(
            f"schema {found}, this version reads {schema}: use the attnbench that wrote it, or "
            "another results="
        )
