"""Attention by its definition: softmax(q k^T * scale) v, with the S x S scores in memory.

The reference that the texts start from (CS336 assignment 2, equation 1). Every pass writes
and reads the score matrix, so its time is bound by memory bandwidth and its memory grows with
the square of the sequence: the cost that the other backends exist to avoid.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from kernels import accounting
from kernels.backend import Attention, DenseAttention, attention_backend
from kernels.problem import MASKS, AttentionProblem, AttentionSpec, Mask
from kernels.ranges import RangeMaker, named_range
from kernels.registry import Look


@attention_backend(
    "naive", look=Look(colour="#555555", marker="o", place=0, baseline="naive attention")
)
@dataclass(kw_only=True, slots=True)
class Naive(DenseAttention):
    """Explicit softmax; autograd keeps the probabilities for the backward pass."""

    takes: ClassVar[frozenset[str]] = frozenset((*MASKS, "shift", "value_dim"))

    def supports(self, problem: AttentionProblem) -> str | None:
        # A packed batch goes by way of the explicit passes, which know rows without any key.
        if problem.causal and problem.kv_len < problem.q_len and not problem.packed:
            return "with fewer keys than queries, a causal mask leaves rows without any key"
        if problem.shift and not problem.packed:
            return "with shifted queries, a mask may leave rows without any key"
        lengths = problem.q_len, problem.kv_len
        if problem.window and not problem.packed and problem.mask.leaves_empty_rows(*lengths):
            return "with fewer keys than queries, this window leaves rows without any key"
        return None

    def keeps_scores(self, problem: AttentionProblem) -> bool:
        return problem.needs_grad

    def peak_memory(self, problem: AttentionProblem) -> dict[str, float] | None:
        """Bytes at the step that holds the most matrices of scores.

        Not predicted for packed calls.

        Backward, that is the softmax's own: PyTorch (SoftMax.cu) holds the probabilities, their
        gradient, the product of both and the gradient of the scores, beside the mask that
        masked_fill saved, the tanh of a cap, and dv. Forward, it is masking: scores before and
        after it, and the mask and its complement; or the cap: scores before it, and two steps; or
        the softmax under autocast, whose input and output are float32, and with sinks, which
        make the scores a column wider.
        """
        if problem.packed:
            return None
        size = accounting.tensor_bytes(problem)
        rows = float(problem.batch_size * problem.num_heads * problem.q_len)
        pairs, columns = rows * problem.kv_len, rows * (problem.kv_len + problem.sinks)
        element = size.q / (rows * problem.head_dim)
        capped = pairs * (4.0 if problem.dtype == "float16" else element)
        if problem.softcap is None:
            capped = 0.0
        widened = problem.autocast and problem.device == "cuda"
        softmax = 4.0 if widened else element
        masked = problem.causal or problem.window is not None
        mask = float(problem.q_len * problem.kv_len) if masked else 0.0
        values = {"inputs": size.inputs}
        if problem.num_heads != problem.num_kv_heads:
            values["expanded_keys"] = size.k * problem.num_heads / problem.num_kv_heads
        if not problem.needs_grad:
            steps = [2 * pairs * element + 2 * mask]
            if problem.softcap is not None:
                steps.append(pairs * element + 2 * capped)
            if widened or problem.sinks:
                joined = columns * element if problem.sinks else 0.0
                inputs = columns * softmax if widened else 0.0
                steps.append(pairs * element + joined + inputs + columns * softmax)
            return values | {"scores": max(steps)}
        return values | {
            "output": size.o,
            "output_gradient": size.o,
            "dv": size.v,
            "scores": 4 * columns * softmax + capped,
            "mask": mask,
        }

    def rounds_scores(self, problem: AttentionProblem) -> bool:
        return True

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        if spec.packing is not None:
            return Attention.attend(self, q, k, v, spec)
        return explicit_softmax_attention(q, k, v, spec, named_range)

    def dense_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        group_size = q.shape[1] // k.shape[1]
        scores = masked_scores(q, _expand_heads(k, group_size), spec).float()
        lse = scores.logsumexp(dim=-1)
        probabilities = _probabilities(scores, lse)
        return probabilities.to(v.dtype) @ _expand_heads(v, group_size), lse

    def dense_backward(
        self,
        do: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        spec: AttentionSpec,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Recomputes the probabilities from lse (CS336 assignment 2, equations 13 to 19)."""
        group_size = q.shape[1] // k.shape[1]
        keys, values = _expand_heads(k, group_size), _expand_heads(v, group_size)
        scores = masked_scores(q, keys, spec).float()
        probabilities = _probabilities(scores, lse)
        slope: float | torch.Tensor = spec.scale
        if spec.softcap is not None:
            # d tanh x = 1 - tanh^2 x; where the mask hides a key the probability is zero.
            capped = scores.masked_fill(scores == float("-inf"), 0.0) / spec.softcap
            slope = spec.scale * (1 - capped.square())
        dv = probabilities.to(do.dtype).mT @ do
        dp = (do @ values.mT).float()
        row_dots = (do.float() * o.float()).sum(dim=-1, keepdim=True)
        ds = (probabilities * (dp - row_dots) * slope).to(q.dtype)
        dk = ds.mT @ q
        return ds @ keys, _sum_groups(dk, group_size), _sum_groups(dv, group_size)


