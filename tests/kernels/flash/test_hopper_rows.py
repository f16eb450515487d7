"""The kernels before and after the Hopper backward pass, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans


@pytest.mark.skipif(not hopper.any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
@pytest.mark.parametrize("num_key_counts", [0, 1, 100, 2000])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_sums", [1, 2])
def test_counts_begin_at_zero(packed: bool, num_key_counts: int, num_sums: int) -> None:
    """Fewer than programs, and more than one for each of their rows; and no numbers behind them."""
    # Its constants come from a file of Gluon, which old versions of Triton lack.
    from kernels.flash.hopper.rows import row_statistics

    heads, rows, padded = 2, 130, 256
    o = torch.randn(1, heads, rows, 16)
    lse = torch.zeros(heads, rows)
    # A sequence without queries comes first: its programs end early.
    cu_seqlens = torch.tensor([0, 0, rows], dtype=torch.int32)
    counts, key_counts = (torch.full((n,), 9, dtype=torch.int32) for n in (64, 3000))
    row_statistics[plans.slots(rows, 2, 128) if packed else 2, heads](
        o, o, lse, lse, torch.empty(2, heads, 512), counts, key_counts, cu_seqlens,
        *o.stride()[:3], *o.stride()[:3], 2 if packed else 1, heads, rows, rows,
        512 if packed else padded, heads * 512, num_key_counts,
        VALUE_DIM=16, BLOCK_V=16, BLOCK_Q=128, PACKED=packed, HAS_DLSE=False,
        SUMS=num_sums,
    )  # fmt: skip
    # Two lines of 130 queries, in tiles of 64 and whole programs.
    of_lines = [*range(2, 6), *range(10, 14)] if packed else [*range(8)]
    zeros = [place + sums * heads * 512 // 64 for sums in range(num_sums) for place in of_lines]
    assert (counts == 0).nonzero().flatten().tolist() == zeros
    assert not key_counts[:num_key_counts].any()
    assert (key_counts[num_key_counts:] == 9).all()


@pytest.mark.skipif(not hopper.any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
@pytest.mark.parametrize(("q_len", "kv_len"), [(300, 300), (300, 428), (428, 300), (300, 40)])
@pytest.mark.parametrize("num_turned", [1, 2])
@pytest.mark.parametrize(("turn", "packed"), [(128, False), (64, False), (128, True)])
def test_second_sums_of_dq_are_added_where_there_are_any(
    q_len: int, kv_len: int, num_turned: int, turn: int, packed: bool
) -> None:
    """What no program writes may be anything: here it is no number."""
    # Its constants come from a file of Gluon, which old versions of Triton lack.
    from kernels.flash.hopper.rows import finish_dq

    heads, padded, width = 2, 1024, 64
    torch.manual_seed(0)
    # Of a packed batch, an empty sequence and one of a single query come first.
    cu_seqlens_q = torch.tensor([0, 0, 1, 1 + q_len] if packed else [0, q_len], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, 9, 10, 10 + kv_len] if packed else [0, 0], dtype=torch.int32)
    start, sums_start = (1, 256) if packed else (0, 0)
    sums = torch.full((2, heads, padded, width), torch.nan)
    first_key = num_turned * turn
    for query in range(-(-q_len // turn) * turn):
        last_key = query // turn * turn + turn - 1 + kv_len - q_len
        written = (last_key >= 0, last_key >= first_key and kv_len > first_key)
        for part in range(2):
            if written[part]:
                sums[part, :, sums_start + query] = torch.randn(heads, width)
    if packed:
        sums[0, :, 128 : 128 + turn] = 1.0
    results = []
    for planes in (sums, (sums[0] + sums[1].nan_to_num(0.0))[None]):
        dq = torch.zeros(1, heads, start + q_len, width)
        blocks = plans.slots(1 + q_len, 3, 16) if packed else -(-q_len // 16)
        finish_dq[blocks, heads](
            planes, dq, cu_seqlens_q, cu_seqlens_k, *dq.stride()[:3], 3 if packed else 1, heads,
            q_len, kv_len, padded, heads * padded, num_turned, 0, 0, 0, 0.5,
            HEAD_DIM=width, BLOCK_D=width, BLOCK_Q=16, TURN=turn, PACKED=packed, CAUSAL=True,
            MASK="plain", SUMS=len(planes),
        )  # fmt: skip
        results.append(dq)
    assert torch.equal(*results)
    assert not results[0].isnan().any()
    assert (results[0][0, :, start:].abs().sum(-1) > 0).sum() == heads * min(
        q_len, max(0, q_len - max(0, q_len - kv_len) // turn * turn)
    )


@pytest.mark.skipif(not hopper.any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_sums_of_all_bands_are_added(turns: int) -> None:
    """Each from its first turn on; before that it is no number."""
    # Its constants come from a file of Gluon, which old versions of Triton lack.
    from kernels.flash.hopper.rows import finish_dq

    heads, length, padded, width = 2, 1000, 1024, 64
    num_bands = -(-8 // turns)
    torch.manual_seed(0)
    sums = torch.randn(num_bands, heads, padded, width)
    for band in range(num_bands):
        sums[band, :, : band * turns * 128] = torch.nan
    results = []
    for planes in (sums, sums.nan_to_num(0.0).sum(0, keepdim=True)):
        dq = torch.zeros(1, heads, length, width)
        finish_dq[63, heads](
            planes, dq, *[torch.zeros(2, dtype=torch.int32)] * 2, *dq.stride()[:3], 1, heads,
            length, length, padded, heads * padded, turns, 0, 0, 0, 0.5,
            HEAD_DIM=width, BLOCK_D=width, BLOCK_Q=16, TURN=128, PACKED=False, CAUSAL=True,
            MASK="plain", SUMS=len(planes),
        )  # fmt: skip
        results.append(dq)
    torch.testing.assert_close(*results)
    assert bool((results[0].abs().sum(-1) > 0).all())
