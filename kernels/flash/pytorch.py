"""FlashAttention-2 in plain PyTorch, tile by tile: to read, and to debug other kernels against.

The forward pass is Algorithm 1 of the CS336 systems text (section 1.3.2): for each tile of
queries one loop over the tiles of keys, with a running maximum m, a running denominator l and
an unnormalised output o, so that no more than one tile of scores exists at a time. The backward
pass recomputes each tile of probabilities from the log-sum-exp (equations 13 to 19). Tiles that
a mask empties are skipped, and only tiles that an edge of it crosses are compared with it.

Names follow the text: S scores, P probabilities, L log-sum-exp, D = rowsum(O * dO).

Shapes: B batch, H key-value heads, G query heads that share one of them, Q queries and K keys
(of all, or of a tile), R = G * Q rows of a tile, D head_dim, of which v, o and their gradients may
have fewer, as in latent attention. The G query heads of a group are stacked as further rows of one
tile: keys are read once for all of them and never expanded, and their gradients sum over the group
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kernels.autograd import first_order_only
from kernels.problem import AttentionSpec, Mask


@dataclass(kw_only=True, slots=True, frozen=True)
class Blocks:
    """The size of a tile, and whether each runs through torch.compile."""

    block_q: int
    """Queries in a tile (B_q)."""
    block_k: int
    """Keys in a tile (B_k)."""
    compiled: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class Tiling:
    """The tiles of the score matrix to compute, and those that need the mask."""

    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    mask: Mask

    def query_tiles(self) -> Iterator[slice]:
        for start in range(0, self.q_len, self.block_q):
            yield slice(start, min(start + self.block_q, self.q_len))

    def key_tiles(self, queries: slice) -> Iterator[slice]:
        """Tiles with at least one key that one of the queries sees."""
        # The first query sees the leftmost key, and the last one the rightmost.
        begin, _ = self._seen(queries.start)
        _, end = self._seen(queries.stop - 1)
        for start in range(begin // self.block_k * self.block_k, end, self.block_k):
            yield slice(start, min(start + self.block_k, self.kv_len))

    def hidden(self, queries: slice, keys: slice, group_size: int, like: Tensor) -> Tensor | None:
        """Mask of the hidden scores [R, K] of a tile; None if none is hidden."""
        begin, _ = self._seen(queries.stop - 1)
        _, end = self._seen(queries.start)
        if begin <= keys.start and keys.stop <= end:
            return None
        ranges = [self._seen(query) for query in range(queries.start, queries.stop)]
        ends_Q2 = torch.tensor(ranges, device=like.device).repeat(group_size, 1)
        j_K = torch.arange(keys.start, keys.stop, device=like.device)
        return (j_K < ends_Q2[:, :1]) | (j_K >= ends_Q2[:, 1:])

    def _seen(self, query: int) -> tuple[int, int]:
        return self.mask.keys(query, self.q_len, self.kv_len)


def forward(
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    spec: AttentionSpec,
    blocks: Blocks,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: o [B, heads, S, D of v], and lse [B, heads, S] in the accumulators' dtype.

    Accumulates in float32, or in float64 for float64 inputs.
    """
    update = _compiled(forward_tile) if blocks.compiled else forward_tile
    num_groups, group_size = k_BHSD.shape[1], q_BHSD.shape[1] // k_BHSD.shape[1]
    tiling = Tiling(
        q_len=q_BHSD.shape[2],
        kv_len=k_BHSD.shape[2],
        block_q=blocks.block_q,
        block_k=blocks.block_k,
        mask=spec.mask,
    )
    dtype = accumulator_dtype(q_BHSD)
    o_BHSD = q_BHSD.new_empty(*q_BHSD.shape[:3], v_BHSD.shape[3])
    lse_BHS = q_BHSD.new_empty(q_BHSD.shape[:3], dtype=dtype)
    for queries in tiling.query_tiles():
        q_i = rows_of(q_BHSD[:, :, queries], num_groups).to(dtype)
        o_i = q_i.new_zeros(*q_i.shape[:3], v_BHSD.shape[3])
        l_i = q_i.new_zeros(*q_i.shape[:3], 1)
        m_i = torch.full_like(l_i, -torch.inf)
        for keys in tiling.key_tiles(queries):
            k_j, v_j = k_BHSD[:, :, keys].to(dtype), v_BHSD[:, :, keys].to(dtype)
            hidden = tiling.hidden(queries, keys, group_size, q_i)
            o_i, l_i, m_i = update(q_i, k_j, v_j, o_i, l_i, m_i, hidden, spec.scale, spec.softcap)
        # A row that saw no key has l = 0 and o = 0, and keeps them; NaN stays NaN.
        o_i = o_i / torch.where(l_i == 0, 1.0, l_i)
        o_BHSD[:, :, queries] = heads_of(o_i, group_size).to(o_BHSD.dtype)
        lse_BHS[:, :, queries] = heads_of(m_i + l_i.log(), group_size).squeeze(-1)
    return o_BHSD, lse_BHS


