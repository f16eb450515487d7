"""Checks any backend against float64 attention, on a slice of the real problem.

The backend runs at its full size; the reference is computed for one batch entry, one group of
query heads and a few rows, which costs O(rows * S * D) and is affordable at any length. Rows
of o and dq need only their own queries; rows of dk and dv need every query that sees those
keys, so under a causal mask the last keys are checked, which only the last queries see.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.problem import AttentionProblem

# Relative error, as a norm over the slice, beyond which a result is wrong rather than rounded.
# Naive bfloat16 attention rounds its probabilities to 8 bits and reaches about 1e-2.
TOLERANCE = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 4e-2, "float16": 1e-2}

ROWS = 64


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected|| in float64; infinite if ``got`` is not finite."""
    got = got.double()
    if not bool(got.isfinite().all()):
        return float("inf")
    scale = float(expected.norm())
    difference = float((got - expected).norm())
    # Below rounding, dividing by the norm would compare noise with noise.
    return difference / scale if scale > 1e-12 else difference


def check_slice(
    problem: AttentionProblem,
    tensors: dict[str, Tensor],
    *,
    scale: float,
    rows: Sequence[slice] | None = None,
    keys: Sequence[slice] | None = None,
) -> dict[str, float]:
    """Relative errors of o and, where given, dq, dk and dv.

    Args:
        tensors: q, k, v, o, and for gradients do, dq, dk, dv, as the backend saw and gave them.
        rows: which rows of o and dq to look at; the first and the last if None.
        keys: which rows of dk and dv to look at; the last if None, which cost least.
    """
    group_size = problem.num_heads // problem.num_kv_heads
    # The last batch entry and head, where a wrong stride would show.
    kv_head = problem.num_kv_heads - 1
    heads = slice(kv_head * group_size, (kv_head + 1) * group_size)
    q_HSD, k_SD, v_SD = (
        tensors["q"][-1, heads].double(),
        tensors["k"][-1, kv_head].double(),
        tensors["v"][-1, kv_head].double(),
    )
    if rows is None:
        rows = (
            slice(0, min(ROWS, problem.q_len)),
            slice(max(0, problem.q_len - ROWS), problem.q_len),
        )
    if keys is None:
        keys = (slice(max(0, problem.kv_len - ROWS), problem.kv_len),)
    errors = {"o": 0.0}
    grads = "do" in tensors
    if grads:
        errors["dq"] = 0.0
    for part in rows:
        p_HRS = _probabilities(problem, q_HSD, k_SD, part, scale)
        o_HRD = p_HRS @ v_SD
        errors["o"] = max(errors["o"], relative_error(tensors["o"][-1, heads, part], o_HRD))
        if grads:
            do_HRD = tensors["do"][-1, heads, part].double()
            ds_HRS = _score_gradients(p_HRS, do_HRD, o_HRD, v_SD, scale)
            dq_HRD = ds_HRS @ k_SD
            errors["dq"] = max(errors["dq"], relative_error(tensors["dq"][-1, heads, part], dq_HRD))
    if grads:
        found = [
            _key_errors(problem, tensors, (q_HSD, k_SD, v_SD), heads, scale, part) for part in keys
        ]
        errors |= {name: max(each[name] for each in found) for name in ("dk", "dv")}
    return errors


def _key_errors(
    problem: AttentionProblem,
    tensors: dict[str, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    heads: slice,
    scale: float,
    keys: slice,
) -> dict[str, float]:
    q_HSD, k_SD, v_SD = qkv
    first_row = max(0, keys.start + problem.q_len - problem.kv_len) if problem.causal else 0
    dk_KD = torch.zeros_like(k_SD[keys])
    dv_KD = torch.zeros_like(v_SD[keys])
    for start in range(first_row, problem.q_len, 512):
        rows = slice(start, min(start + 512, problem.q_len))
        p_HRS = _probabilities(problem, q_HSD, k_SD, rows, scale)
        do_HRD = tensors["do"][-1, heads, rows].double()
        ds_HRS = _score_gradients(p_HRS, do_HRD, p_HRS @ v_SD, v_SD, scale)
        dk_KD += torch.einsum("hrk,hrd->kd", ds_HRS[..., keys], q_HSD[:, rows])
        dv_KD += torch.einsum("hrk,hrd->kd", p_HRS[..., keys], do_HRD)
    return {
        "dk": relative_error(tensors["dk"][-1, -1, keys], dk_KD),
        "dv": relative_error(tensors["dv"][-1, -1, keys], dv_KD),
    }


def _probabilities(
    problem: AttentionProblem, q_HSD: Tensor, k_SD: Tensor, rows: slice, scale: float
) -> Tensor:
    scores_HRS = q_HSD[:, rows] @ k_SD.mT * scale
    if problem.causal:
        row = torch.arange(rows.start, rows.stop, device=q_HSD.device).unsqueeze(1)
        column = torch.arange(problem.kv_len, device=q_HSD.device)
        hidden = column > row + problem.kv_len - problem.q_len
        scores_HRS = scores_HRS.masked_fill(hidden, float("-inf"))
    return scores_HRS.softmax(dim=-1)


def _score_gradients(
    p_HRS: Tensor, do_HRD: Tensor, o_HRD: Tensor, v_SD: Tensor, scale: float
) -> Tensor:
    row_dots = (do_HRD * o_HRD).sum(dim=-1, keepdim=True)
    return p_HRS * (do_HRD @ v_SD.mT - row_dots) * scale
