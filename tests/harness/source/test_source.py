"""Hashes of the source that a case runs, over a copy of the tree that is edited."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

CASES: dict[str, dict[str, Any]] = {
    "naive": {"attention": {"name": "naive"}, "parallel": {"name": "none", "dp": 1}},
    "triton": {"attention": {"name": "flash_triton"}, "parallel": {"name": "none", "dp": 1}},
    "ring": {
        "attention": {"name": "ring", "kernel": "flash_triton"},
        "parallel": {"name": "none", "cp": 2},
    },
    "ddp": {"attention": {"name": "naive"}, "parallel": {"name": "ddp_flat", "dp": 2}},
}
TASK = {"ddp": "train_step"}

PROGRAM = """
import json, sys
from harness.commands import lazy_imports
lazy_imports.install()
from harness.cases.source import source_of
cases = json.load(sys.stdin)
print(json.dumps({name: source_of(case, {}) for name, case in cases.items()}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code without its history."""
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("harness", "kernels", "models", "parallel", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def unedited(tree: Path) -> dict[str, dict[str, str]]:
    """The hashes of the copy before, and after, each edit."""
    return _hashes(tree)


def _hashes(tree: Path) -> dict[str, dict[str, str]]:
    cases = {
        name: {**case, "task": {"name": TASK.get(name, "attention")}}
        for name, case in CASES.items()
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tree,
        env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def test_another_place_gives_the_same_hashes(unedited: dict[str, dict[str, str]]) -> None:
    found = unedited
    assert found == _hashes(ROOT)
    assert "kernels/flash/hopper" in found["triton"]
    assert "kernels/flash/hopper" not in found["naive"]
    assert {"parallel/context/schemes", "kernels/flash/hopper"} <= set(found["ring"])
    assert "parallel/data" in found["ddp"]
    assert "models" in found["ddp"]
    assert not any(folder.startswith("parallel") for folder in found["naive"])


@pytest.mark.parametrize(
    ("file", "before", "after", "changed"),
    [
        ("kernels/flash/hopper/forward.py", "\n", "\nCHANGED = 1\n", {"triton", "ring"}),
        ("kernels/flash/native.cpp", "#include", "int changed;\n#include", {"triton", "ring"}),
        ("kernels/flash/any_gpu/pinned.json", "{", '{"changed": 1,', {"triton", "ring"}),
        ("kernels/backends/naive.py", "\n", "\nCHANGED = 1\n", {"naive", "ddp"}),
        ("kernels/backends/naive.py", '"""', '"""Changed. ', set()),
        ("parallel/context/blocks/loops.py", "\n", "\nCHANGED = 1\n", {"ring"}),
        ("parallel/strategies/ddp_flat.py", "\n", "\nCHANGED = 1\n", {"ddp"}),
        ("models/transformer.py", "\n", "\nCHANGED = 1\n", {"ddp"}),
        (
            "harness/tasks/attention/attention.py",
            "\n",
            "\nCHANGED = 1\n",
            {"naive", "triton", "ring"},
        ),
        ("harness/bench/bench.py", "\n", "\nCHANGED = 1\n", set(CASES)),
        ("harness/render/table.py", "\n", "\nCHANGED = 1\n", set()),
    ],
)
def test_an_edit_changes_the_hashes_of_the_cases_that_run_it(
    tree: Path,
    unedited: dict[str, dict[str, str]],
    file: str,
    before: str,
    after: str,
    changed: set[str],
) -> None:
    path = tree / file
    text = path.read_text()
    # A line after the module's docstring, or a change within it.
    start = text.index('"""', 3) + 3 if before == "\n" else 0
    path.write_text(text[:start] + text[start:].replace(before, after, 1))
    try:
        new = _hashes(tree)
    finally:
        path.write_text(text)
    folder = file.rpartition("/")[0]
    for name in CASES:
        differing = {key for key in unedited[name] if unedited[name][key] != new[name].get(key)}
        assert differing == ({folder} if name in changed else set()), name


def test_a_choice_of_auto_counts_by_the_note_of_the_run() -> None:
    from harness.cases.source import source_files

    case = {"task": {"name": "attention"}, "attention": {"name": "auto"}, "parallel": {}}
    unknown = source_files(case, {})
    known = source_files(case, {"attention_choice": "flash_triton"})
    assert "kernels/flash/dispatch.py" in known - unknown