def explicit_softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    marks: RangeMaker = contextlib.nullcontext,
) -> torch.Tensor:
    """q [B, H, S, D], k and v [B, H_kv, S_k, D] -> o [B, H, S, D]; a pure function of tensors.

    ``marks`` makes ranges for profilers; torch.compile has none to trace.
    """
    group_size = q.shape[1] // k.shape[1]
    with marks("scores"):
        scores = masked_scores(q, _expand_heads(k, group_size), spec)
    with marks("softmax"):
        # Under autocast softmax gives float32; the second matmul needs one dtype on both sides.
        probabilities = _softmax(scores, spec.sinks).to(v.dtype)
    with marks("final matmul"):
        return probabilities @ _expand_heads(v, group_size)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over keys, and over a sink for each head, which gets no column of the result."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]


def masked_scores(q: torch.Tensor, k: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Scaled and capped scores [B, H, S, S_k], minus infinity where the mask hides the key."""
    scores = (q @ k.mT) * spec.scale
    if spec.softcap is not None:
        # float16 has no room for cap times gradient, nor for a score that is small beside its cap.
        wide = torch.float32 if scores.dtype == torch.float16 else scores.dtype
        scores = (spec.softcap * (scores.to(wide) / spec.softcap).tanh()).to(scores.dtype)
    q_len, kv_len = scores.shape[-2:]
    visible = visible_keys(spec.mask, q_len, kv_len, scores.device)
    return scores if visible is None else scores.masked_fill(~visible, float("-inf"))


def visible_keys(mask: Mask, q_len: int, kv_len: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, bool [S, S_k]; None if all."""
    if not mask.causal and mask.window is None:
        return None
    offset = kv_len - q_len + mask.shift
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if mask.causal:
        visible = visible.tril(diagonal=offset)
        visible[:, : mask.prefix_len] = True
    elif mask.window is not None:
        visible = visible.tril(diagonal=offset + mask.window - 1)
    if mask.window is not None:
        visible = visible.triu(diagonal=offset - mask.window + 1)
    return visible


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), and zeros for a query that sees no key, whose lse is minus infinity."""
    # -inf - -inf is not a number, and exp(-inf - 0) is 0.
    reference = lse.masked_fill(lse == float("-inf"), 0.0)
    return (scores - reference.unsqueeze(-1)).exp()


def _expand_heads(x: torch.Tensor, group_size: int) -> torch.Tensor:
    return x if group_size == 1 else x.repeat_interleave(group_size, dim=1)


def _sum_groups(dx: torch.Tensor, group_size: int) -> torch.Tensor:
    return dx if group_size == 1 else dx.unflatten(1, (-1, group_size)).sum(dim=2)