def forward_tile(
    q_BHRD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    o_BHRD: Tensor,
    l_BHR1: Tensor,
    m_BHR1: Tensor,
    hidden_RK: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Algorithm 1's inner loop: (o, l, m) after one more tile of keys."""
    S = q_BHRD @ k_BHKD.mT * scale
    if softcap is not None:
        S = softcap * (S / softcap).tanh()
    if hidden_RK is not None:
        S = S.masked_fill(hidden_RK, -torch.inf)
    m_new = torch.maximum(m_BHR1, S.amax(dim=-1, keepdim=True))
    # Where nothing was visible so far m is -inf, and -inf - -inf is not a number.
    reference = m_new.masked_fill(m_new == -torch.inf, 0.0)
    P = (S - reference).exp()
    decay = (m_BHR1 - reference).exp()
    l_new = decay * l_BHR1 + P.sum(dim=-1, keepdim=True)
    return decay * o_BHRD + P @ v_BHKD, l_new, m_new


def backward(
    do_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    o_BHSD: Tensor,
    lse_BHS: Tensor,
    spec: AttentionSpec,
    blocks: Blocks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations 13 to 19, over the same tiles as :func:`forward`: dq, dk, dv."""
    update = _compiled(backward_tile) if blocks.compiled else backward_tile
    num_groups, group_size = k_BHSD.shape[1], q_BHSD.shape[1] // k_BHSD.shape[1]
    tiling = Tiling(
        q_len=q_BHSD.shape[2],
        kv_len=k_BHSD.shape[2],
        block_q=blocks.block_q,
        block_k=blocks.block_k,
        mask=spec.mask,
    )
    dtype = accumulator_dtype(q_BHSD)
    D_BHS1 = (o_BHSD.to(dtype) * do_BHSD.to(dtype)).sum(dim=-1, keepdim=True)
    # exp(S - inf) is zero: a row that saw no key has no probabilities.
    L_BHS1 = lse_BHS.to(dtype).masked_fill(lse_BHS == -torch.inf, torch.inf).unsqueeze(-1)
    dq_BHSD = torch.empty_like(q_BHSD)
    dk_BHSD = torch.zeros_like(k_BHSD, dtype=dtype)
    dv_BHSD = torch.zeros_like(v_BHSD, dtype=dtype)
    for queries in tiling.query_tiles():
        q_i, do_i, L_i, D_i = (
            rows_of(x[:, :, queries], num_groups).to(dtype)
            for x in (q_BHSD, do_BHSD, L_BHS1, D_BHS1)
        )
        dq_i = torch.zeros_like(q_i)
        for keys in tiling.key_tiles(queries):
            k_j, v_j = k_BHSD[:, :, keys].to(dtype), v_BHSD[:, :, keys].to(dtype)
            hidden = tiling.hidden(queries, keys, group_size, q_i)
            dq_ij, dk_ij, dv_ij = update(
                q_i, k_j, v_j, do_i, L_i, D_i, hidden, spec.scale, spec.softcap
            )
            dq_i += dq_ij
            dk_BHSD[:, :, keys] += dk_ij
            dv_BHSD[:, :, keys] += dv_ij
        dq_BHSD[:, :, queries] = heads_of(dq_i, group_size).to(dq_BHSD.dtype)
    return dq_BHSD, dk_BHSD.to(k_BHSD.dtype), dv_BHSD.to(v_BHSD.dtype)


def backward_tile(
    q_BHRD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    do_BHRD: Tensor,
    L_BHR1: Tensor,
    D_BHR1: Tensor,
    hidden_RK: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The additions of one tile of scores to dq, dk and dv."""
    S = q_BHRD @ k_BHKD.mT * scale  # (13)
    slope: Tensor | float = scale
    if softcap is not None:
        tanh = (S / softcap).tanh()
        S, slope = softcap * tanh, scale * (1 - tanh.square())
    if hidden_RK is not None:
        S = S.masked_fill(hidden_RK, -torch.inf)
    P = (S - L_BHR1).exp()  # (14)
    dv_BHKD = P.mT @ do_BHRD  # (15)
    dP = do_BHRD @ v_BHKD.mT  # (16)
    dS = P * (dP - D_BHR1) * slope  # (17)
    dq_BHRD = dS @ k_BHKD  # (18)
    dk_BHKD = dS.mT @ q_BHRD  # (19)
    return dq_BHRD, dk_BHKD, dv_BHKD


def accumulator_dtype(x: Tensor) -> torch.dtype:
    """float32 for narrower inputs, the inputs' own for float32 and float64."""
    return torch.promote_types(x.dtype, torch.float32)


def rows_of(x_BSQD: Tensor, num_groups: int) -> Tensor:
    """[B, query heads, Q, D] -> [B, H, G * Q, D]: the heads of a group as rows of one tile."""
    return x_BSQD.unflatten(1, (num_groups, -1)).flatten(2, 3)


def heads_of(x_BHRD: Tensor, group_size: int) -> Tensor:
    """The inverse of :func:`rows_of`."""
    return x_BHRD.unflatten(2, (group_size, -1)).flatten(1, 2)


@cache
def _compiled(update: Callable[..., Any]) -> Callable[..., Any]:
    # Compiled once for each shape of a tile, of which there are few: whole or cut off at the
    # end of queries or keys, with or without a mask.
    return torch.compile(update, dynamic=False, fullgraph=True)


class FlashAttentionPyTorch(torch.autograd.Function):
    """o = softmax(q k^T / sqrt(d)) v, differentiable, on tensors [..., sequence, d].

    Two to four dimensions; a third from the end are heads, and k and v may have fewer of them
    than q if there is a batch dimension in front. For the backward pass it saves q, k, v, o and
    one tensor of q's shape without d, the log-sum-exp.
    """

    BLOCKS = Blocks(block_q=64, block_k=64)

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        ctx.spec = AttentionSpec(causal=is_causal, scale=Q.shape[-1] ** -0.5)
        q, k, v = (_with_heads(x) for x in (Q, K, V))
        o_BHSD, lse_BHS = forward(q, k, v, ctx.spec, FlashAttentionPyTorch.BLOCKS)
        o = o_BHSD.reshape(*Q.shape[:-1], V.shape[-1])
        ctx.save_for_backward(Q, K, V, o, lse_BHS.reshape(Q.shape[:-1]))
        return o

    @staticmethod
    def backward(ctx: Any, dO: Tensor) -> Any:
        Q, K, V, o, lse = ctx.saved_tensors
        q, k, v, o, do = (_with_heads(x) for x in (Q, K, V, o, dO))
        lse = lse.reshape(q.shape[:3])
        with torch.no_grad():
            found = backward(do, q, k, v, o, lse, ctx.spec, FlashAttentionPyTorch.BLOCKS)
        shaped = [dx.reshape(x.shape) for dx, x in zip(found, (Q, K, V), strict=True)]
        return *first_order_only("FlashAttentionPyTorch", shaped, (dO, Q, K, V)), None


def _with_heads(x: Tensor) -> Tensor:
    """[..., sequence, d] with four dimensions; batch dimensions without heads get one."""
    if not 2 <= x.ndim <= 4:
        raise ValueError(f"expected [..., sequence, d] with 2 to 4 dimensions, got {x.ndim}")
    return x if x.ndim == 4 else x.reshape(-1, 1, *x.shape[-2:])
