"""Launches kernels again whose arguments, but for addresses, are those of a call before.

Triton looks at every argument of every launch to choose what to run, and checks each descriptor;
with forty arguments that takes longer than the attention of a short sequence. What is prepared
here was looked at by Triton once, and whoever keeps it vouches that later calls differ in the
tensors' addresses alone, which are as well aligned as the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver


@dataclass(slots=True)
class Launch:
    """One kernel on one grid, called with its arguments in order and without its constants."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    """Compile-time arguments, which are the kernel's last parameters."""
    _compiled: Any = None

    def __call__(self, *arguments: Any) -> None:
        compiled = self._compiled
        if compiled is None:
            self._compiled = self.kernel[self.grid](*arguments, **self.constants)
        elif _is_watched():
            compiled[self.grid](*arguments, *self.constants.values())
        else:
            # As CompiledKernel.__getitem__ does, but for the metadata that only hooks read.
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            compiled.run(
                *self.grid,
                stream,
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *arguments,
                *self.constants.values(),
            )


def _is_watched() -> bool:
    """Whether a profiler has asked Triton to tell it of every launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # None in triton 3.4, since then a chain of calls that may be empty.
    return any(getattr(hook, "calls", hook) for hook in hooks)


class Descriptors:
    """Makes Gluon's descriptors of tensors that lie like the first one, which was checked."""

    __slots__ = ("_fields", "_type")

    def __init__(self, example: Any) -> None:
        self._type = type(example)
        self._fields = vars(example) | {"base": None}

    def __call__(self, x: Tensor) -> Any:
        descriptor = object.__new__(self._type)
        vars(descriptor).update(self._fields, base=x)
        return descriptor
