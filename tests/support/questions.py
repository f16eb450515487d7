"""Questions to ``attnbench recommend`` and ``fits``, with the usual answers filled in."""

from __future__ import annotations

from typing import Any

from harness.predictions.capacity import Machine, machine_named
from harness.recommend.question import Question
from harness.request.grid import Parts

PARTS = Parts()


def question(
    model: str,
    *,
    seq_len: int,
    gpus: int,
    sequences: int,
    precision: str = "bf16",
    machine: Machine | None = None,
    **typed: Any,
) -> Question:
    """A question about as many H200s, or about ``machine``; other words are keys as if typed."""
    return Question(
        model=PARTS.choice("model", {"model": model}),
        seq_len=seq_len,
        gpus=gpus,
        sequences=sequences,
        precision=precision,
        goal="tokens_per_s",
        machine=machine or machine_named("h200", gpus),
        choose=PARTS.choice,
        typed=typed,
    )
