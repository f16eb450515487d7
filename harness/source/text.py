"""Source text without what does not run: comments, docstrings, blank lines, breaks in brackets.

Methods that predict memory, or where traffic goes, run, but nothing of them is timed; they are left
out, too, so that a better formula makes no measurement old.

Reading is by tokens of our own rather than by :mod:`ast` or :mod:`tokenize`, which take several
times as long and give different results under different versions of Python.
"""

from __future__ import annotations

import re

_TOKENS = re.compile(
    r"(?P<string>\b[rRbBuUfF]{0,2}(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\""
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
    r"|'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\""
    r"|'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\")"
    r"|(?P<comment>[ \t]*\#[^\n]*)"
    r"|(?P<bracket>[()\[\]{}])"
    r"|(?P<ending>\s*\n[ \t]*)",
    re.DOTALL,
)

_PREDICTION = re.compile(
    r"^    def (?:predicted_memory|predicted_step_memory|predicted_before_backward|keeps_scores"
    r"|predicted_ranks"
    r"|peak_memory|split_peak_memory|forward_workspace|backward_workspace|query_gradient_memory"
    r"|decode_workspace)"
    r"\( ?self\b.*\n"
    r"(?:     .*\n)*",
    re.MULTILINE,
)

_C_TOKENS = re.compile(
    r"(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')"
    r"|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<space>\s+)",
    re.DOTALL,
)


def that_runs(text: str, suffix: str) -> str:
    """What runs of a source file, by the suffix of its name."""
    if suffix == ".py":
        return without_predictions(python_that_runs(text))
    return " ".join(text.split()) if suffix == ".json" else cpp_that_runs(text)


def python_that_runs(text: str) -> str:
    """A Python source without comments, docstrings and blank lines, a bracketed part in one line.

    A docstring is any statement that is a string alone, such as one beneath a field.
    """
    kept: list[str] = []
    end, depth = 0, 0
    at_start = True
    text = text.replace("\r\n", "\n") + "\n"
    for match in _TOKENS.finditer(text):
        between = text[end : match.start()]
        end = match.end()
        if between:
            kept.append(between)
            at_start = at_start and not between.strip()
        kind, token = match.lastgroup, match.group()
        if kind == "comment":
            continue
        if kind == "bracket":
            depth += 1 if token in "([{" else -1
            kept.append(token)
        elif kind == "ending":
            if at_start and kept and kept[-1].startswith("\n"):
                # What stood between two line breaks was left out.
                kept.pop()
            kept.append(" " if depth else "\n" + token.rpartition("\n")[2])
            at_start = not depth
            continue
        elif at_start and depth == 0 and _ends_statement(text, end):
            continue
        else:
            kept.append(token)
        at_start = False
    return "".join(kept).strip()


def without_predictions(text: str) -> str:
    """What :func:`python_that_runs` has left, without the methods that predict."""
    return _PREDICTION.sub("", text + "\n").strip()


def _ends_statement(text: str, end: int) -> bool:
    rest = text[end : text.find("\n", end)].strip()
    return not rest or rest.startswith("#")


def cpp_that_runs(text: str) -> str:
    """A C++ source without comments, with one space in place of any white space."""

    def kept(match: re.Match[str]) -> str:
        return match.group() if match.lastgroup == "string" else " "

    return " ".join(_C_TOKENS.sub(kept, text).split())
