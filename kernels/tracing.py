"""Decisions that torch.compile does not trace but keeps as constants of the compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


@torch.compiler.assume_constant_result
def constant(function: Callable[..., T], *arguments: object) -> T:
    """``function(*arguments)``; while compiling, called once for each version that is compiled.

    Arguments are numbers, strings and the like, no tensors.
    """
    return function(*arguments)
