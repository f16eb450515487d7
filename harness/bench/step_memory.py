"""The memory of one rank during its first training step, by purpose.

CS336 assignment 2, problem optimizer_state_sharding_accounting: after initialisation, before
the optimizer's first step and after it. Parameters, gradients and optimizer state are counted
tensor by tensor, every storage once; activations are the memory that the forward pass leaves
allocated.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.bench.bench import Bench


class MemoryNotes:
    """Takes a timer's place in a first step, and notes bytes where phases begin and end.

    Args:
        baseline: bytes allocated on a CUDA device before the model was made.
    """

    def __init__(
        self, bench: Bench, model: nn.Module, optimizer: Optimizer | None, baseline: int
    ) -> None:
        self._bench = bench
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._baseline = baseline
        self.bytes: dict[str, int] = {}
        self._note("after_initialisation")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note memory around a phase, in the place of a timer's ``phase``."""
        if name == "forward":
            with self._activations():
                yield
            return
        yield
        if name == "backward":
            self.bytes["gradients_bytes"] = held_bytes(self._gradients())
            self._note("before_optimizer")
        elif name == "optimizer":
            self.bytes["optimizer_state_bytes"] = held_bytes(state_tensors(self._optimizer))
            self._note("after_optimizer")

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _note(self, moment: str) -> None:
        """Note the bytes allocated on CUDA; on a CPU, which has no count, the sum of parts."""
        self.bytes["parameters_bytes"] = held_bytes(self._parameters)
        if self._bench.device.type == "cuda":
            self.bytes[f"{moment}_bytes"] = self._bench.allocated_bytes() - self._baseline
        else:
            parts = [*self._parameters, *self._gradients(), *state_tensors(self._optimizer)]
            self.bytes[f"{moment}_bytes"] = held_bytes(parts)

    @contextlib.contextmanager
    def _activations(self) -> Iterator[None]:
        """Note activations: on CUDA the growth of allocated memory, on a CPU the saved tensors."""
        if self._bench.device.type == "cuda":
            before = self._bench.allocated_bytes()
            yield
            self.bytes["activations_bytes"] = self._bench.allocated_bytes() - before
            return
        own = set(storages(self._parameters))
        saved: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            saved.update(storages([x]))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield
        self.bytes["activations_bytes"] = sum(
            size for place, size in saved.items() if place not in own
        )


def note_first_step(bench: Bench, step: Callable[[Any], None], notes: MemoryNotes) -> None:
    """Run a first step and record its memory, and its time as that of the first pass."""
    bench.stage("warm-up")
    bench.barrier()
    started = time.perf_counter()
    step(notes)
    bench.synchronize()
    bench.outcome.compilation["first_pass_s"] = time.perf_counter() - started
    bench.outcome.memory |= notes.bytes


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each counted once."""
    return sum(storages(tensors).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The tensors' storages: size by address. A DTensor counts with its local part."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def state_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """The optimizer's state on this rank; PyTorch's sharded one wraps the one that holds it."""
    if optimizer is None:
        return []
    holder = getattr(optimizer, "optim", optimizer)
    values = (value for state in holder.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]
