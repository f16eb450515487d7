"""Writes docs/reference.md: every public name of attnbench, from its signature and its docstring.

    .venv/bin/python .ci/write_reference.py

tests/test_reference.py fails where the page is not what this writes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import attnbench

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"

HEAD = """\
# Reference

`import attnbench` gives these names, and `attnbench.PUBLIC` lists them. Written from the docstrings
by `.ci/write_reference.py`. A name is imported when it is first used: the module itself loads
neither torch nor numpy.

**Names of packages.** `kernels`, `models`, `parallel` and `harness` are packages of this project,
and common names. A wheel therefore installs two names, `attnbench` and `attnbench_folders`, and
`import attnbench` has Python find the packages in the latter where nobody else has them: a
`models.py` of yours and an installed `kernels` keep their names. What needs one of ours that is
hidden raises an ImportError that names both files and says what to do. In commands and their worker
processes ours come first, so a plugin's own modules need other names. `python -m attnbench` is the
command `attnbench`.
"""

SCHEMES = """\
### NAME_attention

`{names}`: `split_attention` with that scheme, for every scheme that is registered, those of plugins
included.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for subject, modules in attnbench.PUBLIC.items():
        parts.append(f"## {subject}\n")
        for names in modules.values():
            parts += [entry(name, getattr(attnbench, name)) for name in names]
            if "scheme_names" in names:
                schemes = (f"{name}_attention" for name in attnbench.scheme_names())
                parts.append(SCHEMES.format(names="`, `".join(schemes)))
    return "\n".join(parts)


def entry(name: str, found: Any) -> str:
    """Heading, signature and docstring of one name."""
    parts = [f"### {name}\n", f"```text\n{signature(name, found)}\n```\n"]
    parts.append(prose(inspect.getdoc(found) or "") + "\n")
    if inspect.isclass(found) and (listed := methods(found)):
        parts.append("\n".join(listed) + "\n")
    return "\n".join(parts)


def methods(found: type) -> list[str]:
    """A bullet for each public method of a class and of those of ours that it inherits from."""
    ours = [
        owner for owner in found.__mro__ if owner.__module__.startswith(("kernels.", "parallel."))
    ]
    own = {key: value for owner in reversed(ours) for key, value in vars(owner).items()}
    return [
        f"- `{signature(key, value)}`: {first_words(value)}"
        for key, value in own.items()
        if not key.startswith("_") and inspect.isfunction(value) and value.__doc__
    ]


def first_words(found: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(prose(inspect.getdoc(found) or "").split("\n\n")[0].split())


def signature(name: str, found: Any) -> str:
    """Name and parameters without their types, which docstrings give with shapes and units."""
    words: list[str] = []
    marked = False
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not marked:
            marked = True
            words.append("*")
        marked = marked or parameter.kind is parameter.VAR_POSITIONAL
        bare = parameter.replace(annotation=parameter.empty)
        is_plain = isinstance(parameter.default, str | int | float | None)
        if parameter.default is not parameter.empty and not is_plain:
            bare = bare.replace(default=...)
        words.append(str(bare).replace("=Ellipsis", "=..."))
    text = f"{name}({', '.join(words)})"
    if len(text) <= 96:
        return text
    return f"{name}(\n    {fill(words)}\n)"


def fill(words: list[str]) -> str:
    """Parameters over several lines."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 90:
            lines.append("")
        lines[-1] += f"{word}, "
    return "\n    ".join(line.rstrip() for line in lines)


def prose(docstring: str) -> str:
    """A docstring as Markdown: its sections of arguments as lists, its references as code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", docstring).replace("``", "`")
    lines = []
    for line in text.splitlines():
        section = re.fullmatch(r"(Args|Returns|Raises):", line)
        item = re.fullmatch(r"    ([\w, ]+): (.*)", line)
        if section:
            lines += [f"**{section[1]}**", ""]
        elif item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:
            lines.append(re.sub(r"^    +", "  " if line.startswith("        ") else "", line))
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len(attnbench.__all__)} names")
