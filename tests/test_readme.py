"""Programs, choices and links of all pages exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib

import pytest

from harness.cases.sweep import load_sweep
from harness.paths import ROOT, project_sweeps
from harness.request.choices import choices
from harness.request.config import GROUPS

PAGES = [ROOT / "README.md", ROOT / "results/README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def test_programs_targets_and_modules_exist() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(re.findall(r"`(attnbench(?:-[a-z]+)?)\b(?=[ `])", TEXT)) <= set(scripts)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = set(re.findall(r"(?:^|`|: )make ([a-z-]+)[`\n ]", TEXT, re.MULTILINE))
    assert len(made) > 3
    assert made <= set(targets)
    for module in re.findall(r"(?:^|`)(?:python|torchrun [^`\n]*) -m ([\w.]+)", TEXT, re.MULTILINE):
        assert importlib.util.find_spec(module), module


def test_every_choice_named_in_the_table_exists() -> None:
    known = {name for group in GROUPS for name in choices(group)}
    options = tuple(f"{group}." for group in GROUPS)
    rows = 0
    for group in GROUPS:
        for line in (ROOT / "docs/running.md").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"| `{group}` |"):
                names = set(re.findall(r"`([\w.]+)=?`", line)) - {group}
                assert not {x for x in names - known if not x.startswith(options)}
                assert names & set(choices(group))
                rows += 1
    assert rows == len(GROUPS) - 1  # The launcher has a page of its own.


def test_words_of_keys_name_choices() -> None:
    """``scale=eight_gpus``, ``launcher=slurm``: in prose and in blocks, of any page."""
    scales = {scale for name in project_sweeps() for scale in load_sweep(name).scales}
    known = {group: set(choices(group)) for group in GROUPS}
    known |= {"scale": scales | {"auto"}, "sweeps": set(project_sweeps())}
    found = re.findall(r"(?<![\w.])([a-z]+)=([\w.]+(?:,[\w.]+)*)", TEXT)
    used = [(key, word) for key, words in found if key in known for word in words.split(",")]
    assert len(used) > 200
    unknown = {f"{key}={word}" for key, word in used if word.rstrip(".") not in known[key]}
    assert unknown <= NOT_OURS


NOT_OURS = {
    *("sweeps=NAME", "launcher=mine", "model=mine", "model=NAME", "attention=NAME", "task=NAME"),
    *("attention=outer_naive", "task=sorting", "scale=None"),
}
"""What stands for a name, choices that docs/extending.md adds, and an argument in Python."""


@pytest.mark.parametrize("page", ["README.md", "results/README.md", "docs"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for file in sorted(path.glob("*.md")) if path.suffix == "" else [path]:
        targets = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", file.read_text(encoding="utf-8")))
        inside = {target for target in targets if not target.startswith("http")}
        assert not {target for target in inside if not (file.parent / target).exists()}, file
