"""The command that measures a combination: what a user types to run what was recommended."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from harness.cases.case import Case
from harness.recommend.question import Choose


def command_of(case: Case, choose: Choose) -> str:
    """``attnbench KEY=VALUE ...`` that plans and measures exactly this case of train_step."""
    parts = ["attnbench", f"model={_name(case.model)}"]
    parts += [f"seq_len={case.seq_len}", f"batch_size={case.batch_size}"]
    for group in ("precision", "attention", "parallel", "compile", "checkpoint"):
        value = getattr(case, group)
        if value is not None and not (group in _LEFT_OUT_AS_NONE and _name(value) == "none"):
            parts.append(f"{group}={_name(value)}")
    for group in ("task", "model", "precision", "attention", "parallel", "compile", "checkpoint"):
        value = getattr(case, group)
        if value is not None:
            usual = choose(group, {group: _name(value)})
            parts += _options(group, value, usual)
    if case.seed:
        parts.append(f"seed={case.seed}")
    if case.device == "cpu":
        parts.append("device=cpu")
    return " ".join(parts)


_LEFT_OUT_AS_NONE = ("parallel", "compile", "checkpoint")


def _name(choice: Any) -> str:
    return str(getattr(choice, "name", None) or choice.scope)


def _options(group: str, value: Any, usual: Any) -> list[str]:
    """The options that are not as the choice presets them."""
    return [
        f"{group}.{item.name}={_text(getattr(value, item.name))}"
        for item in fields(value)
        if item.name not in ("name", "scope")
        and getattr(value, item.name) != getattr(usual, item.name)
    ]


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
