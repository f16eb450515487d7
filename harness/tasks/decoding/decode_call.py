"""The decoding step of ``task=decode``: its cache and inputs, and its numeric check.

The cache is random, also behind each sequence's last token, where a wrong mask would read it. The
check computes a few heads of a few sequences in float64 from the cache before the step, and
compares the new tokens in the cache after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.measure.check import require_accurate, worst_of
from kernels.backend import Decoding
from kernels.caches import CacheChoice, CacheShape
from kernels.decoding import DecodeProblem, LatentInputs, scale_of
from kernels.reference import relative_error
from kernels.rotary import Rotary, apply_rotary, rotary_table


class DecodeCall:
    """Steps of all layers of one cache, always with the same new tokens."""

    def __init__(
        self,
        problem: DecodeProblem,
        attention: Decoding,
        choice: CacheChoice,
        shape: CacheShape,
        lengths: Sequence[int],
        device: torch.device,
        *,
        seed: int,
    ) -> None:
        self.problem = problem
        self.scale = scale_of(problem)
        self.cache = choice.allocate(shape, device, seed=seed)
        for storage in self._storages():
            storage.normal_()
        self.cache.places.fill(lengths)
        self.cache.places.reserve(shape.max_len - max(lengths))
        width = problem.rope_head_dim if problem.is_latent else problem.head_dim
        self.rotary: Rotary | None = None
        if problem.rotary != "none":
            self.rotary = rotary_table(
                self.cache.places.capacity,
                width,
                interleaved=problem.rotary == "interleaved",
                device=device,
            )
        self._dtype, self._device = getattr(torch, problem.dtype), device
        self.inputs = self._latent_inputs() if problem.is_latent else self._inputs()
        self.decoder = attention.decoder(problem, self.cache, rotary=self.rotary, scale=self.scale)

    def _storages(self) -> list[Tensor]:
        if self.problem.is_latent:
            return list(self.cache.latents)
        return [*self.cache.keys, *self.cache.values]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _inputs(self) -> tuple[Any, ...]:
        problem = self.problem
        batch, new, dim = problem.batch_size, problem.new_tokens, problem.head_dim
        return (
            self._random(batch, problem.num_heads, new, dim),
            self._random(batch, problem.num_kv_heads, new, dim),
            self._random(batch, problem.num_kv_heads, new, dim),
        )

    def _latent_inputs(self) -> tuple[Any, ...]:
        problem = self.problem
        batch, new, heads = problem.batch_size, problem.new_tokens, problem.num_heads
        dim, rank, rope = problem.head_dim, problem.kv_lora_rank, problem.rope_head_dim
        inputs = LatentInputs(
            q_BHTD=self._random(batch, heads, new, dim),
            q_rope=self._random(batch, heads, new, rope),
            c_BTR=self._random(batch, new, rank),
            k_rope=self._random(batch, new, rope),
            # Scaled so that keys and values are as large as the latents.
            up_k_HDR=self._random(heads, dim, rank) * rank**-0.5,
            up_v_HDR=self._random(heads, dim, rank) * rank**-0.5,
        )
        return (inputs,)

    def step(self) -> list[Tensor]:
        """Output of every layer. Call :meth:`plan` before."""
        self.decoder.begin()
        layers = range(self.cache.shape.num_layers)
        return [self.decoder(layer, *self.inputs) for layer in layers]

    def plan(self) -> None:
        self.decoder.plan()

    def _checked(self) -> list[int]:
        """The last sequence, where a wrong stride would show, the longest and the shortest."""
        lengths = self.cache.places.host_lengths
        found = {len(lengths) - 1, lengths.index(max(lengths)), lengths.index(min(lengths))}
        return sorted(found)

    def _history(self) -> dict[int, Any]:
        """The last layer's cache of each sequence that is checked."""
        lengths, last = self.cache.places.host_lengths, self.cache.shape.num_layers - 1
        return {
            index: self.cache.sequence(last, index, lengths[index]) for index in self._checked()
        }

    def check(
        self, case: Case, bench: Bench, step: Callable[[], list[Tensor]], *, after_advance: bool
    ) -> None:
        """Compare ``step``, which makes this call, with float64.

        Args:
            after_advance: compare again at greater lengths, which a replayed graph has to read.

        Raises WrongResult for more than the number format's tolerance.
        """
        bench.stage("checking")
        found = self._errors(step)
        if after_advance:
            self.cache.places.advance(self.problem.new_tokens)
            found += self._errors(step)
            self.cache.places.rewind(self.problem.new_tokens)
        require_accurate(case, bench, worst_of(found))

    def _errors(self, step: Callable[[], list[Tensor]]) -> list[dict[str, float]]:
        """Relative errors of the last layer's output and cache, for each sequence checked."""
        compare = self._latent_errors if self.problem.is_latent else self._key_value_errors
        before = self._history()
        output = step()[-1]
        return [compare(output[index], index, kept) for index, kept in before.items()]

    def _rotated(self, x_HTD: Tensor, length: int) -> Tensor:
        """Heads of new tokens in float64, rotated as those that follow ``length`` tokens."""
        x_HTD = x_HTD.double()
        if self.rotary is None:
            return x_HTD
        wide = Rotary(self.rotary.cos.double(), self.rotary.sin.double(), self.rotary.interleaved)
        positions = torch.arange(length, length + x_HTD.shape[1], device=x_HTD.device)
        return apply_rotary(x_HTD.unsqueeze(0), wide, positions.unsqueeze(0))[0]

    def _key_value_errors(self, o_HTD: Tensor, index: int, kept: Any) -> dict[str, float]:
        problem, (k_GKD, v_GKD) = self.problem, kept
        length, new = k_GKD.shape[1], problem.new_tokens
        last = self.cache.shape.num_layers - 1
        q, k_new, v_new = (x[index] for x in self.inputs)
        k_new, v_new = self._rotated(k_new, length), v_new.double()
        k_after, v_after = self.cache.sequence(last, index, length + new)
        # The last group of heads.
        group = problem.num_heads // problem.num_kv_heads
        k_all = torch.cat((k_GKD[-1].double(), k_new[-1]))
        v_all = torch.cat((v_GKD[-1].double(), v_new[-1]))
        expected = attend_float64(self._rotated(q[-group:], length), k_all, v_all, scale=self.scale)
        return {
            "o": relative_error(o_HTD[-group:], expected),
            "appended_k": relative_error(k_after[:, length:], k_new),
            "appended_v": relative_error(v_after[:, length:], v_new),
            "kept": _unchanged((k_after[:, :length], k_GKD), (v_after[:, :length], v_GKD)),
        }

    def _latent_errors(self, o_HTD: Tensor, index: int, kept: Tensor) -> dict[str, float]:
        problem, inputs = self.problem, self.inputs[0]
        length, new, rank = kept.shape[0], problem.new_tokens, problem.kv_lora_rank
        last = self.cache.shape.num_layers - 1
        rope_new = self._rotated(inputs.k_rope[index].unsqueeze(0), length)[0]
        rows_new = torch.cat((inputs.c_BTR[index].double(), rope_new), dim=-1)
        after = self.cache.sequence(last, index, length + new)
        rows = torch.cat((kept.double(), rows_new))
        c_KR, rope_KD = rows[:, :rank], rows[:, rank:]
        q_rope = self._rotated(inputs.q_rope[index], length)
        worst = 0.0
        # Two heads: each has keys and values of its own for every token.
        for head in {0, problem.num_heads - 1}:
            k_KD = torch.cat((c_KR @ inputs.up_k_HDR[head].double().mT, rope_KD), dim=-1)
            v_KD = c_KR @ inputs.up_v_HDR[head].double().mT
            q_TD = torch.cat((inputs.q_BHTD[index, head].double(), q_rope[head]), dim=-1)
            expected = attend_float64(q_TD.unsqueeze(0), k_KD, v_KD, scale=self.scale)
            worst = max(worst, relative_error(o_HTD[head], expected[0]))
        return {
            "o": worst,
            "appended": relative_error(after[length:], rows_new),
            "kept": _unchanged((after[:length], kept)),
        }


def attend_float64(q_HTD: Tensor, k_KD: Tensor, v_KD: Tensor, *, scale: float) -> Tensor:
    """Causal attention of heads that share keys; the last T of K keys are the new tokens'."""
    scores = q_HTD @ k_KD.mT * scale
    num_new, num_keys = scores.shape[-2:]
    row = torch.arange(num_new, device=scores.device)[:, None]
    hidden = torch.arange(num_keys, device=scores.device) > row + num_keys - num_new
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v_KD


def _unchanged(*pairs: tuple[Tensor, Tensor]) -> float:
    """0 if the cache before the step is unchanged bit by bit, else infinity."""
    return 0.0 if all(torch.equal(after, before) for after, before in pairs) else float("inf")
