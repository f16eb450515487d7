"""Rows of attention and of its gradients, by their definition, in a chosen arithmetic.

In float64 they are what a kernel's results are compared with. In float32, with probabilities and
results rounded to a kernel's dtype as FlashAttention rounds them, they show how exact a result of
that dtype can be (:mod:`harness.gate.tolerances`).

Shapes: B batch entries, G key-value heads, H query heads of each of them, S queries, K keys, R
sampled rows of S or K, D head_dim. Equations 4 to 19 of the CS336 systems text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.gate.scoring import EXACT, Arithmetic, Scoring

BLOCK = 512
"""Queries whose log-sum-exp is computed at once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rows:
    """Values of some rows, and the size of their terms before these cancel each other."""

    values: dict[str, Tensor]
    """o and dq [B, G, H, R, D], or dk and dv [B, G, R, D]."""
    terms: dict[str, Tensor]
    """A norm by row, like ``values`` without D."""

    def some(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows(
            values={
                name: x[..., rows] if name == "lse" else x[..., rows, :]
                for name, x in self.values.items()
            },
            terms={name: x[..., rows] for name, x in self.terms.items()},
        )

    @classmethod
    def joined(cls, blocks: Sequence[Rows]) -> Rows:
        """Blocks of rows one after another."""

        def join(kind: str, name: str) -> Tensor:
            found = [getattr(block, kind)[name] for block in blocks]
            return torch.cat(found, dim=-1 if kind == "terms" or name == "lse" else -2)

        first = blocks[0]
        return cls(
            values={name: join("values", name) for name in first.values},
            terms={name: join("terms", name) for name in first.terms},
        )


def log_sum_exp(q_BGHSD: Tensor, k_BGKD: Tensor, scoring: Scoring) -> Tensor:
    """The log-sum-exp of every row's scores and of its sink, [B, G, H, S], float64.

    Scores are exact to float64, and their exponentials, relative to the largest, to float32, which
    takes a third of the time: the sum is off by 1e-7 of itself, less than any float32 result.
    """
    group, length = q_BGHSD.shape[2:4]
    # Of a window's keys only those that are seen are widened.
    windowed = scoring.mask.window is not None
    k_BGKD = k_BGKD if windowed else k_BGKD.double()
    lse = q_BGHSD.new_empty(q_BGHSD.shape[:4], dtype=torch.float64)
    # Of a long sequence these are nearly all scores that a check computes, and each operation
    # passes over them in memory: so queries are scaled instead, and only what can be is masked.
    scaled = replace(scoring, scale=1.0)
    columns = torch.arange(k_BGKD.shape[2], device=k_BGKD.device)
    for start in range(0, length, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, length), device=k_BGKD.device)
        seen = scoring.mask.keys_of(start, start + len(rows) - 1, k_BGKD.shape[2])
        shown = scoring.mask.seen_by_all(start, start + len(rows) - 1)
        q_rows = q_BGHSD[..., start : start + len(rows), :].flatten(2, 3).double() * scoring.scale
        places = rows.repeat(group)[:, None]
        keys = k_BGKD[:, :, seen].double()
        scores, _ = scaled.scores(EXACT, q_rows, keys, places, columns[seen], shown=shown)
        empty = seen.start == seen.stop
        largest = scores.new_full((1,), -torch.inf) if empty else scores.amax(-1, keepdim=True)
        below = scores.sub_(largest.nan_to_num(neginf=0.0)).float()
        total = below.exp_().sum(-1).double().log() + largest.squeeze(-1)
        lse[..., start : start + len(rows)] = total.unflatten(2, (group, -1))
    return scoring.with_sinks(lse)


