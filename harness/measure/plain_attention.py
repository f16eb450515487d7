"""Attention by its definition, for a model: what other ways to compute it are held to."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import AttentionSpec

SCORES_AT_ONCE = 2**26
"""Scores that are held at once where no gradient is asked for."""


class PlainAttention:
    """Explicit softmax in float32, or in float64 for such tensors; scores are never rounded.

    A :class:`models.layers.CoreAttention` for whole sequences.
    """

    def attend(self, q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, spec: AttentionSpec) -> Tensor:
        """o_BHSD in the dtype of q."""
        with torch.autocast(q_BHSD.device.type, enabled=False):
            wide = torch.promote_types(q_BHSD.dtype, torch.float32)
            q = q_BHSD.to(wide).unflatten(1, (k_BGSD.shape[1], -1)) * spec.scale
            k, v = k_BGSD.to(wide).unsqueeze(2), v_BGSD.to(wide).unsqueeze(2)
            rows = q.shape[3]
            at_once = rows
            if not torch.is_grad_enabled():
                at_once = max(1, SCORES_AT_ONCE // (q.shape[0] * q_BHSD.shape[1] * k.shape[3]))
            sinks = None
            if spec.sinks is not None:
                sinks = spec.sinks.to(wide).view(q.shape[1], q.shape[2], 1, 1)
            parts = [
                _rows(q[..., start : start + at_once, :], k, v, start, rows, spec, sinks)
                for start in range(0, rows, at_once)
            ]
            return torch.cat(parts, dim=3).flatten(1, 2).to(q_BHSD.dtype)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    length: int,
    spec: AttentionSpec,
    sinks: Tensor | None,
) -> Tensor:
    """Rows of the result from ``start`` on; the last of all ``length`` stands at the last key."""
    scores = q @ k.mT
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    rows = torch.arange(start, start + q.shape[3], device=q.device)[:, None]
    positions = rows + k.shape[3] - length + spec.shift
    keys = torch.arange(k.shape[3], device=q.device)
    hidden = torch.zeros(len(rows), len(keys), dtype=torch.bool, device=q.device)
    if spec.causal:
        hidden |= keys > positions
    if spec.window is not None:
        hidden |= (keys - positions).abs() >= spec.window
    hidden &= keys >= spec.prefix_len
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    # One more score of each row, whose value is zero.
    columns = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return columns.softmax(-1)[..., :-1] @ v
