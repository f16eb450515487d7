"""The numeric check of ``task=generate``: a whole generation beside the model without a cache.

The model reads each prompt and all tokens that were generated for it at once, in the case's number
formats and with attention by its definition (teacher forcing). Every row of every layer's cache,
the logits and the choice of every token are compared with it. How far apart two sound computations
may be follows from the same forward pass in float64, on the first tokens of one sequence.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.gate.findings import Finding, number, worst
from harness.gate.tolerances import Format, format_of
from harness.measure import check, plain_attention
from kernels.caches.latents import LatentCache
from models.generation import Generator
from models.latent_attention import LatentSelfAttention
from models.layers import rotary_table, rotate
from models.transformer import SelfAttention, Transformer

EXACT_TOKENS = {"cpu": 128, "cuda": 1024}
"""Tokens of the float64 forward pass."""

ROW = 2.0
"""A row of a long sequence may be so many times as wrong as one of the first tokens."""

OF_CHOICE = 8.0
"""How many times the root mean square error of logits two of them may differ by."""


@dataclass(kw_only=True, slots=True)
class Generated:
    """What a generation gave, for the check; a slot that each pass empties as it begins."""

    tokens: list[Tensor] = field(default_factory=list)
    """[B] of each step; the prefill gives the first."""
    logits: dict[int, Tensor] = field(default_factory=dict)
    """[B, V] of some steps by their number."""

    def clear(self) -> None:
        self.tokens.clear()
        self.logits.clear()

    def add(self, logits_BV: Tensor, tokens_B: Tensor, *, keep: bool) -> None:
        """One more token of each sequence; a CUDA graph overwrites its logits with the next."""
        if keep:
            self.logits[len(self.tokens)] = logits_BV.clone()
        self.tokens.append(tokens_B.clone())


@dataclass(kw_only=True, slots=True)
class _Forward:
    """A forward pass over one sequence."""

    rows: list[Tensor]
    """Of each layer, what a cache keeps of each token, [S, elements]."""
    logits_SV: Tensor
    """From the asked position on."""


class GenerationCheck:
    """Checks of a generator's passes over the same prompts."""

    def __init__(
        self,
        case: Case,
        bench: Bench,
        model: Transformer,
        generator: Generator,
        prompts: Sequence[Tensor],
    ) -> None:
        self._case, self._bench, self._model = case, bench, model
        self._generator, self._prompts = generator, prompts
        self._format: Format = format_of(case.precision.peak)

    @torch.no_grad()
    def check(self, made: Generated) -> None:
        """Hold a generation, whose tokens the generator's cache holds, to the model without one.

        Raises WrongResult for an error beyond its tolerance.
        """
        with check.one_thread(), _plain(self._model):
            found = worst(self._findings(made))
        check.note(self._case, self._bench, found, factor=self._format.factor)

    def _findings(self, made: Generated) -> Iterator[Finding]:
        tokens_BT = torch.stack(made.tokens, dim=1)
        lengths = self._generator.cache.places.host_lengths
        wholes = [
            torch.cat((prompt, tokens_T))[:length]
            for prompt, tokens_T, length in zip(self._prompts, tokens_BT, lengths, strict=True)
        ]
        reached_rows, reached_logits = self._reached(wholes[0])
        for index, whole in enumerate(wholes):
            first = len(self._prompts[index]) - 1
            expected = self._forward(whole, first)
            for layer, right in enumerate(expected.rows):
                got = _kept_rows(self._generator, layer, index, len(whole))
                error, row = _worst_row(got, right)
                yield Finding(
                    name="cache rows",
                    error=error,
                    tolerance=ROW * self._format.factor * reached_rows[layer],
                    said=f"relative error of token {row} of sequence {index} in the cache of layer "
                    f"{layer} against the model without a cache is {error:.2g}",
                )
            yield from self._logits(made, index, expected.logits_SV, reached_logits)
            yield self._choices(tokens_BT[index], index, expected.logits_SV, reached_logits)

    def _logits(
        self, made: Generated, index: int, right_SV: Tensor, reached: float
    ) -> Iterator[Finding]:
        for step, logits_BV in made.logits.items():
            error, _ = _worst_row(logits_BV[index][None], right_SV[step][None])
            yield Finding(
                name="logits",
                error=error,
                tolerance=ROW * self._format.factor * reached,
                said=f"relative error of logits against the model without a cache is {error:.2g} "
                f"in sequence {index}, token {step}",
            )

    def _choices(self, tokens_T: Tensor, index: int, right_SV: Tensor, reached: float) -> Finding:
        """By how much the logit of each token is below the largest."""
        rows = right_SV[: len(tokens_T)].double()
        chosen = rows.gather(1, tokens_T[: len(rows), None]).squeeze(1)
        size = rows.square().mean(1).sqrt()
        below = ((rows.amax(1) - chosen) / size).nan_to_num(nan=torch.inf)
        step = int(below.argmax())
        error = number(float(below[step]))
        return Finding(
            name="token choice",
            error=error,
            tolerance=OF_CHOICE * ROW * self._format.factor * reached,
            said=f"the logit of token {step} of sequence {index} is below the largest of the model "
            f"without a cache by {error:.2g} of their root mean square",
        )

    def _reached(self, tokens_S: Tensor) -> tuple[list[float], float]:
        """Relative errors of rows by layer, and of logits, between two sound computations."""
        some = tokens_S[: EXACT_TOKENS[self._bench.device.type]]
        careful, exact = self._forward(some, 0), self._forward(some, 0, exact=True)
        least = self._format.least
        rows = [
            max(least, _worst_row(one, other)[0])
            for one, other in zip(careful.rows, exact.rows, strict=True)
        ]
        return rows, max(least, _worst_row(careful.logits_SV, exact.logits_SV)[0])

    def _forward(self, tokens_S: Tensor, first: int, *, exact: bool = False) -> _Forward:
        """The model over whole sequences; logits from position ``first`` on."""
        model, config = self._model, self._model.config
        off = torch.autocast(self._bench.device.type, enabled=False)
        with off if exact else contextlib.nullcontext():
            x = model.embedding(tokens_S)[None]
            positions = torch.arange(len(tokens_S), device=x.device)
            angles = rotary_table(positions, config.rope_dim, config.rope_theta, torch.float32)
            if exact:
                x, angles = x.double(), (angles[0].double(), angles[1].double())
            rows = []
            for layer in model.blocks:
                block = copy.deepcopy(layer).double() if exact else layer
                rows.append(_rows_of(block.attention, block.attention_norm(x), *angles))
                x = block(x, *angles)
            norm, head = (
                copy.deepcopy(part).double() if exact else part
                for part in (model.final_norm, model.head)
            )
            return _Forward(rows=rows, logits_SV=head(norm(x[:, first:]))[0])


