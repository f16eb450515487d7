"""What runs differently now than at a commit, for records from before their source was hashed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from harness.paths import ROOT
from harness.source import unchanged
from harness.source.text import that_runs

_TIMEOUT_S = 30.0


def differing_since(revision: str, files: Iterable[str]) -> set[str] | None:
    """Files, relative to the checkout, of which something else runs now than at a commit.

    Args:
        revision: as in a record; the ``+`` of a tree with changes is dropped, since nobody knows
            what they were.

    Returns:
        Those that the commit does not have, as after a move; all others only if there are none.
        None without a history here that knows the commit.
    """
    commit = revision.rstrip("+")
    changed, blobs = _changed(commit), _blobs(commit)
    if changed is None or blobs is None:
        return None
    wanted = changed.intersection(files)
    new = {file for file in wanted if file not in blobs and _counts_as(file) != unchanged.ABSENT}
    # Reading the others would say no more than that the case runs something else.
    return new or {
        file
        for file in wanted.intersection(blobs)
        if unchanged.counts_as(file, unchanged.hash_of(_text_then(blobs[file], file)))
        != _counts_as(file)
    }


def _counts_as(name: str) -> str | None:
    """As the hashes of records count a file; None if it is not there any more."""
    text = _text_now(name)
    return None if text is None else unchanged.counts_as(name, unchanged.hash_of(text))


@cache
def _changed(commit: str) -> frozenset[str] | None:
    # Else it writes the index, and a process that is killed meanwhile leaves that locked. Files
    # whose times alone have changed are listed as well.
    as_it_is = ("-c", "diff.autoRefreshIndex=false")
    listed = _git(*as_it_is, "diff", "--name-only", "--no-renames", "-z", commit, "--")
    return None if listed is None else frozenset(listed.decode().split("\0"))


@cache
def _blobs(commit: str) -> dict[str, str] | None:
    """The object that holds each file of a commit."""
    listed = _git("ls-tree", "-r", "-z", commit)
    if listed is None:
        return None
    entries = (line.partition("\t") for line in listed.decode().split("\0") if line)
    return {name: about.split()[2] for about, _, name in entries}


@cache
def _text_then(blob: str, name: str) -> str:
    text = _git("cat-file", "blob", blob) or b""
    return that_runs(text.decode(errors="replace"), Path(name).suffix)


@cache
def _text_now(name: str) -> str | None:
    try:
        text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return that_runs(text, Path(name).suffix)


def _git(*arguments: str) -> bytes | None:
    """What git says; None if there is no git, no history, or no such commit."""
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
