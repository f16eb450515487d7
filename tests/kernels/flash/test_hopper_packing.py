"""Which rows of a packed batch a program of the Hopper kernels has, by the kernels' arithmetic."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from gluon_model import Place
from gluon_numbers import backward_functions

from kernels.flash.hopper import plans

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")


def check(seed: int, edit: tuple[str, str] | None = None) -> None:
    """Each block of rows of each sequence has one program of each head, and the others are spare.

    Tokens may lie before the first sequence and behind the last one.
    """
    kernel = backward_functions(edit)
    rng = random.Random(seed)
    rows, heads = rng.choice((16, 64, 128, 192, 384)), rng.randint(1, 5)
    most = rng.choice((3, 200, 2000))
    lengths = [
        rng.choice((0, 1, rng.randint(0, most)))
        for _ in range(rng.choice((rng.randint(1, 9), rng.randint(1, 100))))
    ]
    offsets = [*accumulate(lengths, initial=rng.choice((0, rng.randint(0, 700))))]
    num_tokens = offsets[-1] + rng.choice((0, rng.randint(0, 700)))
    found = []
    num_spare = 0
    for index in range(heads * plans.slots(num_tokens, len(lengths), rows)):
        sequence, number, num_programs, is_spare = kernel.sequence_of_program(
            Place(offsets), len(lengths), heads, index, rows
        )
        assert 0 <= number < heads * num_programs
        assert num_programs == max(1, -(-lengths[sequence] // rows))
        if is_spare:
            num_spare += 1
        else:
            found.append((sequence, number))
    wanted = [
        (sequence, number)
        for sequence, length in enumerate(lengths)
        for number in range(heads * -(-length // rows))
    ]
    assert found == wanted
    assert num_spare <= heads * (len(lengths) + (num_tokens - sum(lengths)) // rows + 1)


@pytest.mark.parametrize("seed", range(100))
def test_each_row_has_one_program(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize(
    "edit",
    [
        ("+ place <= slot", "+ place < slot"),
        ("end - first > 1", "end - first > 2"),
        ("gl.load(cu_seqlens + place) // ROWS + place", "gl.load(cu_seqlens + place) // ROWS"),
        ("static_range(1, 8)", "static_range(1, 7)"),
        (" & (place < end)", ""),
        ("(number < 0) | ", ""),
        (">= num_programs * num_heads", "> num_programs * num_heads"),
        ("gl.maximum(num_programs, 1)", "num_programs"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_another_programs_rows(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in range(100):
            check(seed, edit)

    with pytest.raises((AssertionError, IndexError)):
        check_many()
