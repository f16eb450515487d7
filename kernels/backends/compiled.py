"""torch.compile of the explicit softmax: Inductor fuses mask and softmax around the matmuls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kernels import accounting, recompiling
from kernels.backend import Attention, attention_backend
from kernels.backends.naive import explicit_softmax_attention
from kernels.problem import MASKS, AttentionProblem, AttentionSpec
from kernels.registry import Look
from kernels.toolchain import why_not_compile

MAX_ROW_IN_A_TILE = 1024
"""The longest row that Inductor reduces in one tile (a persistent reduction), and in place."""

KEPT = 64
"""Kinds of calls, such as shapes, whose compiled functions are kept."""


@attention_backend("compiled", look=Look(colour="#AA4499", marker="s", place=1))
@dataclass(kw_only=True, slots=True)
class Compiled(Attention):
    """The naive backend through torch.compile, each shape compiled afresh."""

    compiles: ClassVar[bool] = True
    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "value_dim"))

    def libraries(self) -> tuple[str, ...]:
        return ("triton",)

    def supports(self, problem: AttentionProblem) -> str | None:
        if problem.packed:
            return "takes no packed batch of different lengths"
        if problem.causal and problem.kv_len < problem.q_len:
            return "with fewer keys than queries, a causal mask leaves rows without any key"
        if problem.window and problem.mask.leaves_empty_rows(problem.q_len, problem.kv_len):
            return "with fewer keys than queries, this window leaves rows without any key"
        return why_not_compile(problem.device)

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        return problem.needs_grad

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Bytes of the backward pass; without gradients, or a plain causal mask, not predicted.

        Inductor decides what is materialised. With the mask of PyTorch 2.11 it keeps the
        probabilities and the mask, and fuses all between the matmuls into one kernel, which writes
        the gradient of the scores; without a mask it calls a fused kernel. Under autocast it keeps
        the scores as well, with two float32 statistics of each row, and where a row does not fit
        one tile, the gradients of both matmuls are read and written apart.
        """
        if not problem.needs_grad or not problem.causal or problem.device != "cuda":
            return None
        if problem.asks_for():
            return None
        size = accounting.tensor_bytes(problem)
        rows = problem.batch_size * problem.num_heads * problem.q_len
        element = size.q / (rows * problem.head_dim)
        scores = element * rows * problem.kv_len
        values = {
            "inputs": size.inputs,
            "output": size.o,
            "output_gradient": size.o,
            "dv": size.v,
            "mask": float(problem.q_len * problem.kv_len),
        }
        if problem.autocast:
            matrices = 4 if problem.kv_len > MAX_ROW_IN_A_TILE else 2
            return values | {"scores": matrices * scores, "row_statistics": 2 * size.lse}
        return values | {"scores": 2 * scores}

    def rounds_scores(self, problem: AttentionProblem) -> bool:
        return True

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        # Sinks are an argument of their own, since a layer's have the layout of every other's.
        keys = spec if spec.sinks is None else replace(spec, sinks=None)
        o: torch.Tensor = _compiled_attention(q, k, v, spec.sinks, keys)
        return o


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink_logits: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    whole = spec if sink_logits is None else replace(spec, sinks=sink_logits)
    return explicit_softmax_attention(q, k, v, whole)


_compiled_attention = recompiling.CompiledForEach(_attention, kept=KEPT)
