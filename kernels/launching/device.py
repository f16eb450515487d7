"""Sets the CUDA device that Triton launches on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on(device: torch.device) -> AbstractContextManager[None]:
    """Makes ``device`` the current one, on which Triton launches; costs nothing where it is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
