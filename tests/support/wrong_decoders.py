"""Decoders with a planted fault each, as choices of ``attention=``: ``wrong_decoder_NAME``.

They are PyTorch's operators, which are right, with something done to what they read, to what they
give or to the cache. Calls of a layer are counted from the first of a case.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import BACKENDS, attention_backend
from kernels.backends.standard import Standard
from kernels.decode.steps.operators import MatmulDecoder
from kernels.decoding import DecodeProblem
from kernels.rotary import Rotary

SOUND_CALLS = 2
"""Calls of a layer before the passes that are measured."""

PAGE = 16


class PlantedDecoder(MatmulDecoder):
    """Right but for its fault."""

    fault = "none"
    calls = 0
    earlier: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k_new: Tensor, v_new: Tensor) -> Tensor:
        number = self.calls // self.cache.shape.num_layers
        self.calls += 1
        if self.fault in BEFORE:
            q, k_new, v_new = BEFORE[self.fault](self, number, q, k_new, v_new)
        o = super().__call__(layer, q, k_new, v_new)
        if self.fault in AFTER:
            AFTER[self.fault](self, number, layer, o)
        return o

    def hidden_rows(self, rows_per_token: int) -> Tensor | None:
        hidden = super().hidden_rows(rows_per_token)
        if self.fault in HIDDEN:
            batch, span = self.cache.places.batch_size, self.tokens.span
            rows = rows_per_token * self.problem.new_tokens
            if hidden is None:
                hidden = torch.zeros(batch, 1, rows, span, dtype=torch.bool)
            hidden = hidden.clone()
            HIDDEN[self.fault](self, hidden)
        return hidden

    def attend(self, q_BGRD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor) -> Tensor:
        if self.fault != "split_merge_without_lse":
            return super().attend(q_BGRD, k_BGKD, v_BGKD)
        # Two halves of the keys, of which each counts the same.
        half = k_BGKD.shape[2] // 2
        hidden = self.hidden_rows(q_BGRD.shape[2] // self.problem.new_tokens)
        parts = []
        for keys in (slice(0, half), slice(half, None)):
            scores = (q_BGRD @ k_BGKD[:, :, keys].mT).float() * self.scale
            if hidden is not None:
                scores = scores.masked_fill(hidden[..., keys], -1e30)
            parts.append(scores.softmax(-1).to(v_BGKD.dtype) @ v_BGKD[:, :, keys])
        return (parts[0] + parts[1]) / 2

    @property
    def last_positions(self) -> Tensor:
        return self.cache.places.lengths.long() + self.problem.new_tokens - 1


Before = Callable[[PlantedDecoder, int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
BEFORE: dict[str, Before] = {}
AFTER: dict[str, Callable[[PlantedDecoder, int, int, Tensor], None]] = {}
HIDDEN: dict[str, Callable[[PlantedDecoder, Tensor], None]] = {}


def first_page_ignored(decoder: PlantedDecoder, hidden: Tensor) -> None:
    hidden[..., :PAGE] = True


def first_key_ignored_in_one_sequence(decoder: PlantedDecoder, hidden: Tensor) -> None:
    hidden[1, ..., 0] = True


def last_key_dropped(decoder: PlantedDecoder, hidden: Tensor) -> None:
    for sequence, position in enumerate(decoder.last_positions.tolist()):
        hidden[sequence, ..., position] = True


def one_key_too_many(decoder: PlantedDecoder, hidden: Tensor) -> None:
    for sequence, position in enumerate(decoder.last_positions.tolist()):
        hidden[sequence, ..., position + 1 : position + 2] = False


def key_in_the_middle_dropped(decoder: PlantedDecoder, hidden: Tensor) -> None:
    hidden[2, ..., 37] = True


HIDDEN |= {
    function.__name__: function
    for function in (
        first_page_ignored,
        first_key_ignored_in_one_sequence,
        last_key_dropped,
        one_key_too_many,
        key_in_the_middle_dropped,
    )
}


def spoils(function: Callable[[PlantedDecoder, int, int, Tensor], None]) -> None:
    AFTER[function.__name__] = function


@spoils
def two_sequences_swapped(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    o[:2] = o[:2].flip(0).clone()


@spoils
def two_heads_swapped(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    o[0, :2] = o[0, :2].flip(0).clone()


@spoils
def nan_in_one_head(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    o[1, 1, 0, 3] = math.nan


@spoils
def first_layer_by_3_percent(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    if layer == 0:
        o *= 1.03


@spoils
def last_sequence_by_5_percent(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    o[-1] *= 0.95


@spoils
def only_after_the_check(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    if number >= SOUND_CALLS:
        o *= 1.5


@spoils
def stale_output(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    """That of the first call, from the second on."""
    if decoder.earlier is None:
        decoder.earlier = o.clone()
    elif layer == decoder.cache.shape.num_layers - 1:
        o.copy_(decoder.earlier)


@spoils
def history_written(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    first, second = decoder.cache.places.of_sequence(1, 20)
    decoder.cache.values[0][first[3], 0, second[3]] += 0.5


@spoils
def key_written_behind_the_last(
    decoder: PlantedDecoder, number: int, layer: int, o: Tensor
) -> None:
    position = int(decoder.last_positions.min())
    index = int(decoder.last_positions.argmin())
    first, second = decoder.cache.places.of_sequence(index, position + 2)
    decoder.cache.keys[layer][first[-1], :, second[-1]] = 0.0


@spoils
def stale_row(decoder: PlantedDecoder, number: int, layer: int, o: Tensor) -> None:
    """One head's new key in the cache is an old one, after the output was right."""
    first, second = decoder.tokens.slots
    decoder.cache.keys[layer][first, 0, second] = decoder.cache.keys[layer][first, 0, second - 1]


