"""The documents name rooms, files and links that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT
from rooms import PACKAGES, house

DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    named = re.findall(
        r"`((?:harness|kernels|parallel|models|benchmarks|tests|conf|sweeps)/[\w/.]*)`", text
    )
    assert not [link for link in links if not (page.parent / link).exists()]
    assert not [name for name in named if not (ROOT / name).exists()]


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.stem)
def test_links_to_headings_find_them(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        assert anchor in headings(page.parent / file if file else page), f"{file}#{anchor}"


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [
        page.name for page in DOCS if f"({page.name})" not in index and page.stem != "README"
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_shows_every_room(package: str) -> None:
    """A row for each folder, with the first line of its docstring."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    built = house(package)
    for room, says in built.rooms.items():
        assert f"| `{room}` | {built.floor(room)} | {says} |" in text, room
