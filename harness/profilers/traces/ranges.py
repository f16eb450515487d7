"""Ranges around the parts of a step while it is profiled, and what happens at their ends.

Hooks on the model's modules, made for the profiled passes and taken away after them, so that a
model which nobody profiles runs exactly the code that it has. Explicit attention and the loss
mark their own parts (:func:`kernels.ranges.named_range`); collectives are marked by PyTorch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from harness.bench.bench import PhaseTimer
from kernels.ranges import RangeMaker, ranges_made_by
from models.checkpointing import CHECKPOINTED
from models.transformer import Block, Embedding, FeedForward, Linear, SelfAttention

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
"""All names, without the numbers of blocks."""


class RangeTimer(PhaseTimer):
    """Marks phases as ranges; their samples are not of a measured pass, and nobody reads them."""

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
    """While inside, every part of ``model`` runs in a range of ``make``.

    Nothing inside the model where torch.compile has compiled it, or parts of it: it would be
    compiled again, and not be what was measured.
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
            # Checkpointing ends a repeated forward pass by an exception.
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
    """The ranges of a path as tables name them, the same when a block is computed again."""
    names = tuple(without_number(name) for name in path)
    if names[:1] == (CHECKPOINTED,):
        return ("block", *names[1:])
    return tuple(name for name in names if name != CHECKPOINTED)


def without_number(name: str) -> str:
    """``block 3`` -> ``block``: all blocks are of one make."""
    return re.sub(r" \d+$", "", name)
