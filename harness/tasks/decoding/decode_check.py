"""The numeric check of ``task=decode``: all that a step gives, and all that it may write.

Of every layer and sequence: the output of all heads against float64 over the whole history, the
rows that were appended, and that no other row of the cache has changed, by a sum of its bits. Each
check leaves other new tokens behind, and other numbers in the places that they go to, so that the
next does not find the results of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.gate.comparison import Place
from harness.gate.decoding import attended, attended_latents, check_rows
from harness.gate.findings import Finding, worst
from harness.gate.scoring import Arithmetic
from harness.gate.tolerances import format_of
from harness.measure import check
from harness.tasks.decoding.decode_call import DecodeCall
from kernels.caches.key_values import next_slots
from kernels.rotary import Rotary, apply_rotary

BLOCK_ELEMENTS = 2**22
"""Elements of a cache whose bits are summed at once."""


class DecodeCheck:
    """Checks of one call's steps; :meth:`begin` comes before those at other lengths."""

    def __init__(self, case: Case, bench: Bench, call: DecodeCall, *, rounds_scores: bool) -> None:
        self._case, self._bench, self._call = case, bench, call
        self._format = format_of(case.precision.peak)
        # A cache holds the dtype that is computed in, which in TF32 is float32.
        self._careful = self._format.careful(rounds_scores=rounds_scores)
        self._sums: list[Tensor] = []

    def begin(self) -> None:
        """Note what the cache holds; called before the first step at these lengths."""
        self._sums = [bit_sums(storage) for storage in self._call.storages()]

    def check(self, outputs: list[Tensor]) -> None:
        """Hold the results of the last step to float64, and draw new tokens for the next.

        Raises WrongResult for an error beyond its tolerance.
        """
        with torch.no_grad(), check.one_thread():
            found = worst(self._findings(outputs))
        check.note(self._case, self._bench, found, factor=self._format.factor)
        self._renew()

    def _findings(self, outputs: list[Tensor]) -> Iterator[Finding]:
        yield self._kept()
        lengths = self._call.cache.places.host_lengths
        check_sequence = (
            self._check_latents if self._call.problem.is_latent else self._check_key_values
        )
        for layer, output in enumerate(outputs):
            for index, length in enumerate(lengths):
                yield from check_sequence(layer, index, length, output[index])

    def _kept(self) -> Finding:
        """Every row of every layer but those of new tokens, bit by bit."""
        first, second = next_slots(self._call.cache.places, self._call.problem.new_tokens)
        said, error = "the cache holds what it held", 0.0
        for number, (storage, before) in enumerate(
            zip(self._call.storages(), self._sums, strict=True)
        ):
            changed = bit_sums(storage) != before
            changed[first.cpu(), second.cpu()] = False
            if bool(changed.any()):
                block, inner = changed.nonzero()[0].tolist()
                layer = number % self._call.cache.shape.num_layers
                error = float("inf")
                said = (
                    f"a step has changed a row of the cache that is not a new token's: layer "
                    f"{layer}, {block}, {inner}"
                )
        return Finding(name="kept", error=error, tolerance=0.0, said=said)

    def _renew(self) -> None:
        """Other new tokens, and other numbers where they are appended, in place."""
        call = self._call
        for x in call.new_tokens():
            x.normal_()
        first, second = next_slots(call.cache.places, call.problem.new_tokens)
        for storage in call.storages():
            if storage.dim() == 4:
                storage[first, :, second] = torch.randn_like(storage[first, :, second])
            else:
                storage[first, second] = torch.randn_like(storage[first, second])

    def _check_key_values(
        self, layer: int, index: int, length: int, o_HTD: Tensor
    ) -> Iterator[Finding]:
        call = self._call
        q, k_new, v_new = (x[index] for x in call.inputs)
        k_all, v_all = call.cache.sequence(layer, index, length + call.problem.new_tokens)
        rotated = partial(self._rotated, length=length)

        def output(arithmetic: Arithmetic) -> Tensor:
            k, v = (arithmetic.wide(x[:, :length]) for x in (k_all, v_all))
            k = torch.cat((k, rotated(k_new, arithmetic)), dim=1)
            v = torch.cat((v, arithmetic.wide(v_new)), dim=1)
            return attended(rotated(q, arithmetic), k, v, call.scale, arithmetic)

        place = _place(layer, index)
        yield from self._rows("o", o_HTD, output, place)
        yield from self._rows(
            "appended_k", k_all[:, length:], lambda a: a.round(rotated(k_new, a)), place
        )
        yield from self._rows("appended_v", v_all[:, length:], lambda a: a.wide(v_new), place)

    def _check_latents(
        self, layer: int, index: int, length: int, o_HTD: Tensor
    ) -> Iterator[Finding]:
        call, inputs = self._call, self._call.inputs[0]
        rows_all = call.cache.sequence(layer, index, length + call.problem.new_tokens)

        def new_rows(arithmetic: Arithmetic) -> Tensor:
            rope = self._rotated(inputs.k_rope[index][None], arithmetic, length=length)[0]
            return torch.cat((arithmetic.wide(inputs.c_BTR[index]), arithmetic.round(rope)), dim=-1)

        def output(arithmetic: Arithmetic) -> Tensor:
            rows = torch.cat((arithmetic.wide(rows_all[:length]), new_rows(arithmetic)))
            q_rope = self._rotated(inputs.q_rope[index], arithmetic, length=length)
            return attended_latents(
                inputs.q_BHTD[index],
                q_rope,
                rows,
                inputs.up_k_HDR,
                inputs.up_v_HDR,
                call.scale,
                arithmetic,
            )

        place = _place(layer, index)
        yield from self._rows("o", o_HTD, output, place)
        yield from self._rows(
            "appended", rows_all[None, length:], lambda a: new_rows(a)[None], place
        )

    def _rows(
        self, name: str, got: Tensor, compute: Callable[[Arithmetic], Tensor], place: Place
    ) -> Iterator[Finding]:
        yield from check_rows(name, got, compute, self._careful, self._format, place)

    def _rotated(self, x_HTD: Tensor, arithmetic: Arithmetic, *, length: int) -> Tensor:
        """Heads of new tokens, rotated as those that follow ``length`` tokens."""
        x, rotary = arithmetic.wide(x_HTD), self._call.rotary
        if rotary is None:
            return x
        cos, sin = (arithmetic.wide(table) for table in (rotary.cos, rotary.sin))
        positions = torch.arange(length, length + x.shape[1], device=x.device)
        table = Rotary(cos, sin, rotary.interleaved)
        return apply_rotary(x[None], table, positions[None])[0]


def bit_sums(storage: Tensor) -> Tensor:
    """A weighted sum of the bits of each place of a cache's storage, over its heads as well.

    int64 [leading, inner], on the CPU. A place that has changed has another sum but for one chance
    in 2^63 or so.
    """
    kind = torch.int32 if storage.element_size() == 4 else torch.int16
    bits = storage.view(kind)
    if bits.dim() == 3:
        bits = bits.unsqueeze(1)
    shape = (bits.shape[1], 1, bits.shape[3])
    generator = torch.Generator().manual_seed(bits.shape[3])
    weights = torch.randint(-(2**62), 2**62, shape, generator=generator) * 2 + 1
    weights = weights.to(storage.device)
    inner = bits.shape[2]
    step = max(1, BLOCK_ELEMENTS // (shape[0] * shape[2]))
    return torch.cat(
        [
            torch.cat(
                [
                    (bits[leading, :, start : start + step].long() * weights).sum((0, 2))
                    for start in range(0, inner, step)
                ]
            )[None]
            for leading in range(bits.shape[0])
        ]
    ).cpu()


def _place(layer: int, index: int) -> Place:
    return lambda where: f"layer {layer}, sequence {index}, head {where[0]}"
