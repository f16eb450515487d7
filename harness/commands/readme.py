"""``python -m harness.commands.readme``: updates README.md's tables from the committed records.

A block between ``<!-- table: FILE -->`` and ``<!-- end -->`` holds the rows of that file as
``attnbench-report`` writes it: ``RESULTS/sweeps/SWEEP/tables/TABLE.md``.
"""

from __future__ import annotations

import re
from pathlib import Path

from harness import load
from harness.paths import ROOT
from harness.render.files import to_markdown
from harness.render.table import build_table

_BLOCK = re.compile(r"(<!-- table: (?P<path>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """Fill every block of a text from its file; the caption goes below the table."""

    def fill(match: re.Match[str]) -> str:
        caption, _, rows = _markdown(ROOT / match["path"]).partition("\n\n")
        return f"{match[1]}{rows.strip()}\n\n{caption.strip()}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def _markdown(path: Path) -> str:
    """The table that a file has after ``attnbench-report``."""
    sweep = path.parents[1]
    table = build_table(path.stem, load(sweep.parents[1], sweep=sweep.name))
    if table is None:
        raise ValueError(f"{path}: the sweep's records hold nothing for this table")
    return to_markdown(table)


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = refreshed(text)
    path.write_text(new, encoding="utf-8")
    print("README.md: tables are up to date" if new == text else "README.md: tables replaced")


if __name__ == "__main__":
    main()
