"""Makes Triton's interpreter patch the language once, not at every call."""

from __future__ import annotations

from typing import Any


def patch_the_language_once() -> None:
    """The interpreter replaces the language's functions by its own when a kernel starts.

    It looks through all of them again at each call of a function inside the kernel, which takes
    a third of its time, and finds them replaced. Here it looks again only where they are not,
    as in ``tl.core`` at the first call of a function of ``tl.standard``.
    """
    from triton.language import core
    from triton.runtime import interpreter

    replace = interpreter._patch_lang

    def replace_once(function: Any) -> Any:
        modules = (x for x in function.__globals__.values() if x is interpreter.tl or x is core)
        return replace(function) if any(core.is_builtin(x.load) for x in modules) else None

    interpreter._patch_lang = replace_once
