"""The device on which Triton kernels are tested: a GPU, or a CPU with Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RUNS_TRITON = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # Rows past the end overflow before they are dropped; numpy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
"""Marks of tests that launch a kernel."""

CLOSENESS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest entry of the expected tensor."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)