def _rows_of(
    attention: SelfAttention | LatentSelfAttention, x_1SE: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """What a cache keeps of each token: rotated keys and values, or the latent; [S, elements]."""
    if isinstance(attention, LatentSelfAttention):
        c, rope = attention.compress(x_1SE)
        rope = rotate(rope, cos.squeeze(-2), sin.squeeze(-2))
        return torch.cat((c, rope), dim=-1)[0]
    _, k, v = attention.heads(x_1SE)
    return torch.cat((rotate(k, cos, sin).flatten(2), v.flatten(2)), dim=-1)[0]


def _kept_rows(generator: Generator, layer: int, index: int, length: int) -> Tensor:
    """The same from the generator's cache."""
    kept = generator.cache.sequence(layer, index, length)
    if isinstance(generator.cache, LatentCache):
        return kept
    k_GSD, v_GSD = kept
    return torch.cat((k_GSD.transpose(0, 1).flatten(1), v_GSD.transpose(0, 1).flatten(1)), dim=-1)


def _worst_row(got: Tensor, right: Tensor) -> tuple[float, int]:
    """The largest relative error of a row, and which."""
    right = right.double()
    errors = (got.double() - right).norm(dim=-1) / right.norm(dim=-1)
    errors = errors.nan_to_num(nan=torch.inf)
    row = int(errors.argmax())
    return number(float(errors[row])), row


@contextlib.contextmanager
def _plain(model: Transformer) -> Iterator[None]:
    """Have the model attend by definition."""
    before = [block.attention.attention for block in model.blocks]
    for block in model.blocks:
        block.attention.attention = plain_attention.PlainAttention()
    try:
        yield
    finally:
        for block, attention in zip(model.blocks, before, strict=True):
            block.attention.attention = attention
