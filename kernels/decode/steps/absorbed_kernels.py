"""Steps of absorbed latent attention by this project's kernels, with few launches a layer.

A short step is bound by the host, which takes longer to launch a kernel than most of them take:
one kernel rotates and appends, two matmuls absorb W_k and W_v, and attention stands between
them. Nothing is computed once a step, and nothing is copied into another layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import decode
from kernels.caches.latents import LatentCache
from kernels.decoding import LatentDecoder, LatentInputs
from kernels.ranges import named_range
from kernels.rotary import Rotary


class AbsorbedKernelSteps(LatentDecoder):
    """Lengths and block table are read where they lie on the device."""

    def __init__(
        self,
        cache: LatentCache,
        *,
        rotary: Rotary | None,
        scale: float,
    ) -> None:
        self._cache = cache
        self._rotary = rotary
        self._scale = scale
        # Filled by each layer's append, with the same numbers.
        self._lengths_after = torch.empty_like(cache.places.lengths)

    def __call__(self, layer: int, inputs: LatentInputs) -> Tensor:
        places, latents = self._cache.places, self._cache.latents[layer]
        with named_range("rotary_append"):
            q_rope = decode.latent_append(
                inputs.q_rope,
                inputs.c_BTR,
                inputs.k_rope,
                latents,
                places.lengths,
                block_table=places.block_table,
                rotary=self._rotary,
                lengths_after=self._lengths_after,
            )
        with named_range("absorb_q"):
            q_BHTR = per_head_in_token_order(inputs.q_BHTD, inputs.up_k_HDR)
        with named_range("attention"):
            o_BHTR = decode.mla_decode(
                q_BHTR,
                q_rope,
                latents,
                # The new tokens included.
                self._lengths_after,
                block_table=places.block_table,
                scale=self._scale,
                # In the order of q_BHTR, which the next matmul takes as it is.
                out=torch.empty_like(q_BHTR),
            )
        with named_range("absorb_v"):
            return per_head_in_token_order(o_BHTR, inputs.up_v_HDR.mT)


def per_head_in_token_order(x_BHTI: Tensor, weights_HIO: Tensor) -> Tensor:
    """Each head's rows by its own matrix, [B, H, T, O], as one batched matmul over heads.

    Heads lie inside tokens, [B, T, H, O], as projections give and take them: where x does, or
    has one new token, neither x nor the result is copied. That of one new token is contiguous.
    Computes no gradient.
    """
    batch_size, num_heads, num_tokens, _ = x_BHTI.shape
    rows_HNI = x_BHTI.transpose(0, 1).reshape(num_heads, batch_size * num_tokens, -1)
    o_NHO = x_BHTI.new_empty(batch_size * num_tokens, num_heads, weights_HIO.shape[-1])
    with torch.no_grad():
        torch.bmm(rows_HNI, weights_HIO, out=o_NHO.transpose(0, 1))
    return o_NHO.unflatten(0, (batch_size, num_tokens)).transpose(1, 2)
