"""Blocks of a page that hold a table, or its sentence, as it follows from committed records.

A block begins with a comment that names a table as ``attnbench-report`` writes it, and what to show
of it, one option on each line, and it ends with another comment::

    <!-- table: RESULTS/sweeps/SWEEP/tables/TABLE.md
    where: seq_len == 512
    columns: attention; both (ms)
    -->
    ...
    <!-- end -->

``finding:`` instead of ``table:`` gives the sentence, ``<!-- list: models -->`` one of the lists
of :mod:`harness.commands.readme_lists`. The options of a table are the fields of
:class:`harness.render.selection.Selection`, and ``beside``: further sweeps, as
``RESULTS/sweeps/SWEEP``, whose rows come into the same table. What all rows share is said below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from harness.commands.readme_lists import markdown_list
from harness.render.files import to_markdown
from harness.render.selection import Selection, rows_where, selected
from harness.render.table import build_table, finding_of

Frames = Callable[[Path, str], pd.DataFrame]
"""The frame of a sweep in a results folder."""

OPTIONS = ("where", "columns", "down", "across", "cell", "beside")

_BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|finding|list): (?P<path>\S+)(?P<options>.*?)-->\n)"
    r".*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def filled(text: str, root: Path, frames: Frames) -> str:
    """The text of a page with every block filled anew.

    ValueError in one line for a block that asks for what there is not.
    """

    def fill(match: re.Match[str]) -> str:
        if match["kind"] == "list":
            return f"{match['begin']}{markdown_list(match['path'])}\n{match['end']}"
        path = root / match["path"]
        options = _read_options(match["options"], match["path"])
        sweeps = [path.parents[1], *(root / name for name in options.pop("beside", "").split())]
        frame = pd.concat([frames(sweep.parents[1], sweep.name) for sweep in sweeps])
        frame = frame.reset_index(drop=True)
        shown = Selection(**options)
        try:
            body = _body(match["kind"], path.stem, frame, shown)
        except ValueError as error:
            raise ValueError(f"{match['path']}: {error}") from None
        return f"{match['begin']}{body}\n{match['end']}"

    return _BLOCK.sub(fill, text)


def without_blocks(text: str) -> str:
    """The text of a page apart from its blocks: what people wrote."""
    return _BLOCK.sub("", text)


def _read_options(text: str, place: str) -> dict[str, str]:
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        key, _, value = line.partition(":")
        if key not in OPTIONS:
            raise ValueError(f"{place}: {key}: one of {', '.join(OPTIONS)}")
        found[key] = value.strip()
    return found


def _body(kind: str, name: str, frame: pd.DataFrame, shown: Selection) -> str:
    table = build_table(name, rows_where(frame, shown.where))
    if table is None:
        raise ValueError("the sweep's records hold nothing for this table")
    if kind == "finding":
        said = finding_of(table)
        if not said:
            raise ValueError("nothing can be said of this table")
        return said
    caption, _, body = to_markdown(selected(table, shown)).partition("\n\n")
    return "\n\n".join(filter(None, (body.strip(), caption)))
