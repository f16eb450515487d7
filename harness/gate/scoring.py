"""How probabilities come of queries and keys: masks, caps and sinks, in a chosen arithmetic.

Said once more, and from the definitions alone: what kernels and their callers know of a mask
(:mod:`kernels.problem`) is not used here, so that an error there is none of the gate's.

Shapes: B batch entries, G key-value heads, H query heads of each of them, R rows, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True, frozen=True)
class Arithmetic:
    """The dtype of every operation, and the one that probabilities and results are rounded to."""

    dtype: torch.dtype
    rounds_to: torch.dtype | None = None
    rounds_scores: bool = False
    """Whether scores, and their gradients by row, are rounded too, as matrices in memory are."""
    rounds_tanh: bool = False
    """Whether a tanh is as exact as 11 bits hold, as ``tanh.approx.f32`` of PTX is."""

    def wide(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)

    def round(self, x: Tensor) -> Tensor:
        return x if self.rounds_to is None else x.to(self.rounds_to).to(self.dtype)

    def scores(self, q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
        """scale q k^T, as a product of matrices and another operation."""
        if not self.rounds_scores:
            product = q @ k.mT
            return product if scale == 1.0 else product.mul_(scale)
        product = self.round(q @ k.mT)
        return product if scale == 1.0 else self.round(product * scale)

    def tanh(self, x: Tensor) -> Tensor:
        """tanh x; in float32 from an exponential, as kernels without a tanh of their own do."""
        if self.dtype == torch.float64:
            return x.tanh()
        if self.rounds_tanh:
            return x.tanh().half().to(self.dtype)
        return 1 - 2 / ((2 * x).exp() + 1)

    def capped(self, scores: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
        """softcap tanh(scores / softcap), and its slope by the scores, 1 - tanh^2."""
        if not self.rounds_scores:
            bent = self.tanh(scores / softcap)
            return softcap * bent, 1 - bent.square()
        bent = self.round(self.tanh(self.round(scores / softcap)))
        return self.round(softcap * bent), 1 - bent.square()


EXACT = Arithmetic(dtype=torch.float64)


@dataclass(kw_only=True, slots=True, frozen=True)
class Mask:
    """Query i stands at i + ``offset`` among the keys and sees those that nothing hides."""

    causal: bool
    """Keys behind its place are hidden, apart from the first ``prefix_len``."""
    offset: int
    window: int | None = None
    """Keys so far from its place, or farther, are hidden."""
    prefix_len: int = 0

    def hidden(self, rows: Tensor, keys: Tensor) -> Tensor | None:
        """Which keys a row does not see; ``rows`` and ``keys`` broadcast to the scores."""
        places = rows + self.offset
        found = None
        if self.causal:
            found = keys > places
            if self.prefix_len:
                found &= keys >= self.prefix_len
        if self.window is not None:
            far = (keys <= places - self.window) | (keys >= places + self.window)
            found = far if found is None else found | far
        return found

    def seen_by_all(self, first: int, last: int) -> int:
        """How many of the first keys queries ``first`` to ``last`` all see, at least."""
        if self.window is not None or not self.causal:
            return 0
        return max(first + self.offset + 1, self.prefix_len, 0)

    def keys_of(self, first: int, last: int, num_keys: int) -> slice:
        """The keys from the first to the last that queries ``first`` to ``last`` see, or any."""
        start, stop = 0, num_keys
        if self.causal:
            stop = max(last + self.offset + 1, self.prefix_len)
        elif self.window is not None:
            stop = last + self.offset + self.window
        if self.window is not None:
            start = first + self.offset - self.window + 1
        return _within(start, stop, num_keys)

    def queries_of(self, first: int, last: int, num_queries: int) -> slice:
        """Queries among which are all that see one of the keys ``first`` to ``last``, or any."""
        if self.window is None:
            return slice(0, num_queries)
        begin, end = first - self.offset - self.window + 1, last - self.offset + self.window
        return _within(begin, end, num_queries)


def _within(start: int, stop: int, size: int) -> slice:
    """The part of [start, stop) within [0, size), with one item at least where there is any."""
    start = max(0, min(start, size - 1))
    return slice(start, min(size, max(start + 1, stop)))


@dataclass(kw_only=True, slots=True, frozen=True)
class Scoring:
    """How probabilities come of q and k: the scale, the cap, the mask, and the sinks."""

    mask: Mask
    scale: float
    softcap: float | None = None
    """Scores s become softcap tanh(s / softcap) before the mask."""
    sinks: Tensor | None = None
    """[G, H]: one more logit in the softmax of every row, which has no value."""

    def scores(
        self,
        arithmetic: Arithmetic,
        q: Tensor,
        k: Tensor,
        rows: Tensor,
        columns: Tensor,
        *,
        shown: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Scores with minus infinity where hidden, and the slope of their cap, if they have one.

        Args:
            q, k: the rows of the result and its columns, which may be keys and queries as well.
            rows, columns: the places of queries and of keys, which broadcast to the scores.
            shown: of so many first columns the mask hides none.
        """
        found, slope = arithmetic.scores(q, k, self.scale), None
        if self.softcap is not None:
            found, slope = arithmetic.capped(found, self.softcap)
        hidden = self.mask.hidden(rows, columns[..., shown:])
        if hidden is not None:
            found[..., shown:].masked_fill_(hidden, float("-inf"))
        return found, slope

    def with_sinks(self, lse: Tensor, arithmetic: Arithmetic = EXACT) -> Tensor:
        """The log-sum-exp over keys [B, G, H, R], over the sinks as well."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.rounded_sinks(arithmetic)[:, :, None].to(lse.device))

    def rounded_sinks(self, arithmetic: Arithmetic) -> Tensor:
        """[G, H], in the dtype of scores where these are rounded."""
        assert self.sinks is not None, "the call has sinks"
        sinks = arithmetic.wide(self.sinks)
        return arithmetic.round(sinks) if arithmetic.rounds_scores else sinks
