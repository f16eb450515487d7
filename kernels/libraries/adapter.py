"""Shared by adapters of libraries: calls by parameter name, and limits of their GPU kernels.

Versions of a library name parameters differently. A call gives by name what the installed version
has a parameter for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

DTYPES = ("float16", "bfloat16")


def call_by_name(function: Callable[..., Any], **values: Any) -> Any:
    """Call by name with the values that this version's signature has a parameter for.

    A parameter of another version that has no default is a feature not used here: None.
    """
    parameters = parameters_of(function)
    given = {name: value for name, value in values.items() if name in parameters}
    given |= {
        name: None
        for name, has_default in parameters.items()
        if not has_default and name not in given
    }
    return function(**given)


@cache
def parameters_of(function: Callable[..., Any] | None) -> dict[str, bool]:
    """Parameter names, and whether each has a default; empty for None."""
    if function is None:
        return {}
    # torch.library.custom_op hides the signature of the function that it wraps.
    signature = inspect.signature(getattr(function, "_init_fn", function))
    return {
        name: parameter.default is not parameter.empty
        for name, parameter in signature.parameters.items()
    }


def capability() -> tuple[int, int]:
    """Compute capability of the current CUDA device; (0, 0) without one."""
    if not torch.cuda.is_available():
        return (0, 0)
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def why_not_head_dim(head_dim: int, most: int) -> str | None:
    """The libraries read 16 bytes of a row at a time, and were built up to some head_dim."""
    if head_dim % 8 or head_dim > most:
        return f"takes a head_dim that is a multiple of 8 and at most {most}, not {head_dim}"
    return None
