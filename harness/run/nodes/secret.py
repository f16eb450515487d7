"""The secret of a run over several hosts: who knows it may join, as an agent or as the leader.

It is never sent: both ends of a connection prove that they know it (:mod:`.handshake`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import MutableMapping
from pathlib import Path

VARIABLE = "ATTNBENCH_RDZV_SECRET"
"""The environment variable that may hold it; records keep no variable of such a name."""

SECRET_FILE = "secret"
"""Its file in the folder of a run whose ranks are started by a cluster."""

FEWEST_CHARACTERS = 16
"""Whoever has seen a handshake can try words at leisure; nobody tries this many characters."""


def new_secret() -> str:
    """128 random bits, which begin with a letter so that a command line takes them for text."""
    return f"k{secrets.token_hex(16)}"


def given_secret(
    *, typed: str | None, file: str | None, environment: MutableMapping[str, str]
) -> str | None:
    """The secret that a user gave as a key, as a file or as a variable; None without one.

    The variable is taken out of ``environment``, so that no process that is started from now on
    inherits it. Raises ValueError if there are several, or one that protects nothing.
    """
    by_name = {
        "launcher.rdzv_secret": typed,
        "launcher.rdzv_secret_file": None if file is None else read_private(Path(file)),
        VARIABLE: environment.pop(VARIABLE, None),
    }
    given = {name: text.strip() for name, text in by_name.items() if text is not None}
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(given)}: are different; give one of them")
    for name, text in given.items():
        if len(text) < FEWEST_CHARACTERS:
            raise ValueError(
                f"{name}: needs {FEWEST_CHARACTERS} characters or more; leave it out with "
                "launcher.node_rank=0, and it makes one"
            )
        return text
    return None


def write_secret(path: Path) -> None:
    """Write a new secret into a new file that only its owner can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
        file.write(new_secret() + "\n")


def read_secret(path: Path) -> str:
    """The secret in a file that :func:`write_secret` wrote; OSError if there is none."""
    return path.read_text(encoding="utf-8").strip()


def read_private(path: Path) -> str:
    """The text of a user's file; ValueError if there is none, or if others may read it."""
    key = f"launcher.rdzv_secret_file={path}"
    try:
        # Not blocking, so that a FIFO cannot keep the command waiting.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{key}: is not a file")
            if status.st_mode & 0o077:
                raise ValueError(f"{key}: others may read it; use chmod 600 {path}")
            return file.read(4096).decode("ascii")
    except OSError as error:
        raise ValueError(f"{key}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{key}: must be one line of ASCII text") from error


def derived_key(secret: str, purpose: str) -> bytes:
    """A key for one purpose, from which neither the secret nor other purposes' keys follow."""
    return hmac.digest(secret.encode(), purpose.encode(), hashlib.sha256)