@spoils
def appended_rows_of_two_sequences_swapped(
    decoder: PlantedDecoder, number: int, layer: int, o: Tensor
) -> None:
    first, second = decoder.tokens.slots
    rows = decoder.cache.values[layer][first, :, second].clone()
    rows[:2] = rows[:2].flip(0)
    decoder.cache.values[layer][first, :, second] = rows


def rotary_offset_after_some_steps(
    decoder: PlantedDecoder, number: int, q: Tensor, k_new: Tensor, v_new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if number == SOUND_CALLS:
        rotary = decoder.tokens._rotary
        assert rotary is not None
        decoder.tokens._rotary = Rotary(
            rotary.cos.roll(-1, 0), rotary.sin.roll(-1, 0), rotary.interleaved
        )
        decoder.tokens.begin()
    return q, k_new, v_new


def query_not_rotated(
    decoder: PlantedDecoder, number: int, q: Tensor, k_new: Tensor, v_new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q = q.clone()
    q[:, 0] = q[:, 0].roll(1, -1)
    return q, k_new, v_new


def scale_by_5_percent(
    decoder: PlantedDecoder, number: int, q: Tensor, k_new: Tensor, v_new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return 1.05 * q, k_new, v_new


def not_appended_any_more(
    decoder: PlantedDecoder, number: int, q: Tensor, k_new: Tensor, v_new: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the measured passes on, the tokens of the step before stay."""
    if number < SOUND_CALLS:
        decoder.earlier = torch.stack((k_new, v_new)).clone()
    else:
        assert decoder.earlier is not None
        k_new, v_new = decoder.earlier
    return q, k_new, v_new


BEFORE |= {
    function.__name__: function
    for function in (
        rotary_offset_after_some_steps,
        query_not_rotated,
        scale_by_5_percent,
        not_appended_any_more,
    )
}

FAULTS = (*HIDDEN, *AFTER, *BEFORE, "split_merge_without_lse")


@dataclass(kw_only=True, slots=True)
class Planted(Standard):
    """Decoding that is right but for its fault."""

    fault: str = "none"

    def decoder(
        self, problem: DecodeProblem, cache: Any, *, rotary: Rotary | None, scale: float
    ) -> MatmulDecoder:
        made = PlantedDecoder(problem, cache, rotary=rotary, scale=scale)
        made.fault = self.fault
        return made


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Have them among the choices; other tests go over all that there are."""
    names = [f"wrong_decoder_{fault}" for fault in ("none", *FAULTS)]
    for name in names:
        attention_backend(name, fault=name.removeprefix("wrong_decoder_"))(Planted)
    try:
        yield
    finally:
        for name in names:
            del BACKENDS._entries[name]
