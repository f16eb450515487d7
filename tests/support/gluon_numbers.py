"""Parts of the Hopper forward kernel that compute, run from their source on PyTorch's tensors.

:mod:`gluon_model` runs the same source without numbers. Layouts, which say which thread has which
number, are nothing here.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from gluon_model import ANYTHING, Place, load, tile_names
from torch import Tensor

HEXADECIMAL = {"0f00000000": 0.0, "0fFF800000": -torch.inf}


class Language:
    """``gl`` for integers and float64."""

    int32, float32 = torch.int32, torch.float32
    exp2, log2 = torch.exp2, torch.log2
    abs = staticmethod(abs)
    static_range = range
    SliceLayout = ANYTHING

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    # Of a number and none the hardware, unless asked, takes the number.

    def minimum(self, a: Any, b: Any) -> Any:
        return _of(torch.fmin, min, a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        return _of(torch.fmax, max, a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return (
            (a if condition else b) if isinstance(condition, bool) else torch.where(condition, a, b)
        )

    def arange(self, start: int, stop: int, _: Any) -> Tensor:
        return torch.arange(start, stop)

    def full(self, shape: list[int], value: int, dtype: torch.dtype, _: Any) -> Tensor:
        return torch.full(shape, value, dtype=dtype)

    def load(self, place: Place) -> int:
        return place.numbers[place.offset]

    def convert_layout(self, x: Tensor, _: Any) -> Tensor:
        return x

    def inline_asm_elementwise(self, asm: str, _: str, args: list[Tensor], **__: Any) -> Tensor:
        """Comparisons of integers, and one choice between a constant and a number."""
        hidden = torch.zeros(1, dtype=torch.bool)
        for statement in asm.strip("{}").split(";"):
            name, *words = statement.replace(",", " ").split() or [".reg"]
            values = [args[int(word[1:]) - 1] for word in words if word[0] == "$" and word != "$0"]
            if name.startswith("setp."):
                compare = getattr(torch, name.split(".")[1])
                before = hidden if ".or." in name else torch.zeros(1, dtype=torch.bool)
                hidden = compare(values[0], values[1]) | before
            elif name == "selp.f32":
                assert [words[0], *words[2:]] == ["$0", "$1", "p"]
                return torch.where(hidden, HEXADECIMAL[words[1]], args[0])
            else:
                assert name == ".reg", f"no such instruction here: {name}"
        raise AssertionError("nothing is chosen")


def _of(of_tensors: Any, of_integers: Any, a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return of_integers(a, b)
    return of_tensors(torch.as_tensor(a), torch.as_tensor(b))


def forward_functions(edit: tuple[str, str] | None = None) -> SimpleNamespace:
    """The functions of the kernel: ``key_tiles``, ``visible_keys``, ``hide``, ``capped``,
    ``raise_reference``, ``softmax_step``, ``place_in_order``.

    Args:
        edit: a line of the first three's source, and what to put in its place.
    """
    # Triton exists for Linux alone, and who imports this file may have to skip.
    from kernels.flash.hopper import forward_tile, tiles

    names: dict[str, Any] = {
        "gl": Language(),
        "row_max": lambda x: x.amax(1),
        "row_sums_by_thread": lambda x: x.sum(1, keepdim=True),
        "GROWTH": forward_tile.GROWTH.value,
        **tile_names(),
    }
    load(names, tiles, ("offsets", "key_tiles", "visible_keys"), edit)
    load(names, tiles, ("hide",), edit, (".type.layout", ""))
    # PyTorch's tensors have no layout to ask for.
    functions = ("raise_reference", "softmax_step", "place_in_order")
    load(names, forward_tile, functions, (".type.layout", ""))
    load(names, tiles, ("capped",), (".type.layout", ""))
    return SimpleNamespace(**names)


def backward_functions(edit: tuple[str, str] | None = None) -> SimpleNamespace:
    """Those of the backward kernels: ``turns_of_keys``, ``turn_of``, ``programs_before``,
    ``place_in_order``, ``place_in_batch``, ``place_in_bands``, ``in_band``, ``in_section``,
    ``lines_before``, ``probabilities``, ``slope_of_cap``, ``sharing_of``, ``sequence_of_program``;
    and ``is_reached`` and ``is_reached_by_later`` of rows.finish_dq.

    Args:
        edit: a line of their source, and what to put in its place.
    """
    # Triton exists for Linux alone, and who imports this file may have to skip.
    from kernels.flash.hopper import backward_order, backward_sharing, rows, tiles

    names: dict[str, Any] = {"gl": Language(), "Turns": backward_order.Turns, **tile_names()}
    names["tl"] = names["gl"]
    names["Sharing"] = backward_sharing.Sharing
    load(names, tiles, ("offsets", "capped", "sequence", "sequence_of_program"), edit)
    load(names, tiles, ("hide",), edit, (".type.layout", ""))
    load(names, rows, ("is_reached", "is_reached_by_later"), edit)
    order = (
        "place_in_order",
        "place_in_batch",
        "lines_before",
        "turns_of_keys",
        "turn_of",
        "programs_before",
    )
    load(names, backward_order, (*order, "place_in_bands", "in_band", "in_section"), edit)
    load(names, backward_sharing, ("sharing_of",), edit, (".to(gl.int64)", ""))
    # PyTorch's tensors have no layout to ask for.
    for function in ("probabilities", "slope_of_cap"):
        load(names, backward_order, (function,), edit, (".type.layout", ""))
    return SimpleNamespace(**names)
