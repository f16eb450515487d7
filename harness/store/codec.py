"""Encodes typed values as JSON files and decodes them; every file carries its schema's number."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def encode(value: msgspec.Struct, **layout: Any) -> bytes:
    """The JSON of a struct; ``layout`` is that of :func:`json.dumps`, such as ``indent``."""
    return json.dumps(msgspec.to_builtins(value), **layout).encode()


def decode(text: bytes, kind: type[T], *, schema: int, may_lack: frozenset[str] = frozenset()) -> T:
    """The struct in a file: with every field of a ``kind`` that forbids others, and no other.

    Fields in ``may_lack`` were added to the kind later, and older files do not have them.

    For another kind, further fields are skipped, and those with a default may be missing.
    Raises ValueError if the text is no JSON, of another schema, or not of this type.
    """
    is_whole = kind.__struct_config__.forbid_unknown_fields
    try:
        found = msgspec.json.decode(text, type=kind)
        keys = set(msgspec.json.decode(text, type=dict[str, msgspec.Raw])) if is_whole else set()
    except msgspec.MsgspecError:
        # An error, or NaN and Infinity, which Python writes although JSON does not have them.
        values = json.loads(text.decode())
        if isinstance(values, dict):
            _require_schema(values.get("schema"), schema)
        try:
            found = msgspec.convert(values, kind)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        keys = set(values)
    _require_schema(getattr(found, "schema", None), schema)
    if is_whole and (missing := set(kind.__struct_fields__) - keys - may_lack):
        raise ValueError(f"without {', '.join(sorted(missing))}")
    return found


def _require_schema(found: object, schema: int) -> None:
    if found != schema:
        raise ValueError(
            f"schema {found}, this version reads {schema}: use the attnbench that wrote it, or "
            "another results="
        )
