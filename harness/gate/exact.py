"""Rows of attention and of its gradients, by their definition, in a chosen arithmetic.

In float64 they are what a kernel's results are compared with. In float32, with probabilities and
results rounded to a kernel's dtype as FlashAttention rounds them, they show how exact a result of
that dtype can be (:mod:`harness.gate.tolerances`).

Shapes: B batch entries, G key-value heads, H query heads of each of them, S queries, K keys, R
sampled rows of S or K, D head_dim. Equations 4 to 19 of the CS336 systems text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 512
"""Queries whose log-sum-exp is computed at once."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Arithmetic:
    """The dtype of every operation, and the one that probabilities and results are rounded to."""

    dtype: torch.dtype
    rounds_to: torch.dtype | None = None
    rounds_scores: bool = False
    """Whether scores, and their gradients by row, are rounded too, as matrices in memory are."""

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def round(self, x: Tensor) -> Tensor:
        return x if self.rounds_to is None else x.to(self.rounds_to).to(self.dtype)

    def scores(self, q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
        """scale q k^T, as a product of matrices and another operation."""
        if not self.rounds_scores:
            return (q @ k.mT).mul_(scale)
        product = self.round(q @ k.mT)
        return product if scale == 1.0 else self.round(product * scale)


EXACT = Arithmetic(dtype=torch.float64)


@dataclass(kw_only=True, slots=True, frozen=True)
class Mask:
    """Query i sees the keys up to i + ``offset``; all of them without a causal mask."""

    causal: bool
    offset: int

    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Which keys a row does not see; ``rows`` and ``keys`` broadcast to the scores."""
        return keys > rows + self.offset if self.causal else None


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


def log_sum_exp(q_BGHSD: Tensor, k_BGKD: Tensor, mask: Mask, scale: float) -> Tensor:
    """The log-sum-exp of every row's scores, [B, G, H, S], float64.

    Scores are exact to float64, and their exponentials, relative to the largest, to float32, which
    takes a third of the time: the sum is off by 1e-7 of itself, less than any float32 result.
    """
    group, length = q_BGHSD.shape[2:4]
    k_BGKD = k_BGKD.double()
    lse = q_BGHSD.new_empty(q_BGHSD.shape[:4], dtype=torch.float64)
    columns = torch.arange(k_BGKD.shape[2], device=k_BGKD.device)
    for start in range(0, length, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, length), device=k_BGKD.device)
        seen = k_BGKD.shape[2]
        if mask.causal:
            seen = max(0, min(seen, int(rows[-1]) + 1 + mask.offset))
        q_rows = q_BGHSD[..., start : start + len(rows), :].flatten(2, 3).double()
        scores = (q_rows @ k_BGKD[:, :, :seen].mT).mul_(scale)
        hidden = mask.hidden(rows.repeat(group)[:, None], columns[:seen])
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        largest = scores.amax(-1, keepdim=True) if seen else scores.new_full((1,), -torch.inf)
        below = scores.sub_(largest.nan_to_num(neginf=0.0)).float()
        total = below.exp_().sum(-1).double().log() + largest.squeeze(-1)
        lse[..., start : start + len(rows)] = total.unflatten(2, (group, -1))
    return lse


def rows_of_queries(
    tensors: dict[str, Tensor], rows_BGHR: Tensor, mask: Mask, scale: float, arithmetic: Arithmetic
) -> Rows:
    """o, lse and, where ``do`` is among the tensors, dq of some queries.

    Args:
        tensors: q, do [B, G, H, S, D] and k, v [B, G, K, D].
    """
    group = rows_BGHR.shape[2]
    wide = arithmetic.wide
    k, v = wide(tensors["k"]), wide(tensors["v"])
    q = wide(take(tensors["q"], rows_BGHR)).flatten(2, 3)
    scores = arithmetic.scores(q, k, scale)
    columns = torch.arange(k.shape[2], device=k.device)
    hidden = mask.hidden(rows_BGHR.flatten(2, 3)[..., None], columns)
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    # A row that sees no key has probabilities of zero: exp(-inf - 0).
    p = scores.sub_(lse.nan_to_num(neginf=0.0)).exp_()
    o = arithmetic.round(arithmetic.round(p) @ v)
    values = {"o": o, "lse": lse.squeeze(-1)}
    terms = {"o": o.norm(dim=-1) / 2}
    if "do" in tensors:
        do = wide(take(tensors["do"], rows_BGHR)).flatten(2, 3)
        dp = arithmetic.scores(do, v)
        largest = p.amax(-1)
        ds = p.mul_(dp.sub_((do * o).sum(-1, keepdim=True))).mul_(scale)
        values["dq"] = arithmetic.round(arithmetic.round(ds) @ k)
        terms["dq"] = scale * largest * do.norm(dim=-1) * _per_element(v) * _norm(k)
    return Rows(
        values={name: x.unflatten(2, (group, -1)) for name, x in values.items()},
        terms={name: x.unflatten(2, (group, -1)) for name, x in terms.items()},
    )


def rows_of_keys(
    tensors: dict[str, Tensor],
    lse_BGHS: Tensor,
    rows_BGR: Tensor,
    mask: Mask,
    scale: float,
    arithmetic: Arithmetic,
) -> Rows:
    """dk and dv of some keys, over all queries that see them.

    Args:
        tensors: q, o, do [B, G, H, S, D] and k, v [B, G, K, D]; o as the kernel gave it, which
            itself reads it for its backward pass.
        lse_BHGS: the exact log-sum-exp of every query.
    """
    wide = arithmetic.wide
    q, do = (wide(tensors[name]).flatten(2, 3) for name in ("q", "do"))
    dots = (wide(tensors["o"]).flatten(2, 3) * do).sum(-1)
    k, v = (wide(take(tensors[name], rows_BGR)) for name in ("k", "v"))
    group, length = tensors["q"].shape[2:4]
    scores = arithmetic.scores(k, q, scale)
    queries = torch.arange(length, device=q.device).repeat(group)
    hidden = mask.hidden(queries, rows_BGR[..., None])
    if hidden is not None:
        scores.masked_fill_(hidden, float("-inf"))
    lse = wide(lse_BGHS).flatten(2, 3).nan_to_num(neginf=0.0)
    p = scores.sub_(lse[:, :, None]).exp_()
    dv = arithmetic.round(arithmetic.round(p) @ do)
    largest = p.amax(-1)
    ds = p.mul_(arithmetic.scores(v, do).sub_(dots[:, :, None])).mul_(scale)
    dk = arithmetic.round(arithmetic.round(ds) @ q)
    terms = scale * largest * _norm(do) * _per_element(v) * _norm(q)
    return Rows(values={"dk": dk, "dv": dv}, terms={"dk": terms, "dv": dv.norm(dim=-1) / 2})


def take(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of the last dimension but one, [..., R, D]; indices [..., R] for each head."""
    return torch.take_along_dim(x, rows[..., None].to(x.device), dim=-2)


def _norm(x: Tensor) -> Tensor:
    """The root mean square of the norms of rows, by head, to stand beside [B, G, R]."""
    return x.square().sum(-1).mean(-1, keepdim=True).sqrt()


def _per_element(x: Tensor) -> Tensor:
    return _norm(x) * float(x.shape[-1] ** -0.5)
