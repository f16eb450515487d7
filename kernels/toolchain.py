"""Whether torch.compile and Triton can generate code that runs on this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path


def why_not_compile(device: str) -> str | None:
    """None if torch.compile's Inductor can build kernels for ``device``, else the reason."""
    if device == "cpu":
        compilers = [os.environ.get("CXX"), "g++", "clang++"]
        if not any(name and shutil.which(name) for name in compilers):
            return "torch.compile on a CPU needs a C++ compiler; install g++"
    else:
        compilers = [os.environ.get("CC"), "cc", "gcc", "clang"]
        if not any(name and shutil.which(name) for name in compilers):
            return "torch.compile on a GPU needs a C compiler for Triton; install gcc"
        if find_spec("triton") is None:
            return "torch.compile on a GPU needs triton, which is not installed"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "torch.compile needs Python's headers; install python3-dev"
    return None


def why_not_triton(device: str) -> str | None:
    """None if Triton's kernels run on ``device``, else the reason in one line."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on a CUDA device; TRITON_INTERPRET=1 runs it on a CPU, slowly"
    return None
