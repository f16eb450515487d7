"""Building the compiled autograd node: compilers that fail, several at once, one file a source."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernels.flash import native


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the compiler, a shell script, does; $made is the file it is to write."""

    def write(script: str) -> None:
        path = tmp_path / "compiler"
        find = 'while [ "$1" != -o ]; do shift; done; made=$2\n'
        path.write_text(f"#!/bin/sh\n{find}{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))

    return write


def newest(native_folder: Path) -> Path:
    """The autograd node; runs of earlier sources have left theirs beside it."""
    return max(native_folder.glob("native-*.so"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'native.cpp:3: error: no such file' >&2; echo note >&2; exit 1", "no such file"),
        ("echo garbage > $made", "ImportError"),
    ],
)
def test_compilers_that_fail(
    compiler: Callable[[str], None], tmp_path: Path, script: str, words: str
) -> None:
    compiler(script)
    folder = tmp_path / "cache"
    with pytest.raises(native.NotBuilt, match=words) as caught:
        native.build(folder)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_several_at_once_make_one_file(
    compiler: Callable[[str], None], native_folder: Path, native_module: Any, tmp_path: Path
) -> None:
    so = newest(native_folder)
    compiler(f"sleep 0.3; cp {so} $made")
    cache = tmp_path / "cache"
    made: list[Any] = []
    threads = [threading.Thread(target=lambda: made.append(native.build(cache))) for _ in "123"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3
    assert len(list(cache.iterdir())) == 1


def test_every_source_has_a_file_of_its_own_built_once(
    compiler: Callable[[str], None],
    native_folder: Path,
    native_module: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    so = newest(native_folder)
    compiler(f"echo . >> {tmp_path}/runs; cp {so} $made")
    cache = tmp_path / "cache"
    for _ in range(2):
        assert callable(native.build(cache).attend)
    assert (tmp_path / "runs").read_text() == ".\n"
    changed = tmp_path / "changed.cpp"
    changed.write_text(native.SOURCE.read_text() + "\n// More.\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    native.build(cache)
    assert len(list(cache.iterdir())) == 2
