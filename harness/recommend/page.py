"""The report of a recommendation: one page in Markdown and HTML, with its figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from harness.cases import format as fmt
from harness.recommend import answer as answers
from harness.recommend import front_figure
from harness.recommend.answer import Answer
from harness.recommend.combination import Combination
from harness.render.figure import save
from harness.render.report import template
from harness.store import atomic

COLUMNS = ("combination", "tokens/s", "90% interval", "GiB")


def write(answer: Answer, folder: Path) -> Path:
    """Write the page and its figure into a folder; returns the Markdown file.

    Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figure = front_figure.build(answer.drawn, answer.best)
    values = _values(answer) | {"figure": figure, "svg": ""}
    if figure is not None:
        atomic.replace(folder / "front.png", save(figure, "png"))
        svg = save(figure, "svg").decode()
        values["svg"] = Markup(svg[svg.index("<svg") :])
    for suffix, escapes in (("md", False), ("html", True)):
        made = template(
            f"recommendation.{suffix}.j2", package="harness.recommend", autoescape=escapes
        ).render(**values)
        atomic.replace(folder / f"recommendation.{suffix}", made.encode())
    return folder / "recommendation.md"


def _values(answer: Answer) -> dict[str, Any]:
    question = answer.question
    gpus = fmt.counted(question.gpus, "GPU" if question.machine.device == "cuda" else "rank")
    return {
        "title": (
            f"{question.model.name}, {question.seq_len:,} tokens, batch of "
            f"{question.batch_tokens:,}, {question.precision}, on {gpus} ({question.machine.name})"
        ),
        "asked": question.asked,
        "sentence": answers.sentence(answer),
        "alike": answers.alike(answer),
        "second": answers.second(answer),
        "remarks": [*answer.remarks, *answers.assumptions(answer)],
        "columns": COLUMNS,
        "rows": [
            {"cells": cells(group), "command": answer.command(group[0])} for group in answer.shown
        ],
        "parts": parts(answer.best),
        "misfits": [
            {
                "cells": [
                    item.name,
                    item.nearest.name,
                    fmt.number(item.nearest.memory_gib),
                    fmt.number(item.nearest.short_gib),
                    item.change,
                ]
            }
            for item in answer.misfits
        ],
        "fixes": [answer.command(item.remedy) for item in answer.misfits if item.remedy],
        "counts": answers.counts(answer),
        "fallen": answers.fallen(answer),
    }


def cells(group: list[Combination]) -> list[str]:
    """One row of the table of the best: the first of those that have one prediction."""
    item = group[0]
    name = item.name if len(group) == 1 else f"{item.name} ({len(group) - 1:,} more alike)"
    if item.step_ms is None:
        return [name, fmt.ABSENT, fmt.ABSENT, fmt.number(item.memory_gib)]
    if item.measured_ms is not None:
        interval = "measured"
    else:
        ends = (item.tokens_per_s(ms) for ms in (item.step.high_ms, item.step.low_ms))
        interval = " to ".join(map(fmt.number, ends))
    return [
        name,
        fmt.number(item.tokens_per_s(item.step_ms)),
        interval,
        fmt.number(item.memory_gib),
    ]


def parts(item: Combination | None, most: int = 6) -> str:
    """A predicted time, its largest parts and the rest, in words; empty without one."""
    if item is None or item.step is None:
        return ""
    known = sorted((part for part in item.step.parts if part.ms > 0), key=lambda part: -part.ms)
    named = [f"{part.name} {fmt.number(part.ms)} ms" for part in known[:most]]
    rest = sum(part.ms for part in known[most:])
    if rest:
        named.append(f"the rest {fmt.number(rest)} ms")
    return f"{fmt.number(sum(part.ms for part in known))} ms: {', '.join(named)}"