def rows_of_queries(
    tensors: dict[str, Tensor], rows_BGHR: Tensor, scoring: Scoring, arithmetic: Arithmetic
) -> Rows:
    """o, lse and, where ``do`` is among the tensors, dq of some queries.

    Args:
        tensors: q, do [B, G, H, S, D] and k, v [B, G, K, D].
    """
    group = rows_BGHR.shape[2]
    wide = arithmetic.wide
    seen = slice(0, tensors["k"].shape[2])
    if scoring.mask.window is not None:
        seen = scoring.mask.keys_of(int(rows_BGHR.min()), int(rows_BGHR.max()), seen.stop)
    k, v = wide(tensors["k"][:, :, seen]), wide(tensors["v"][:, :, seen])
    q = wide(take(tensors["q"], rows_BGHR)).flatten(2, 3)
    columns = torch.arange(seen.start, seen.stop, device=k.device)
    places = rows_BGHR.flatten(2, 3)[..., None]
    scores, slope = scoring.scores(arithmetic, q, k, places, columns)
    lse = scoring.with_sinks(scores.logsumexp(-1).unflatten(2, (group, -1)), arithmetic)
    lse = lse.flatten(2, 3)[..., None]
    # A row that sees no key has probabilities of zero: exp(-inf - 0).
    p = scores.sub_(lse.nan_to_num(neginf=0.0)).exp_()
    o = arithmetic.round(arithmetic.round(p) @ v)
    values = {"o": o, "lse": lse.squeeze(-1)}
    terms = {"o": o.norm(dim=-1) / 2}
    if "do" in tensors:
        do = wide(take(tensors["do"], rows_BGHR)).flatten(2, 3)
        dp = arithmetic.scores(do, v)
        largest = p.amax(-1)
        ds = p.mul_(dp.sub_((do * o).sum(-1, keepdim=True))).mul_(scoring.scale)
        if slope is not None:
            # Terms stay as they are without a cap: its slope is off by a part of 1, not of itself.
            ds.mul_(slope)
        values["dq"] = arithmetic.round(arithmetic.round(ds) @ k)
        terms["dq"] = scoring.scale * largest * do.norm(dim=-1) * _per_element(v) * _norm(k)
    return Rows(
        values={name: x.unflatten(2, (group, -1)) for name, x in values.items()},
        terms={name: x.unflatten(2, (group, -1)) for name, x in terms.items()},
    )


def rows_of_keys(
    tensors: dict[str, Tensor],
    lse_BGHS: Tensor,
    rows_BGR: Tensor,
    scoring: Scoring,
    arithmetic: Arithmetic,
) -> Rows:
    """dk and dv of some keys, over all queries that see them.

    Args:
        tensors: q, o, do [B, G, H, S, D] and k, v [B, G, K, D]; o as the kernel gave it, which
            itself reads it for its backward pass.
        lse_BHGS: the exact log-sum-exp of every query.
    """
    wide = arithmetic.wide
    group, length = tensors["q"].shape[2:4]
    seeing = slice(0, length)
    if scoring.mask.window is not None:
        seeing = scoring.mask.queries_of(int(rows_BGR.min()), int(rows_BGR.max()), length)
    q, do, o = (wide(tensors[name][..., seeing, :]).flatten(2, 3) for name in ("q", "do", "o"))
    dots = (o * do).sum(-1)
    k, v = (wide(take(tensors[name], rows_BGR)) for name in ("k", "v"))
    queries = torch.arange(seeing.start, seeing.stop, device=q.device).repeat(group)
    scores, slope = scoring.scores(arithmetic, k, q, queries, rows_BGR[..., None])
    lse = wide(lse_BGHS[..., seeing]).flatten(2, 3).nan_to_num(neginf=0.0)
    p = scores.sub_(lse[:, :, None]).exp_()
    dv = arithmetic.round(arithmetic.round(p) @ do)
    largest = p.amax(-1)
    ds = p.mul_(arithmetic.scores(v, do).sub_(dots[:, :, None])).mul_(scoring.scale)
    if slope is not None:
        ds.mul_(slope)
    dk = arithmetic.round(arithmetic.round(ds) @ q)
    terms = scoring.scale * largest * _norm(do) * _per_element(v) * _norm(q)
    return Rows(values={"dk": dk, "dv": dv}, terms={"dk": terms, "dv": dv.norm(dim=-1) / 2})


def take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of the last dimension but one, [..., R, D]; indices [..., R] for each head."""
    return torch.take_along_dim(x, rows[..., None].to(x.device), dim=-2)


def _norm(x: Tensor) -> Tensor:
    """The root mean square of the norms of rows, by head, to stand beside [B, G, R]."""
    return x.square().sum(-1).mean(-1, keepdim=True).sqrt()


def _per_element(x: Tensor) -> Tensor:
    return _norm(x) * float(x.shape[-1] ** -0.5)
