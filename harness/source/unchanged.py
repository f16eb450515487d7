"""Edits that change nothing of what is timed, so that measurements from before them stay of now.

``unchanged.csv`` beside this file has a row for each such edit: the file counts by the code that it
had before, as long as it has the code of that row and no other. That code may have a row in turn,
of an earlier edit. A row needs a reason, which says how it is known that existing calls run as they
did, and may name options: a case that sets one of them, or has more of it than
``task.head_dim>128`` says, runs what was new then, so that for it no earlier code counts. After an
edit::

    python -m harness.source.unchanged REVISION "REASON" FILE... --unless task.value_dim

writes the rows of files against a commit. A file that is new since then counts as absent. Write a
row before anything is measured: what was measured after an edit and before its row is of other code
than both. If a later edit of the file may change a time, delete its rows.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.paths import ROOT
from harness.source.text import that_runs

TABLE = Path(__file__).with_suffix(".csv")

ABSENT = "absent"
"""What stands for the code before where there was no file."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One edit of a file, by the hashes of what runs of it."""

    file: str
    """Relative to the checkout."""
    code: str
    counts_as: str
    """A hash, or ``ABSENT``."""
    unless: str
    """Options, ``task.value_dim`` or ``task.head_dim>128``, separated by spaces, of cases that run
    what is new; ``model.head_dim`` is that of a model's attention."""
    reason: str


def code_of(text: str, suffix: str) -> str:
    """The hash of what runs of a file's text."""
    return hash_of(that_runs(text, suffix))


def hash_of(running: str) -> str:
    """The hash of a text without what does not run."""
    return hashlib.sha256(running.encode()).hexdigest()


def counts_as(file: str, code: str, options: frozenset[str] = frozenset()) -> str:
    """The hash by which a file of this code counts: its own, unless rows lead to an earlier one.

    Args:
        options: those of :func:`options_of` a case.
    """
    rows = dict(_rows())
    # Each row once, since a table that was merged by hand might lead in a circle.
    while (row := rows.pop((file, code), None)) and options.isdisjoint(row.unless.split()):
        code = row.counts_as
    return code


def options_of(case: Mapping[str, Any]) -> frozenset[str]:
    """Of the options that rows name those that a case, as in a record, has."""
    named = {option for row in _rows().values() for option in row.unless.split()}
    return frozenset(option for option in named if _has(case, option))


def _has(case: Mapping[str, Any], option: str) -> bool:
    name, _, bound = option.partition(">")
    part, _, key = name.partition(".")
    values = case.get(part) or {}
    if name == "model.head_dim" and values:
        value = values["d_model"] // values["num_heads"]
    else:
        value = values.get(key)
    return (value or 0) > float(bound) if bound else value not in (None, False, 0)


@cache
def _rows() -> dict[tuple[str, str], Row]:
    return {(row.file, row.code): row for row in read(TABLE)}


def read(table: Path) -> list[Row]:
    """The rows of a table, of each file its last edit first; none if there is no such table."""
    if not table.is_file():
        return []
    with table.open(newline="", encoding="utf-8") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def with_edits(
    rows: Iterable[Row],
    revision: str,
    reason: str,
    files: Iterable[str],
    unless: Iterable[str] = (),
) -> list[Row]:
    """Rows by which files of now count as they did at a commit, beside those of other files.

    A file that is as it was before some of its edits loses their rows.

    Raises:
        ValueError: there is no such commit or file, or nothing of a file runs differently.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.file, []).append(row)
    for name in files:
        path = ROOT / name
        if not path.is_file():
            raise ValueError(f"{name}: no such file in {ROOT}")
        code = code_of(path.read_text(encoding="utf-8"), path.suffix)
        then = _text_at(revision, name)
        before = ABSENT if then is None else code_of(then, path.suffix)
        if before == code:
            raise ValueError(f"{name}: runs as it did at {revision}, and needs no row")
        options = " ".join(sorted(set(unless)))
        edit = Row(file=name, code=code, counts_as=before, unless=options, reason=reason)
        older = found.get(name, [])
        # Rows of code that this one does not lead to count for nothing.
        codes = [row.code for row in older]
        edits = [edit, *(older[codes.index(before) :] if before in codes else [])]
        undone = [number for number, row in enumerate(edits, 1) if row.counts_as == code]
        found[name] = edits[undone[0] :] if undone else edits
    return [row for name in sorted(found) for row in found[name]]


def _text_at(revision: str, name: str) -> str | None:
    """A file's text at a commit; None if that had no such file."""
    command = ["git", "-C", str(ROOT), "cat-file", "-e", f"{revision}^{{commit}}"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise ValueError(f"{revision}: no such commit in {ROOT}")
    command = ["git", "-C", str(ROOT), "show", f"{revision}:{name}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the rows of some files into the table."""
    parser = argparse.ArgumentParser(prog="python -m harness.source.unchanged", description=__doc__)
    parser.add_argument("revision", help="a commit whose measurements stay of now")
    parser.add_argument("reason", help="how it is known that existing calls run as they did")
    parser.add_argument("files", nargs="+", help="relative to the checkout")
    parser.add_argument("--unless", action="append", default=[], help="an option of new cases")
    given = parser.parse_args(arguments)
    try:
        rows = with_edits(read(TABLE), given.revision, given.reason, given.files, given.unless)
    except ValueError as error:
        parser.error(str(error))
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, Row.__slots__, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
