"""Masks and caps in the Hopper forward kernel: its arithmetic, run on PyTorch's tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gluon_numbers import forward_functions
from torch import Tensor

from kernels.problem import Mask

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

ROWS = 64
BLOCK_K = 32
"""Smaller than the kernel's, for more edges."""


def random_case(rng: random.Random) -> tuple[Mask, int, int]:
    """A mask, and numbers of queries and keys."""
    q_len, kv_len = rng.randint(1, 300), rng.randint(1, 300)
    shift = rng.choice((0, rng.randint(-330, 330)))
    causal = rng.random() < 0.6
    if causal and rng.random() < 0.4:
        return Mask(causal=True, prefix_len=rng.randint(0, 330), shift=shift), q_len, kv_len
    window = rng.choice((None, 1, 2, 32, 33, rng.randint(1, 300)))
    return Mask(causal=causal, window=window, shift=shift), q_len, kv_len


def constants(mask: Mask) -> tuple[tuple[int, int, int], bool, str]:
    """The numbers of the mask, and the kernel's constants CAUSAL and MASK."""
    kind = "window" if mask.window is not None else "plain" if mask.is_plain else "prefix"
    return (mask.window or 0, mask.prefix_len, mask.shift), mask.causal, kind


def pairs(mask: Mask, q_len: int, kv_len: int) -> Tensor:
    """Which query sees which key, [q_len, kv_len], pair by pair."""
    p = torch.arange(q_len)[:, None] + kv_len - q_len + mask.shift
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if mask.causal:
        seen &= key <= p
    if mask.window is not None:
        seen &= (p - key).abs() < mask.window
    return seen | (key < mask.prefix_len)


def hidden(kernel: Any, s: Tensor, bounds: tuple[Tensor, Tensor], kind: str) -> Tensor:
    """Scores as forward_tile.masked has them."""
    first, last = bounds
    return kernel.hide(s, first, last, kind == "window", True, kernel.MINUS_INFINITY)


