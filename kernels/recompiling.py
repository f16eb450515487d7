"""Functions compiled for ever new shapes: a compiled function of its own for each kind of call.

torch.compile keeps what it compiled with the code object of a function, and gives up on that code
at its ninth version (torch._dynamo.config.recompile_limit): with fullgraph=True it raises, since a
dynamic or eager version would run in its place. A limit raised here would be raised for the whole
process. So each kind of call compiles a copy of the code, and the copies used last are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch


class CompiledForEach:
    """A function that torch.compile compiles with static shapes, for each kind of call apart."""

    def __init__(self, function: Callable[..., Any], *, kept: int) -> None:
        """``kept`` compiled functions are held, those of the kinds of call that came last."""
        self._function = function
        self._compiled = lru_cache(maxsize=kept)(self._compile)

    def __call__(self, *args: Any) -> Any:
        """The function of its arguments, which are tensors or can be hashed."""
        if torch.compiler.is_compiling():
            # Traced into a larger program, of which it is a part.
            return self._function(*args)
        return self._compiled(kind_of(*args))(*args)

    def _compile(self, kind: Hashable) -> Callable[..., Any]:
        return torch.compile(copy_of(self._function), dynamic=False, fullgraph=True)


def copy_of(function: Any) -> FunctionType:
    """The function again, with a code object of its own."""
    copy = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    return copy


def kind_of(*args: Any) -> Hashable:
    """What torch.compile compiles anew for: layouts of tensors, other arguments, and modes."""
    device = next(x.device.type for x in args if isinstance(x, torch.Tensor))
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    modes = autocast, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return modes, *(layout_of(x) if isinstance(x, torch.Tensor) else x for x in args)


def layout_of(x: torch.Tensor) -> Hashable:
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
