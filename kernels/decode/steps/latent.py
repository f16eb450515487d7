"""Steps of latent attention, absorbed and materialised."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.caches.latents import LatentCache
from kernels.decode.steps.operators import NewTokens
from kernels.decoding import DecodeProblem, LatentDecoder, LatentInputs
from kernels.ranges import named_range
from kernels.rotary import Rotary


class LatentSteps(LatentDecoder):
    """Rotary and append, which both ways have in common."""

    needs_mask = True

    def __init__(
        self, problem: DecodeProblem, cache: LatentCache, *, rotary: Rotary | None, scale: float
    ) -> None:
        self.problem = problem
        self.cache = cache
        self.scale = scale
        self.tokens = NewTokens(problem, cache, rotary, needs_mask=self.needs_mask)

    def plan(self) -> None:
        self.tokens.plan()

    def begin(self) -> None:
        self.tokens.begin()

    def __call__(self, layer: int, inputs: LatentInputs) -> Tensor:
        with named_range("rotary_q"):
            q_rope = self.tokens.rotate_heads(inputs.q_rope)
        with named_range("rotary_k"):
            k_rope = self.tokens.rotate_shared(inputs.k_rope)
        with named_range("append"):
            rows = torch.cat((inputs.c_BTR, k_rope), dim=-1)
            self.cache.store(layer, self.tokens.slots, rows)
        return self.attend(layer, inputs, q_rope)

    def attend(self, layer: int, inputs: LatentInputs, q_rope: Tensor) -> Tensor:
        raise NotImplementedError

    def probabilities(self, scores: Tensor, dtype: torch.dtype, *, heads_dim: int) -> Tensor:
        """Softmax over the tokens that each new one sees, in float32.

        Args:
            scores: of batch, heads, new tokens and keys; ``heads_dim`` says where the heads are.
        """
        with named_range("softmax"):
            if self.tokens.hidden is not None:
                hidden = self.tokens.hidden.unsqueeze(heads_dim)
                scores = scores.masked_fill(hidden, float("-inf"))
            wide = torch.promote_types(scores.dtype, torch.float32)
            return scores.softmax(dim=-1, dtype=wide).to(dtype)


class MaterialisedSteps(LatentSteps):
    """Keys and values of all heads and all tokens, up-projected at every step.

    Heads come before the batch here: one matmul for each head over the tokens of all sequences
    gives [H, B, K, D], which nothing has to copy.
    """

    def attend(self, layer: int, inputs: LatentInputs, q_rope: Tensor) -> Tensor:
        latents_BKC = self.cache.dense(layer, self.tokens.span, self.tokens.forgotten)
        c_BKR, rope_BKD = latents_BKC.split(
            (self.problem.kv_lora_rank, self.problem.rope_head_dim), dim=-1
        )
        with named_range("up_projection"):
            k_HBKD = up_projected(c_BKR, inputs.up_k_HDR)
            v_HBKD = up_projected(c_BKR, inputs.up_v_HDR)
        with named_range("scores"):
            # The rotary part is one for all heads, which are rows of one matmul a sequence.
            shared = q_rope.flatten(1, 2) @ rope_BKD.mT
            shared_BHTK = shared.unflatten(1, q_rope.shape[1:3])
            scores = inputs.q_BHTD.transpose(0, 1) @ k_HBKD.mT + shared_BHTK.transpose(0, 1)
            scores = scores * self.scale
        probabilities = self.probabilities(scores, v_HBKD.dtype, heads_dim=0)
        with named_range("values"):
            return (probabilities @ v_HBKD).transpose(0, 1)


class AbsorbedSteps(LatentSteps):
    """W_k applied to the query and W_v to the result; the cache is read as it is."""

    def attend(self, layer: int, inputs: LatentInputs, q_rope: Tensor) -> Tensor:
        with named_range("absorb_q"):
            # As H matmuls of [B T, D] by [D, R]: the weights are read once.
            q_latent = per_head(inputs.q_BHTD, inputs.up_k_HDR)
        with named_range("attention"):
            o_latent = self.attend_latents(layer, q_latent, q_rope)
        with named_range("absorb_v"):
            return per_head(o_latent, inputs.up_v_HDR.mT)

    def attend_latents(self, layer: int, q_BHTR: Tensor, q_rope: Tensor) -> Tensor:
        """o_BHTR, by PyTorch's operators."""
        latents_BKC = self.cache.dense(layer, self.tokens.span, self.tokens.forgotten)
        rows = torch.cat((q_BHTR, q_rope), dim=-1)
        with named_range("scores"):
            # All heads and new tokens are rows of one matmul a sequence.
            scores = rows.flatten(1, 2) @ latents_BKC.mT * self.scale
        scores_BHTK = scores.unflatten(1, rows.shape[1:3])
        probabilities = self.probabilities(scores_BHTK, latents_BKC.dtype, heads_dim=1)
        with named_range("values"):
            c_BKR = latents_BKC[..., : self.problem.kv_lora_rank]
            o = probabilities.flatten(1, 2) @ c_BKR
        return o.unflatten(1, rows.shape[1:3])


def up_projected(c_BKR: Tensor, weights_HDR: Tensor) -> Tensor:
    """Keys or values of all heads, [H, B, K, D]; latents are read by each head, and not copied."""
    rows_NR = c_BKR.flatten(0, 1)
    rows_HNR = rows_NR.expand(weights_HDR.shape[0], *rows_NR.shape)
    return torch.bmm(rows_HNR, weights_HDR.mT).unflatten(1, c_BKR.shape[:2])


def per_head(x_BHTI: Tensor, weights_HIO: Tensor) -> Tensor:
    """Each head's rows by its own matrix, [B, H, T, O], as one batched matmul over heads."""
    batch_size, num_heads, num_tokens, _ = x_BHTI.shape
    rows_HNI = x_BHTI.transpose(0, 1).reshape(num_heads, batch_size * num_tokens, -1)
    return (rows_HNI @ weights_HIO).unflatten(1, (batch_size, num_tokens)).transpose(0, 1)