def check_tiles(seed: int, edit: tuple[str, str] | None = None) -> None:
    """What is visited has all that is seen, what needs no mask is seen, and masks are right."""
    mask, q_len, kv_len = random_case(random.Random(seed))
    kernel = forward_functions(edit)
    numbers, causal, kind = constants(mask)
    edges = kernel.Edges(*numbers)
    seen = pairs(mask, q_len, kv_len)
    for first in range(0, q_len + 2 * ROWS, 2 * ROWS):
        tiles = kernel.key_tiles(
            first, q_len, kv_len, edges, 2 * ROWS, BLOCK_K, causal, kind
        )  # fmt: skip
        assert 0 <= tiles.start <= tiles.unmasked_start
        assert tiles.unmasked_start <= tiles.unmasked_stop <= tiles.stop <= -(-kv_len // BLOCK_K)
        own = seen[first : first + 2 * ROWS]
        columns = own.any(0).nonzero().flatten() // BLOCK_K
        visited = set(columns.tolist())
        # Queries behind the last key may look at its tile in vain.
        assert set(range(tiles.start, tiles.stop)) == visited or (
            not visited and tiles.stop - tiles.start == 1
        )
        for tile in range(tiles.start, tiles.stop):
            keys = slice(BLOCK_K * tile, BLOCK_K * tile + BLOCK_K)
            whole = bool(own[:, keys].all()) and BLOCK_K * tile + BLOCK_K <= kv_len
            assert whole == (tiles.unmasked_start <= tile < tiles.unmasked_stop)
            for row in (first, first + ROWS):
                bounds = kernel.visible_keys(
                    tile, row, q_len, kv_len, edges, BLOCK_K, causal, kind, None
                )  # fmt: skip
                got = hidden(kernel, torch.zeros(ROWS, BLOCK_K), bounds, kind) == 0
                wanted = seen[row : row + ROWS, keys]
                assert torch.equal(got[: len(wanted), : wanted.shape[1]], wanted)
                assert not got[: len(wanted), wanted.shape[1] :].any()


def test_tiles_and_masks() -> None:
    for seed in range(300):
        check_tiles(seed)


@pytest.mark.parametrize(
    "edit",
    [
        ("last = last + edges.shift", "pass"),
        ("last = last + edges.window - 1", "pass"),
        ("first = last - edges.window + 1", "first = last - edges.window"),
        ("visible = gl.maximum(visible, edges.prefix_len)", "pass"),
        ("unmasked = gl.maximum(unmasked, edges.prefix_len)", "pass"),
        ("unmasked = gl.minimum(kv_len, unmasked)", "pass"),
        ("gl.cdiv(last_start, BLOCK_K)", "last_start // BLOCK_K"),
        ("gl.minimum(first + BLOCK_Q, q_len) - 1 + to_first", "first + to_first"),
        ("gl.maximum(first + to_first, 0) // BLOCK_K, stop)", "0, stop)"),
        ("unmasked_stop = gl.maximum(unmasked_stop, unmasked_start)", "pass"),
        ("gl.maximum(own, edges.prefix_len - 1)", "own"),
        ("return row + to_first - tile * BLOCK_K", "return row + to_first"),
        ("setp.lt.s32", "setp.le.s32"),
        ("setp.gt.s32", "setp.ge.s32"),
        ("column = 8 * a + c", "column = 8 * a"),
        ("own = 2 * gl.arange(0, 4, OF_B)", "own = gl.arange(0, 4, OF_B)"),
    ],
    ids=lambda edit: edit[0][:40],
)
def test_notices_a_wrong_edge(edit: tuple[str, str]) -> None:
    def check_many() -> None:
        for seed in range(300):
            check_tiles(seed, edit)

    with pytest.raises(AssertionError):
        check_many()


def attend(
    mask: Mask, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, lazy: bool
) -> tuple[Tensor, Tensor]:
    """o and lse as the kernels compute them, tile by tile from right to left."""
    kernel = forward_functions()
    numbers, causal, kind = constants(mask)
    edges = kernel.Edges(*numbers)
    q_len, kv_len = len(q), len(k)
    all_o, all_lse = torch.zeros_like(q), torch.zeros(q_len, dtype=q.dtype)
    scale_log2 = scale * kernel.LOG2_E
    padded_k, padded_v = (torch.nn.functional.pad(x, (0, 0, 0, BLOCK_K)) for x in (k, v))
    for first_row in range(0, q_len, ROWS):
        first = first_row // (2 * ROWS) * 2 * ROWS
        tiles = kernel.key_tiles(first, q_len, kv_len, edges, 2 * ROWS, BLOCK_K, causal, kind)
        rows = torch.nn.functional.pad(q, (0, 0, 0, 2 * ROWS))[first_row : first_row + ROWS]
        reference = torch.full((ROWS,), -torch.inf, dtype=q.dtype)
        total = torch.zeros(ROWS, 1, dtype=q.dtype)
        o = torch.zeros(ROWS, q.shape[1], dtype=q.dtype)
        for tile in reversed(range(tiles.start, tiles.stop)):
            keys = slice(BLOCK_K * tile, BLOCK_K * tile + BLOCK_K)
            is_masked = not tiles.unmasked_start <= tile < tiles.unmasked_stop
            s, factor = rows @ padded_k[keys].T, scale_log2
            if softcap:
                s, factor = kernel.capped(s, scale_log2, softcap), 1.0
            if is_masked or tile == tiles.stop - 1:
                is_masked = True
                bounds = kernel.visible_keys(
                    tile, first_row, q_len, kv_len, edges, BLOCK_K, causal, kind, None
                )  # fmt: skip
                s = hidden(kernel, s, bounds, kind)
            reference, zero, shrink = kernel.raise_reference(s, reference, factor, lazy, is_masked)
            p, total = kernel.softmax_step(s, zero, shrink, total, factor)
            o = o * shrink[:, None] + p @ padded_v[keys]
        total = total.sum(1)
        safe = torch.where(total == 0.0, 1.0, total)
        lse = torch.where(total == 0.0, -torch.inf, (reference + safe.log2()) * kernel.LN_2)
        count = min(ROWS, q_len - first_row)
        all_o[first_row : first_row + count] = (o / safe[:, None])[:count]
        all_lse[first_row : first_row + count] = lse[:count]
    return all_o, all_lse


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_softmax_over_masked_tiles(softcap: float, lazy: bool) -> None:
    """Rows that see nothing in the first tiles, or in the last, or in none, beside others."""
    rng = random.Random(2)
    generator = torch.Generator().manual_seed(3)
    empty = 0
    for _ in range(60):
        mask, q_len, kv_len = random_case(rng)
        q, k, v = (
            torch.randn(n, 8, generator=generator, dtype=torch.float64)
            for n in (q_len, kv_len, kv_len)
        )
        scores = q @ k.T * 2.0
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~pairs(mask, q_len, kv_len), -torch.inf)
        lse = scores.logsumexp(1)
        wanted = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp() @ v
        got_o, got_lse = attend(mask, q, k, v, 2.0, softcap, lazy)
        torch.testing.assert_close(got_o, wanted, msg=str((mask, q_len, kv_len)))
        torch.testing.assert_close(got_lse, lse)
        empty += int((lse == -torch.inf).sum())
    assert empty > 100


def test_caps_of_large_scores() -> None:
    """Where exp overflows or vanishes tanh is 1 or -1; scores of 0 stay 0, what is no number too.

    In float32, as on the GPU: beside the cap everything is exact to its last bits.
    """
    kernel = forward_functions()
    s = torch.tensor([-torch.inf, -1e30, -300.0, -1.0, 0.0, 1e-3, 2.0, 400.0, 1e30, torch.inf])
    got = kernel.capped(s, 0.5 * kernel.LOG2_E, 50.0) * kernel.LN_2
    wanted = 50 * torch.tanh(s.double() * 0.5 / 50)
    assert float((got - wanted).abs().max()) < 50 * 2**-21
    assert kernel.capped(torch.tensor([torch.nan]), 1.0, 50.0).isnan().all()
