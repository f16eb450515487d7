"""Whether the decode kernels can run here; imports no Triton where that is missing."""

from __future__ import annotations

import torch

from kernels import decode
from kernels.decoding import DecodeProblem
from kernels.toolchain import why_not_triton


def why_not_here(problem: DecodeProblem) -> str | None:
    """None if the kernels can take steps of this problem, else the reason in one line."""
    reason = why_not_triton(problem.device)
    if reason is not None:
        return reason
    found: str | None = decode.why_not(torch.device(problem.device), getattr(torch, problem.dtype))
    return found
