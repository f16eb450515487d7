"""Generating tokens with a cache: prefill of prompts, then one greedy step after another.

The weights are those of :class:`models.transformer.Transformer`, run block by block here, since
blocks attend to a cache: whole prompts are written into it, and each further token is one step
of a decoder (:mod:`kernels.decoding`), which rotates queries and keys itself. Shape suffixes as
there, and T for tokens of all prompts, end to end.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.backend import Attention, Decoding
from kernels.caches import CacheChoice
from kernels.decoding import LatentInputs, scale_of
from kernels.launching.graphs import GraphedStep
from kernels.problem import AttentionSpec, Packing
from kernels.rotary import rotary_table, rotate
from models.decoding import cache_shape, decode_problem
from models.latent_attention import LatentSelfAttention
from models.transformer import SelfAttention, Transformer
from models.variants import PLAIN, AttentionVariant


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompts:
    """Prompts end to end, and where each lies."""

    tokens_T: Tensor
    lengths: list[int]
    sequences_T: Tensor
    positions_T: Tensor
    ends_B: Tensor
    """Index of the last token of each prompt."""
    packing: Packing

    @classmethod
    def of(cls, prompts: Sequence[Tensor]) -> Prompts:
        """Raises ValueError for an empty prompt, which has no last token to go on from."""
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths, default=0) < 1:
            raise ValueError("prompts: each must have at least one token")
        device = prompts[0].device
        starts = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        return cls(
            tokens_T=torch.cat(list(prompts)),
            lengths=lengths,
            sequences_T=torch.repeat_interleave(
                torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
            ),
            positions_T=torch.cat([torch.arange(length, device=device) for length in lengths]),
            ends_B=cu_seqlens[1:].long() - 1,
            packing=Packing(
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_q_len=max(lengths),
                max_kv_len=max(lengths),
            ),
        )

    @property
    def equal(self) -> bool:
        """Whether they make a dense batch."""
        return len(set(self.lengths)) == 1


class Generator:
    """A model with a cache of its own.

    Args:
        decoding: attends from the cache, one token of each sequence at a time.
        prefill: attends to prompts; packed where their lengths differ.
        choice: the kind of cache; its dtype is what the projections give.
        max_len: tokens that each sequence has room for, prompt and generated.
        dtype: of keys and values.
        cuda_graph: capture the decoding step once and replay it; the batch is then static.

    Raises ValueError for what does not fit together, and for a window, a prefix, a cap of scores
    or sinks, of which steps from a cache know nothing.
    """

    def __init__(
        self,
        model: Transformer,
        decoding: Decoding,
        prefill: Attention,
        choice: CacheChoice,
        *,
        batch_size: int,
        max_len: int,
        dtype: str,
        cuda_graph: bool = False,
    ) -> None:
        config = model.config
        device = model.embedding.weight.device
        for variant in (model.variant, AttentionVariant(**prefill.mask_options())):
            if variant != PLAIN:
                raise ValueError(
                    f"{variant.words()}: steps from a cache attend to all tokens before them, "
                    "under a causal mask alone; leave it out"
                )
        if choice.is_latent != (config.kv_lora_rank is not None):
            kept = "keys and values" if config.kv_lora_rank is None else "latents"
            raise ValueError(f"cache={choice.name}: model={config.name} keeps {kept}")
        problem = decode_problem(
            config,
            batch_size=batch_size,
            max_len=max_len,
            dtype=dtype,
            device=device.type,
            block_size=choice.tokens_per_block,
            cuda_graph=cuda_graph,
        )
        reason = decoding.supports_decode(problem)
        if reason is not None:
            raise ValueError(f"attention={decoding.name}: {reason}")
        self.model = model
        self.cache = choice.allocate(
            cache_shape(config, batch_size=batch_size, max_len=max_len, dtype=dtype), device
        )
        self._prefill = prefill
        self._rotary = rotary_table(
            self.cache.places.capacity,
            config.rope_dim,
            theta=config.rope_theta,
            interleaved=True,
            device=device,
        )
        self._scale = scale_of(problem)
        self._decoder = decoding.decoder(
            problem, self.cache, rotary=self._rotary, scale=self._scale
        )
        self._cuda_graph = cuda_graph
        self._graph: GraphedStep | None = None

    @torch.no_grad()
    def prefill(self, prompts: Prompts) -> Tensor:
        """Clear the cache, read the prompts, and return logits_BV of the token after each.

        Raises ValueError, with the cache as it was, for prompts that do not fit.
        """
        places = self.cache.places
        if len(prompts.lengths) != places.batch_size:
            raise ValueError(
                f"prompts: {len(prompts.lengths)} for a cache of {places.batch_size} sequences"
            )
        longest = max(prompts.lengths)
        if longest > places.max_len:
            raise ValueError(
                f"cache is full: a prompt of {longest} tokens for max_len={places.max_len}"
            )
        places.clear()
        places.reserve(prompts.lengths)
        slots = places.slots(prompts.sequences_T, prompts.positions_T)
        tables = (self._rotary.cos, self._rotary.sin)
        angles = tuple(table[prompts.positions_T].unsqueeze(1) for table in tables)
        x_TE = self.model.embedding(prompts.tokens_T)
        for layer, block in enumerate(self.model.blocks):
            normed = block.attention_norm(x_TE)
            x_TE = x_TE + self._attend_prompts(
                layer, block.attention, normed, angles, slots, prompts
            )
            x_TE = x_TE + block.feed_forward(block.feed_forward_norm(x_TE))
        places.advance(prompts.lengths)
        last: Tensor = self.model.head(self.model.final_norm(x_TE[prompts.ends_B]))
        return last

    def _attend_prompts(
        self,
        layer: int,
        attention: SelfAttention | LatentSelfAttention,
        x_TE: Tensor,
        angles: tuple[Tensor, ...],
        slots: tuple[Tensor, Tensor],
        prompts: Prompts,
    ) -> Tensor:
        cos, sin = angles
        if isinstance(attention, LatentSelfAttention):
            c_TR, rope_TD = attention.compress(x_TE)
            rope_TD = rotate(rope_TD, cos.squeeze(1), sin.squeeze(1), interleaved=True)
            self.cache.store(layer, slots, torch.cat((c_TR, rope_TD), dim=-1))
            q_THD = attention.queries(x_TE, cos, sin)
            k_TGD, v_TGD = attention.expand(c_TR, rope_TD)
        else:
            q_THD, k_TGD, v_TGD = attention.heads(x_TE)
            q_THD = rotate(q_THD, cos, sin, interleaved=True)
            k_TGD = rotate(k_TGD, cos, sin, interleaved=True)
            self.cache.store(layer, slots, k_TGD, v_TGD)
        if prompts.equal:
            q, k, v = (
                x.unflatten(0, (len(prompts.lengths), -1)).transpose(1, 2)
                for x in (q_THD, k_TGD, v_TGD)
            )
            o = self._prefill.attend(q, k, v, AttentionSpec(causal=True, scale=self._scale))
            o_THD = o.transpose(1, 2).flatten(0, 1)
        else:
            spec = AttentionSpec(causal=True, scale=self._scale, packing=prompts.packing)
            o_THD = self._prefill.attend(q_THD, k_TGD, v_TGD, spec)
        output: Tensor = attention.o_proj(o_THD.flatten(-2))
        return output

    @torch.no_grad()
    def step(self, tokens_B: Tensor) -> Tensor:
        """Append one token to each sequence and return logits_BV of the next.

        With a CUDA graph the next call overwrites the result.

        Raises ValueError, with the cache as it was, if it is full or the batch is another.
        """
        places = self.cache.places
        if tokens_B.shape != (places.batch_size,):
            raise ValueError(
                f"tokens: {tuple(tokens_B.shape)} for a batch of {places.batch_size}; a dynamic "
                "batch needs a Generator of its size"
            )
        places.reserve(1)
        self._decoder.plan()
        if self._cuda_graph and self._graph is None:
            self._graph = GraphedStep(self._forward, tokens_B)
        run = self._forward if self._graph is None else self._graph
        logits_BV: Tensor = run(tokens_B)
        places.advance(1)
        return logits_BV

    def _forward(self, tokens_B: Tensor) -> Tensor:
        self._decoder.begin()
        x_BE = self.model.embedding(tokens_B)
        for layer, block in enumerate(self.model.blocks):
            x_BE = x_BE + self._attend_cache(layer, block.attention, block.attention_norm(x_BE))
            x_BE = x_BE + block.feed_forward(block.feed_forward_norm(x_BE))
        logits: Tensor = self.model.head(self.model.final_norm(x_BE))
        return logits

    def _attend_cache(
        self, layer: int, attention: SelfAttention | LatentSelfAttention, x_BE: Tensor
    ) -> Tensor:
        if isinstance(attention, LatentSelfAttention):
            inputs = _latent_inputs(attention, x_BE)
            o_BH1D = self._decoder(layer, inputs)
        else:
            # One token of each sequence: [B, H, D] is [B, H, 1, D].
            o_BH1D = self._decoder(layer, *(x.unsqueeze(2) for x in attention.heads(x_BE)))
        output: Tensor = attention.o_proj(o_BH1D.squeeze(2).flatten(-2))
        return output

    def generate(self, prompts: Sequence[Tensor], num_tokens: int) -> Tensor:
        """The most likely next tokens of each prompt, [B, num_tokens]."""
        tokens_B = self.prefill(Prompts.of(prompts)).argmax(dim=-1)
        found = [tokens_B]
        for _ in range(num_tokens - 1):
            tokens_B = self.step(tokens_B).argmax(dim=-1)
            found.append(tokens_B)
        return torch.stack(found, dim=1)


def _latent_inputs(attention: LatentSelfAttention, x_BE: Tensor) -> Any:
    q_BHD, q_rope = attention.unrotated_queries(x_BE)
    c_BR, k_rope = attention.compress(x_BE)
    up_k_HDR, up_v_HDR = attention.up_projections()
    return LatentInputs(
        q_BHTD=q_BHD.unsqueeze(2),
        q_rope=q_rope.unsqueeze(2),
        c_BTR=c_BR.unsqueeze(1),
        k_rope=k_rope.unsqueeze(1),
        up_k_HDR=up_k_HDR.to(c_BR.dtype),
        up_v_HDR=up_v_HDR.to(c_BR.dtype),
    )
