"""Registries: choices are found however their decorator is written, and broken files left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.registry import PLUGINS_VARIABLE, Registry, RegistryError

Write = Callable[..., Registry[type]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Makes a package of choices from the texts of its files, and returns its registry."""
    package = f"choices_{tmp_path.name}"
    monkeypatch.syspath_prepend(tmp_path)

    def make(**files: str) -> Registry[type]:
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").touch()
        (tmp_path / f"base_{package}.py").write_text(
            "from kernels.registry import Registry\n"
            f"KINDS = Registry('kind', decorator='kind', packages=({package!r},))\n"
            "kind = KINDS.register\n"
        )
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text.replace("BASE", f"base_{package}"))
        made: Registry[type] = __import__(f"base_{package}").KINDS
        return made

    return make


GOOD = "from BASE import kind\n@kind('good')\nclass Good: pass\n"


@pytest.mark.parametrize(
    "text",
    [
        "from BASE import kind\n@kind('one')\nclass One: pass\n",
        "from BASE import kind\n@kind(name='one')\nclass One: pass\n",
        "from BASE import kind as sort\n@sort('one')\nclass One: pass\n",
        "import BASE\n@BASE.kind('one')\nclass One: pass\n",
        "from BASE import kind\n@kind('one')\n@kind('two')\nclass One: pass\n",
    ],
)
def test_however_the_decorator_is_written(text: str, write: Write) -> None:
    found = write(file=text)
    assert "one" in found.names()
    assert found["one"].target.__name__ == "One"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("from BASE import kind\n@kind('bad')\nclass Bad(:\n", "SyntaxError"),
        ("from BASE import kind\nN = 'bad'\n@kind(N)\nclass Bad: pass\n", "must be a literal"),
        ("from BASE import kind\n@kind()\nclass Bad: pass\n", "must be a literal"),
    ],
)
def test_a_broken_file_is_left_out_in_one_line(
    text: str, words: str, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    found = write(good=GOOD, bad=text)
    assert found.names() == ["good"]
    assert [entry.name for entry in found] == ["good"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "bad.py: left out" in line
    assert words in line


def test_a_file_that_cannot_be_imported_costs_its_own_choice(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    found = write(good=GOOD, bad=GOOD.replace("good", "bad") + "import not_there\n")
    with pytest.raises(RegistryError, match=r"kind=bad: \w+\.bad cannot be imported .*not_there"):
        found["bad"]
    assert [entry.name for entry in found] == ["good"]
    assert "kind=bad" in capsys.readouterr().err


def test_two_files_of_one_name_are_both_named(write: Write) -> None:
    with pytest.raises(RegistryError, match=r"kind=good is registered twice: \w+\.a, \w+\.b"):
        write(a=GOOD, b=GOOD).names()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import not_there", "not_there"),
        ("def f(:", "SyntaxError"),
        (GOOD, "kind=good is registered twice"),
    ],
)
def test_a_broken_plugin_is_left_out_in_one_line(
    text: str,
    words: str,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = write(good=GOOD)
    plugin = f"plugin_{tmp_path.name}"
    base = next(tmp_path.glob("base_*.py")).stem
    (tmp_path / f"{plugin}.py").write_text(text.replace("BASE", base))
    monkeypatch.setenv(PLUGINS_VARIABLE, f" {plugin} ,{plugin}")
    assert found.names() == ["good"]
    assert found["good"].target.__module__ not in (plugin, None)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{plugin} cannot be imported" in line
    assert words in line
    sys.modules.pop(plugin, None)
