"""Named ranges around the phases of a profiled step and around the modules of its model.

Hooks on the modules open and close the ranges, and exist only while a profile is taken, so that
the measured passes run without them. Explicit attention and the loss mark their own parts
(:func:`kernels.ranges.named_range`); PyTorch marks collectives.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from harness.bench.phase_timer import PhaseTimer
from kernels.ranges import RangeMaker, ranges_made_by
from models.checkpointing import CHECKPOINTED
from models.layers import Embedding, Linear
from models.transformer import Block, FeedForward, SelfAttention

_NAMES: dict[type[nn.Module], str] = {
    SelfAttention: "attention",
    FeedForward: "feed-forward",
    nn.RMSNorm: "norm",
    Embedding: "embedding",
}

RANGES = (
    *("block", *_NAMES.values(), CHECKPOINTED, "head", "loss", "scores", "softmax", "final matmul"),
    *("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"),
)
"""All names of ranges, without the numbers of blocks."""


class RangeTimer(PhaseTimer):
    """Makes each phase a range instead of timing it.

    Args:
        on_end: called with a phase's name when it ends.
    """

    def __init__(
        self,
        device: torch.device,
        make: RangeMaker,
        on_end: Callable[[str], None] = lambda phase: None,
    ) -> None:
        super().__init__(device)
        self._make = make
        self._on_end = on_end

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._make(name):
            yield
        self._on_end(name)

    @contextlib.contextmanager
    def phases(self, whole: str) -> Iterator[Callable[[str], None]]:
        with self.phase(whole), contextlib.ExitStack() as inner:

            def begins(name: str) -> None:
                inner.close()
                inner.enter_context(self.phase(name))

            yield begins


@contextlib.contextmanager
def ranges_on(
    model: nn.Module | None, make: RangeMaker, *, compiled: bool = False
) -> Iterator[None]:
    """While inside, every module of ``model`` runs in a range made by ``make``.

    Args:
        compiled: whether torch.compile has compiled any of it. Then nothing is marked: hooks
            would have it compiled again, into other code than was measured.
    """
    if compiled:
        yield
        return
    hooks: list[Any] = []
    open_ranges: list[tuple[nn.Module, contextlib.AbstractContextManager[object]]] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            context = make(name)
            context.__enter__()
            open_ranges.append((module, context))

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if open_ranges and open_ranges[-1][0] is module:
            open_ranges.pop()[1].__exit__(None, None, None)

    for path, module in model.named_modules() if model is not None else ():
        name = _range_name(path, module)
        if name is not None:
            hooks.append(module.register_forward_pre_hook(enter(name)))
            # always_call: checkpointing ends a recomputed forward pass by an exception.
            hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        with ranges_made_by(make):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _range_name(path: str, module: nn.Module) -> str | None:
    last = path.rpartition(".")[2]
    if isinstance(module, Block):
        return f"block {last}"
    if isinstance(module, Linear):
        return last
    return next((name for kind, name in _NAMES.items() if isinstance(module, kind)), None)


def place_of(path: tuple[str, ...]) -> tuple[str, ...]:
    """A path as tables name it: the same for a block and for its recomputation."""
    names = tuple(without_number(name) for name in path)
    if names[:1] == (CHECKPOINTED,):
        return ("block", *names[1:])
    return tuple(name for name in names if name != CHECKPOINTED)


def without_number(name: str) -> str:
    """``block 3`` -> ``block``: all blocks are alike."""
    return re.sub(r" \d+$", "", name)
