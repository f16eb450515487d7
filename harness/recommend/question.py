"""What was asked: a model, a length, a batch and a machine, and what is to be best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.predictions.capacity import Machine
from kernels.problem import MASKS
from models.config import ModelConfig
from models.variants import AttentionVariant

GOALS = ("tokens_per_s", "memory", "longest_sequence")

LEAST_SEQUENCES = 4
"""Sequences of a batch whose size was not given, or one for each GPU if those are more."""

Choose = Callable[[str, dict[str, Any]], Any]
"""Makes the typed choice of a group from keys and values, as the command line does: of ``compile``
and ``{"compile": "block", "compile.mode": "reduce-overhead"}``. ValueError for what cannot be."""


@dataclass(kw_only=True, slots=True)
class Question:
    """One call of ``attnbench recommend``."""

    model: ModelConfig
    seq_len: int
    gpus: int
    """Ranks: GPUs, or processes on a CPU."""
    sequences: int
    """Of one batch, over all ranks and all micro-batches."""
    precision: str
    goal: str
    machine: Machine
    choose: Choose
    typed: dict[str, list[Any]] = field(default_factory=dict)
    """Values of keys that were pinned: ``{"parallel": ["fsdp"], "parallel.tp": [1, 2]}``."""
    asked: str = ""
    """The command, for reports."""

    @property
    def batch_tokens(self) -> int:
        return self.sequences * self.seq_len

    @property
    def is_captured(self) -> bool:
        """Whether only captured steps are asked for."""
        return self.pinned(CAPTURE_KEY, [False]) == [True]

    def pinned(self, key: str, default: list[Any]) -> list[Any]:
        """The values of a key that was given, else ``default``."""
        return self.typed.get(key, default)

    def options(self, group: str) -> dict[str, Any]:
        """Values of a group's own keys, such as ``attention.kernel``; no axis is among them."""
        return {
            key: values[0]
            for key, values in self.typed.items()
            if key.startswith(f"{group}.") and key not in (*MESH_KEYS, CAPTURE_KEY)
        }

    @property
    def masks(self) -> dict[str, Any]:
        """Options of masks, which every attention has: ``{"attention.window": 1024}``."""
        return {key: values[0] for key, values in self.typed.items() if key in MASK_KEYS}

    @property
    def variant(self) -> AttentionVariant:
        """What attention does beside a causal mask."""
        return AttentionVariant(**{key.split(".")[1]: value for key, value in self.masks.items()})


MASK_KEYS = tuple(f"attention.{name}" for name in MASKS)

MESH_KEYS = ("parallel.dp", "parallel.cp", "parallel.tp")

CAPTURE_KEY = "task.cuda_graph"
"""Whether a step is captured in CUDA graphs, another axis."""
