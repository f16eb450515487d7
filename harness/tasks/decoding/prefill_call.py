"""One pass of prompts through rotary embedding, into a cache, and through attention.

Packed, prompts of different lengths lie end to end; padded, each is as long as the longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.bench.outcome import WrongResult
from harness.cases.case import Case
from harness.gate.tolerances import format_of
from harness.measure.attention_calls import self_attention_packing, sequences_of
from harness.measure.check import check_parts
from kernels import Attention, AttentionProblem, AttentionSpec
from kernels.caches import CacheChoice, CacheShape
from kernels.ranges import named_range
from kernels.rotary import rotary_table, rotate

Phase = Callable[[str], AbstractContextManager[None]]


class PrefillCall:
    """Prompts of given lengths, through ``num_layers`` layers.

    Args:
        problem: packed, or dense for prompts padded to the longest.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        attention: Attention,
        choice: CacheChoice,
        lengths: Sequence[int],
        device: torch.device,
        *,
        rotary: str,
        num_layers: int = 1,
    ) -> None:
        self.problem = problem
        self._attention = attention
        self._lengths = list(lengths)
        longest = max(lengths)
        held = self._lengths if problem.packed else [longest] * len(self._lengths)
        shape = CacheShape(
            num_layers=num_layers,
            batch_size=len(held),
            max_len=longest,
            num_kv_heads=problem.num_kv_heads,
            head_dim=problem.head_dim,
            dtype=problem.dtype,
        )
        self.cache = choice.allocate(shape, device)
        self.cache.places.reserve(held)
        self._starts = [0, *itertools.accumulate(held)]
        self._packing = self_attention_packing(held, device)
        sequences = torch.repeat_interleave(
            torch.arange(len(held), device=device), torch.tensor(held, device=device)
        )
        self._positions = torch.cat([torch.arange(length, device=device) for length in held])
        self._slots = self.cache.places.slots(sequences, self._positions)
        self._rotary = None
        if rotary != "none":
            self._rotary = rotary_table(
                longest, problem.head_dim, interleaved=rotary == "interleaved", device=device
            )
        dtype = getattr(torch, problem.dtype)

        def tensor(heads: int) -> Tensor:
            size = (self._starts[-1], heads, problem.head_dim)
            return torch.randn(size, dtype=dtype, device=device)

        self.inputs = (
            tensor(problem.num_heads),
            tensor(problem.num_kv_heads),
            tensor(problem.num_kv_heads),
        )

    def step(self, phase: Phase = lambda name: nullcontext()) -> Tensor:
        """The last layer's output, [tokens, H, D], padding included."""
        o = self.inputs[0]
        for layer in range(self.cache.shape.num_layers):
            q_THD, k_TGD, v_TGD = self._rotated()
            with named_range("append"):
                self.cache.store(layer, self._slots, k_TGD, v_TGD)
            with phase("attention"), named_range("attention"):
                o = self._attend(q_THD, k_TGD, v_TGD)
        return o

    def _rotated(self) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_TGD, v_TGD = self.inputs
        if self._rotary is None:
            return q_THD, k_TGD, v_TGD
        cos, sin = (
            table[self._positions].unsqueeze(1) for table in (self._rotary.cos, self._rotary.sin)
        )
        with named_range("rotary_q"):
            q_THD = rotate(q_THD, cos, sin, interleaved=self._rotary.interleaved)
        with named_range("rotary_k"):
            k_TGD = rotate(k_TGD, cos, sin, interleaved=self._rotary.interleaved)
        return q_THD, k_TGD, v_TGD

    def _attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        packing = self._packing if self.problem.packed else None
        spec = AttentionSpec(causal=True, scale=self.problem.head_dim**-0.5, packing=packing)
        if packing is not None:
            return self._attention.attend(q_THD, k_TGD, v_TGD, spec)
        q, k, v = (
            x.unflatten(0, (len(self._lengths), -1)).transpose(1, 2) for x in (q_THD, k_TGD, v_TGD)
        )
        o = self._attention.attend(q, k, v, spec)
        return o.transpose(1, 2).flatten(0, 1)

    def check(self, case: Case, bench: Bench) -> None:
        """Compare all prompts with float64, and their keys and values with those in the cache.

        Raises WrongResult for an error beyond its tolerance.
        """
        bench.stage("checking")
        self.check_results(case, bench, self.step(), draw=0)

    def check_results(self, case: Case, bench: Bench, o_THD: Tensor, *, draw: int) -> None:
        """:meth:`check` for the output of a step; each ``draw`` compares other rows."""
        q_THD, k_TGD, v_TGD = self._rotated()
        self._require_rotation(case, q_THD, k_TGD)
        spec = AttentionSpec(causal=True, scale=self.problem.head_dim**-0.5)
        parts = []
        for index, (start, length) in enumerate(zip(self._starts, self._lengths, strict=False)):
            prompt = {"q": q_THD, "k": k_TGD, "v": v_TGD, "o": o_THD}
            # Without its padding.
            prompt = {name: x[start : start + length] for name, x in prompt.items()}
            rounds_scores = self._attention.rounds_scores(self.problem)
            (part,) = sequences_of(prompt, [0, length], spec, rounds_scores=rounds_scores)
            part.sequence = index
            parts.append(part)
            k, v = part.tensors["k"][0], part.tensors["v"][0]
            for layer in range(self.cache.shape.num_layers):
                k_kept, v_kept = self.cache.sequence(layer, index, length)
                if not (torch.equal(k_kept, k) and torch.equal(v_kept, v)):
                    raise WrongResult(
                        f"the cache does not hold what prompt {index} has appended in layer {layer}"
                    )
        check_parts(case, bench, parts, draw=draw, prefix="prefill_")

    def _require_rotation(self, case: Case, q_THD: Tensor, k_TGD: Tensor) -> None:
        """Raise WrongResult unless every token is turned as by complex numbers in float64."""
        if self._rotary is None:
            return
        cos, sin = (table[self._positions].double() for table in self._rotary[:2])
        turns = torch.complex(cos, sin).unsqueeze(1)
        number_format = format_of(case.precision.peak)
        for name, got, x in (("q", q_THD, self.inputs[0]), ("k", k_TGD, self.inputs[1])):
            expected = _in_pairs(x, interleaved=self._rotary.interleaved) * turns
            off = _in_pairs(got, interleaved=self._rotary.interleaved) - expected
            error = float((off.norm(dim=-1) / expected.norm(dim=-1)).max())
            tolerance = number_format.factor * 2 * number_format.least
            if not error <= tolerance:
                raise WrongResult(
                    f"rotated {name} is off by {error:.2g} in a token; {number_format.name} "
                    f"should stay under {tolerance:.2g}"
                )


def _in_pairs(x: Tensor, *, interleaved: bool) -> Tensor:
    """Features that are rotated together as complex numbers, [..., D / 2]."""
    wide = x.double()
    if interleaved:
        return torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    return torch.complex(*wide.chunk(2, dim=-1))
