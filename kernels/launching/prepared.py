"""Repeats launches whose arguments differ from an earlier call only in addresses and floats.

Triton looks at every argument of every launch to choose what to run, and encodes each tensor
descriptor; with forty arguments that takes longer than the attention of a short sequence. What is
prepared here was looked at by Triton once, and whoever keeps it vouches that later calls differ in
the tensors' addresses and in floats alone. What Triton compiles depends on addresses in one way,
whether they are multiples of 16 bytes: a call with one that is not is left to Triton as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from kernels.launching.driver import Contents, DriverLaunch, NotKnown

MAX_PLANS = 1024
"""How many launches, of how many calls, are kept at once."""

_ALIGNMENT = 16
"""Bytes, a power of two: what Triton compiles for if it finds it, and what TMA needs."""

Descriptor = Callable[[Tensor], Any]
"""Makes a tensor descriptor of a tensor that lies as the first one did."""


@dataclass(slots=True)
class PreparedLaunch:
    """One kernel on one grid. Its parameters: tensors, integers, floats and constants."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    """Compile-time arguments, the last parameters, and options such as ``num_stages``."""
    integers: tuple[int, ...] = ()
    descriptors: Sequence[Descriptor] = ()
    """One for each of the first tensors, which the kernel reads through TMA."""
    _compiled: Any = None
    _again: DriverLaunch | None = None

    def __call__(self, *tensors: Tensor, floats: tuple[float, ...] = ()) -> None:
        addresses = [x.data_ptr() for x in tensors]
        is_aligned = not reduce(or_, addresses, 0) % _ALIGNMENT
        again = self._again
        if is_aligned and again is not None and not is_watched() and again(addresses, floats):
            return
        described = [make(x) for make, x in zip(self.descriptors, tensors, strict=False)]
        plain = tensors[len(described) :]
        arguments = (*described, *plain, *self.integers, *floats)
        if is_aligned and self._compiled is not None:
            self._compiled[self.grid](*arguments, *self._constant_arguments())
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants)
        # Triton's interpreter compiles nothing.
        if not is_aligned or compiled is None:
            return
        self._compiled = compiled
        try:
            device = torch.cuda.current_device()
            self._again = DriverLaunch(self._compiled, self.grid, arguments, device)
        except NotKnown:
            # Triton goes on to launch it.
            self._again = None

    def contents(self) -> Contents | None:
        """A copy of all that another launcher needs; None while only Triton can launch it."""
        return None if self._again is None else self._again.contents()

    def _constant_arguments(self) -> list[Any]:
        """The constants as a compiled kernel takes them: by position, without Triton's options."""
        return [self.constants[name] for name in self.kernel.arg_names if name in self.constants]


class Step(NamedTuple):
    """A launch and its arguments."""

    launch: PreparedLaunch
    tensors: tuple[Tensor, ...]
    floats: tuple[float, ...] = ()


class PlannedPass(NamedTuple):
    """The launches of a pass, and tensors that stand for its memory, as large but without any."""

    steps: list[Step]
    workspace: Sequence[Tensor] = ()
    stages: Sequence[Sequence[Tensor]] = ()
    """More of it, of stages that follow one another: each may have the place of the one before."""


def run(steps: Iterable[Step]) -> None:
    """Launch one after another."""
    for step in steps:
        step.launch(*step.tensors, floats=step.floats)


def planned(plans: dict[Any, Any], build: Callable[..., Any], key: tuple, *arguments: Any) -> Any:
    """The plan that ``build`` makes, kept under ``key``, which has all that it depends on."""
    plan = plans.get(key)
    if plan is None:
        if len(plans) >= MAX_PLANS:
            plans.clear()
        plan = plans[key] = build(*arguments)
    return plan


def is_watched() -> bool:
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
