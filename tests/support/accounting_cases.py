"""A small model under any strategy, whose memory and traffic are counted."""

from __future__ import annotations

from harness.cases.case import Case
from harness.request.compose import compose_request

SMALL = ("model=tiny", "model.num_layers=2", "batch_size=2", "seq_len=16", "device=cpu")


def case_of(*arguments: str) -> Case:
    (case,) = compose_request([*SMALL, *arguments]).cases
    return case


# 1,000 x 128 twice; a block of 4 x 128^2 + 3 x 128 x 384 and two norms of 128; a last norm.
PARAMETERS = 2 * 128_000 + 2 * (65_536 + 147_456 + 256) + 128
