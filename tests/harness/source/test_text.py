"""What of a source runs: held to Python's own parser."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT

from harness.source.text import cpp_that_runs, python_that_runs, that_runs

FILES = sorted(
    path
    for folder in ("kernels", "parallel", "harness/bench")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


@pytest.mark.parametrize("path", FILES[::4], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_is_left_is_the_same_program(path: Path) -> None:
    text = path.read_text()
    left = python_that_runs(text)
    try:
        tree = ast.parse(left)
    except IndentationError:
        pytest.skip("a body that was a docstring alone is gone")
    assert _program(tree) == _program(ast.parse(text))
    assert python_that_runs(left) == left


def _program(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [item for item in body if not _is_string(item)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_string(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


SAME = '''
"""Another text."""
import os  # why
class A:
    """A docstring.

    def not_code(): ...
    """
    x: int = 1
    """Of a field."""

    def f(self, y):
        # A comment.

        return g(
            y,  # one
            "# no comment", z
        )
'''
BARE = """
import os
class A:
    x: int = 1
    def f(self, y):
        return g(
            y, "# no comment", z
        )
"""


def test_comments_docstrings_and_line_breaks_do_not_count() -> None:
    assert _spaces(python_that_runs(SAME)) == _spaces(python_that_runs(BARE))


@pytest.mark.parametrize(
    ("before", "after"),
    [("x: int = 1", "x: int = 2"), ('"# no comment"', '"# another"'), ("return g", "return h")],
)
def test_code_and_strings_count(before: str, after: str) -> None:
    assert python_that_runs(SAME) != python_that_runs(SAME.replace(before, after))


PREDICTING = """
class A(Backend):
    def forward(self, q):
        return q + 1

    @property
    def keeps_scores(self) -> bool:
        return True

    def peak_memory(
        self, problem: Problem
    ) -> dict[str, float]:
        if problem.causal:
            return {"x": 4.0}

        return {"x": 8.0}

    def backward(self, q):
        return q + 2


def peak_memory(self):
    return 5
"""


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        ("4.0", "5.0", False),
        ("8.0", "9.0", False),
        ("return True", "return False", False),
        ("problem.causal", "not problem.causal", False),
        ("q + 1", "q + 3", True),
        ("q + 2", "q + 3", True),
        ("return 5", "return 6", True),
        ("\ndef peak_memory(self)", "\ndef peak_memory(self, more)", True),
        ("def peak_memory(\n", "def peak_memory_passed(\n", True),
        ("class A(Backend)", "class A(Other)", True),
    ],
)
def test_of_methods_only_those_that_predict_memory_do_not_count(
    before: str, after: str, counts: bool
) -> None:
    """A better formula makes no measurement old; what is timed around it still does."""
    assert PREDICTING.count(before) == 1
    edited = that_runs(PREDICTING.replace(before, after), ".py")
    assert (edited != that_runs(PREDICTING, ".py")) is counts


def test_indentation_counts() -> None:
    inside, outside = "if a:\n    b()\n    c()\n", "if a:\n    b()\nc()\n"
    assert python_that_runs(inside) != python_that_runs(outside)


def test_cpp() -> None:
    assert cpp_that_runs("int a; // one\n/* two\n */ int  b;") == cpp_that_runs("int a; int b;")
    assert cpp_that_runs('f("// a");') != cpp_that_runs('f("// b");')


def _spaces(text: str) -> str:
    return " ".join(text.split())
