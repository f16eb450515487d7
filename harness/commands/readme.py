"""``python -m harness.commands.readme``: fills the blocks of all pages from the committed records.

Pages are README.md, results/README.md and those of docs. :mod:`harness.commands.readme_blocks` says
what a block is.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd

from harness.analysis.loading import load_frames
from harness.commands.readme_blocks import filled
from harness.paths import ROOT

PAGES = (
    "README.md",
    "results/README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
"""Every page, relative to the project."""


@cache
def frame_of(results: Path, sweep: str) -> pd.DataFrame:
    """The frame of a sweep; the records of a results folder are read once."""
    return _frames(results)(sweep)


_frames = cache(load_frames)


def refreshed(text: str) -> str:
    """Fill every block of a page."""
    return filled(text, ROOT, frame_of)


def main() -> None:
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = refreshed(text)
        path.write_text(new, encoding="utf-8")
        if new != text:
            print(f"{name}: blocks replaced")
    print(f"blocks of {len(PAGES)} pages are up to date")


if __name__ == "__main__":
    main()
