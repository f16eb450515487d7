"""The command of a plan, so that it goes on in the folder where the plan lies.

A command may leave ``results=`` out, or name a folder that has been renamed or copied since.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

_PLAIN = re.compile(r"[\w./%+@:~-]+")
"""A value that Hydra's grammar takes without quotes."""


def command_into(command: str, results: Path, **keys: str) -> str:
    """``command`` with ``results=`` and further keys set, those that it has in their places."""
    values = {"results": _quoted(str(results)), **keys}
    words = []
    for word in shlex.split(command):
        key = word.partition("=")[0]
        words.append(f"{key}={values.pop(key)}" if key in values else word)
    return shlex.join([*words, *(f"{key}={value}" for key, value in values.items())])


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"
