"""Decoding with PyTorch's scaled_dot_product_attention as the attention."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.caches.key_values import KeyValueCache
from kernels.decode.steps.operators import PlainDecoder
from kernels.decoding import DecodeProblem
from kernels.libraries.sdpa_operators import with_adjacent_entries
from kernels.rotary import Rotary


class SdpaDecoder(PlainDecoder):
    """One fused call after rotary and append; the query heads of a group are its rows."""

    def __init__(
        self,
        problem: DecodeProblem,
        cache: KeyValueCache,
        kernel: str | None,
        *,
        rotary: Rotary | None,
        scale: float,
    ) -> None:
        super().__init__(problem, cache, rotary=rotary, scale=scale)
        self._kernel = kernel

    def attend(self, q_BGRD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        hidden = self.hidden_rows(q_BGRD.shape[2] // self.problem.new_tokens)
        mask = None if hidden is None else hidden.logical_not()
        if self._kernel is not None:
            q_BGRD = with_adjacent_entries(q_BGRD)
        with self._kernels():
            return F.scaled_dot_product_attention(
                q_BGRD, k_BGKD, v_BGKD, attn_mask=mask, scale=self.scale
            )

    def _kernels(self) -> contextlib.AbstractContextManager[Any]:
        if self._kernel is None:
            return contextlib.nullcontext()
        return sdpa_kernel(getattr(SDPBackend, self._kernel))
