"""Decoding by PyTorch's operators, one kernel after another.

Grouped queries are packed: the query heads of a group stand as rows of one matmul over the keys
that they share, [B, G, (H / G) T, D], so that the cache is never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.caches.key_values import KeyValueCache, next_positions
from kernels.caches.latents import LatentCache
from kernels.caches.places import Slots
from kernels.decoding import DecodeProblem, Decoder
from kernels.ranges import named_range
from kernels.rotary import Rotary, rotate


class NewTokens:
    """Positions, slots and mask of a step's new tokens, computed once for all layers.

    Lengths are read on the device. The host says only how many places are read; a CUDA graph
    outlives the host's lengths, and so reads all places.

    Masked scores do not hide a value that is not a number, since 0 * NaN is NaN, and what
    somebody forgot may be one. So places behind the new tokens are read as zeros: a paged cache
    is copied, and the copy masked; rows are zeroed where tokens were forgotten, which is rare.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        cache: KeyValueCache | LatentCache,
        rotary: Rotary | None,
        *,
        needs_mask: bool = True,
    ) -> None:
        self._problem = problem
        self._cache = cache
        self._places = cache.places
        self._rotary = rotary
        self._needs_mask = needs_mask
        self.span = cache.places.capacity
        self.slots: Slots
        self.hidden: Tensor | None = None
        """Whether a place is behind a new token's own: bool [B, T, span]; None where none is."""
        self.forgotten: Tensor | None = None
        """Whether a place is behind all new tokens: bool [B, span]; None where that is clean."""
        self._cos: Tensor
        self._sin: Tensor

    def plan(self) -> None:
        """Choose how many places of the cache to attend to."""
        if not self._problem.cuda_graph:
            self.span = self._places.longest + self._problem.new_tokens
        if not self._needs_mask or self._places.block_table is not None:
            return
        self._places.note_written(self._problem.new_tokens)
        if self._some_forgotten():
            self._cache.clear_behind(self._problem.new_tokens)

    def begin(self) -> None:
        num_tokens, places = self._problem.new_tokens, self._places
        with named_range("positions"):
            positions_BT = next_positions(places, num_tokens).long()
            sequences = torch.arange(places.batch_size, device=places.device)[:, None]
            self.slots = places.slots(sequences.expand_as(positions_BT), positions_BT)
            if self._rotary is not None:
                self._cos = self._rotary.cos[positions_BT]
                self._sin = self._rotary.sin[positions_BT]
            self.hidden = self.forgotten = None
            if self._needs_mask and self._some_hidden():
                places_K = torch.arange(self.span, device=places.device)
                self.hidden = places_K > positions_BT[..., None]
                if places.block_table is not None and self._some_forgotten():
                    self.forgotten = self.hidden[:, -1]

    def _some_hidden(self) -> bool:
        """Not where every sequence has one new token, at the same place."""
        return self._problem.new_tokens > 1 or self._some_forgotten()

    def _some_forgotten(self) -> bool:
        """Whether places are read that lie behind the new tokens of a sequence."""
        return self._problem.cuda_graph or len(set(self._places.host_lengths)) > 1

    def rotate_heads(self, x_BHTD: Tensor) -> Tensor:
        """Heads of new tokens, rotated by their positions."""
        return self._rotate(x_BHTD, heads=True)

    def rotate_shared(self, x_BTD: Tensor) -> Tensor:
        """The part of a key that all heads share."""
        return self._rotate(x_BTD, heads=False)

    def _rotate(self, x: Tensor, *, heads: bool) -> Tensor:
        if self._rotary is None:
            return x
        cos, sin = (y.unsqueeze(1) if heads else y for y in (self._cos, self._sin))
        return rotate(x, cos, sin, interleaved=self._rotary.interleaved)


class PlainDecoder(Decoder):
    """Rotary on q, rotary on k, append, attend: one operation each."""

    def __init__(
        self, problem: DecodeProblem, cache: KeyValueCache, *, rotary: Rotary | None, scale: float
    ) -> None:
        self.problem = problem
        self.cache = cache
        self.scale = scale
        self.tokens = NewTokens(problem, cache, rotary)

    def plan(self) -> None:
        self.tokens.plan()

    def begin(self) -> None:
        self.tokens.begin()

    def __call__(self, layer: int, q: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
        with named_range("rotary_q"):
            q = self.tokens.rotate_heads(q)
        with named_range("rotary_k"):
            k_new = self.tokens.rotate_heads(k_new)
        with named_range("append"):
            k, v = k_new.transpose(1, 2), v_new.transpose(1, 2)
            self.cache.store(layer, self.tokens.slots, k, v)
        with named_range("attention"):
            k, v = self.cache.dense(layer, self.tokens.span, self.tokens.forgotten)
            return unpacked(self.attend(packed(q, k.shape[1]), k, v), q)

    def attend(self, q_BGRD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        """Attention of packed rows."""
        raise NotImplementedError

    def hidden_rows(self, rows_per_token: int) -> Tensor | None:
        """The mask of packed rows, [B, 1, R, K]; row r is of new token r mod T."""
        hidden = self.tokens.hidden
        if hidden is None:
            return None
        return hidden.repeat(1, rows_per_token, 1).unsqueeze(1)


class MatmulDecoder(PlainDecoder):
    """Scores, mask, softmax and values as separate kernels."""

    def attend(self, q_BGRD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        with named_range("scores"):
            scores = q_BGRD @ k_BGKD.mT * self.scale
        hidden = self.hidden_rows(q_BGRD.shape[2] // self.problem.new_tokens)
        if hidden is not None:
            with named_range("mask"):
                scores = scores.masked_fill(hidden, float("-inf"))
        with named_range("softmax"):
            wide = torch.promote_types(scores.dtype, torch.float32)
            probabilities = scores.softmax(dim=-1, dtype=wide).to(v_BGKD.dtype)
        with named_range("values"):
            return probabilities @ v_BGKD


def packed(q_BHTD: Tensor, num_kv_heads: int) -> Tensor:
    """The query heads of a group as rows: [B, G, (H / G) T, D]."""
    return q_BHTD.reshape(q_BHTD.shape[0], num_kv_heads, -1, q_BHTD.shape[-1])


def unpacked(o_BGRD: Tensor, q_BHTD: Tensor) -> Tensor:
    """Inverse of :func:`packed`."""
    batch_size, num_heads, num_tokens, _ = q_BHTD.shape
    return o_BGRD.reshape(batch_size, num_heads, num_tokens, o_BGRD.shape[-1])
