"""``python -m harness.commands.readme``: updates README.md's tables from the committed results.

A block between ``<!-- table: FILE -->`` and ``<!-- end -->`` holds the rows of that file.
"""

from __future__ import annotations

import re

from harness.paths import ROOT

_BLOCK = re.compile(r"(<!-- table: (?P<path>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(text: str) -> str:
    """Fill every block of a text from its file; the caption goes below the table."""

    def fill(match: re.Match[str]) -> str:
        caption, _, rows = (ROOT / match["path"]).read_text(encoding="utf-8").partition("\n\n")
        return f"{match[1]}{rows.strip()}\n\n{caption.strip()}\n{match[3]}"

    return _BLOCK.sub(fill, text)


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    new = refreshed(text)
    path.write_text(new, encoding="utf-8")
    print("README.md: tables are up to date" if new == text else "README.md: tables replaced")


if __name__ == "__main__":
    main()
