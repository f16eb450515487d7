"""The decode kernels against float64 attention over the whole history, and what they write.

Without a GPU they run under Triton's interpreter, with tiles of 16 and three multiprocessors.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from decode_checks import (
    PAGES,
    RAGGED,
    LatentSetting,
    Setting,
    angles,
    assert_close,
    attention,
    check,
    check_latent,
    int32,
    rotated,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_device import CLOSENESS, DEVICE, RUNS_TRITON, randn

from kernels.decode import Rotary, flash_decode, mla_decode

pytestmark = RUNS_TRITON


class TestFlashDecode:
    @pytest.mark.parametrize(
        ("page", "new"), [*((page, 1) for page in PAGES.values()), (0, 3), (8, 3), (24, 3)]
    )
    def test_ragged_lengths(self, page: int, new: int) -> None:
        check(Setting(lengths=RAGGED, heads=4, new=new, page=page, rotary=angles(80, 16)))

    @pytest.mark.parametrize(
        ("kv_heads", "group_size"), [(1, 1), (2, 2), (1, 3), (2, 4), (1, 8), (2, 16)]
    )
    def test_grouped_queries(self, kv_heads: int, group_size: int) -> None:
        """With three new tokens, up to 48 rows: several tiles side by side."""
        heads = group_size * kv_heads
        check(Setting(lengths=[40, 3], heads=heads, kv_heads=kv_heads, new=3))

    def test_one_kv_head_of_many(self) -> None:
        check(Setting(lengths=[33], heads=70, kv_heads=1), num_splits=3)

    @pytest.mark.parametrize(
        ("head_dim", "dtype"),
        [
            *((head_dim, torch.float32) for head_dim in (1, 16, 64, 80, 128, 256)),
            *((head_dim, torch.float16) for head_dim in (1, 64, 256)),
            *((head_dim, torch.bfloat16) for head_dim in (16, 80, 128)),
        ],
        ids=lambda value: str(value).removeprefix("torch."),
    )
    def test_head_dims(self, head_dim: int, dtype: torch.dtype) -> None:
        rotary = angles(40, head_dim // 2 * 2) if head_dim > 1 else None
        check(
            Setting(
                lengths=[37, 5], heads=4, head_dim=head_dim, max_len=40, page=16, dtype=dtype,
                rotary=rotary, scale=head_dim**-0.5,
            )
        )  # fmt: skip

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("rotary_dim", [2, 8, 12, 20])
    def test_rotary(self, rotary_dim: int, interleaved: bool) -> None:
        """All entries of a head or the first few, paired as neighbours or as halves."""
        rotary = angles(80, rotary_dim, interleaved)
        check(Setting(lengths=[0, 21, 64], head_dim=20, new=2, rotary=rotary))

    def test_tables_that_lie_apart(self) -> None:
        """Kernels know one stride of both."""
        cos, sin, interleaved = angles(80, 16)
        apart = Rotary(cos, sin.repeat(1, 3)[:, :8], interleaved)
        assert apart.cos.stride() != apart.sin.stride()
        check(Setting(lengths=[0, 21, 64], head_dim=20, new=2, rotary=apart))

    @pytest.mark.parametrize("num_splits", [1, 2, 3, 5, 24])
    def test_shares(self, num_splits: int) -> None:
        """Fewer and more shares than there are tiles; lines cut at odd places by raggedness."""
        check(Setting(lengths=[80 - 1, 2, 0, 50], heads=6, page=16), num_splits=num_splits)

    def test_counters_are_zero_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next launch on the stream counts with the same ones."""
        from kernels.decode import workspace

        used = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        monkeypatch.setattr(workspace, "counters", lambda count, device: used)
        setting = Setting(lengths=[60, 33, 7], heads=6)
        expected = check(setting, num_splits=3)
        assert not used.any()
        assert torch.equal(check(setting, num_splits=3), expected)
        latent = LatentSetting(lengths=[60, 33, 7])
        assert torch.equal(
            check_latent(latent, num_splits=3), check_latent(latent, num_splits=3)
        )  # fmt: skip
        assert not used.any()

    def test_a_share_of_many_lines(self) -> None:
        """70 sequences, most of them empty, for six programs."""
        lengths = [0] * 70
        lengths[7], lengths[50], lengths[69] = 90, 17, 3
        check(Setting(lengths=lengths, heads=1, kv_heads=1, max_len=96))

    def test_negative_and_zero_scale(self) -> None:
        for scale in (-0.5, 0.0):
            check(Setting(lengths=[20, 3], scale=scale))

    def test_far_apart_scores(self) -> None:
        """Softmax at scores of thousands: exp would overflow without its running maximum."""
        check(Setting(lengths=[70], rotary=angles(80, 16), scale=300.0), num_splits=4, limit=1e-2)

    @pytest.mark.parametrize("num_splits", [1, 4])
    def test_a_key_that_is_not_a_number(self, num_splits: int) -> None:
        """In the cache of one sequence: its output is none either, however it is split."""
        s = Setting(lengths=[70, 70], kv_heads=1, new=2)
        fresh = s.fresh(s.heads, 3), s.fresh(1, 4), s.fresh(1, 5)
        k, v = s.history(1), s.history(2)
        k[0, 0, 33, 2] = torch.nan
        out = flash_decode(*fresh, k, v, int32(s.lengths), num_splits=num_splits)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()

    def test_default_scale(self) -> None:
        setting = Setting(lengths=[9], head_dim=64)
        setting.scale = 1 / 8
        assert torch.equal(check(setting), check_default(setting))

    def test_layouts(self) -> None:
        """Tokens before heads, as projections give them and as some caches lie; out in place."""
        q = randn(2, 1, 4, 16).transpose(1, 2)
        k_new, v_new = (randn(2, 1, 2, 16, seed=i).transpose(1, 2) for i in (1, 2))
        caches = [randn(2, 40, 2, 16, seed=i).transpose(1, 2) for i in (3, 4)]
        dense = [x.contiguous() for x in caches]
        lengths = int32([30, 12])
        expected = flash_decode(q.contiguous(), k_new, v_new, *dense, lengths)
        out = torch.zeros(2, 1, 4, 16, device=DEVICE).transpose(1, 2)
        assert flash_decode(q, k_new, v_new, *caches, lengths, out=out) is out
        assert torch.equal(out, expected)
        assert all(torch.equal(a, b) for a, b in zip(caches, dense, strict=True))
        columns_first = q.mT.contiguous().mT
        assert torch.equal(flash_decode(columns_first, k_new, v_new, *caches, lengths), expected)

    def test_many_steps(self) -> None:
        """Tokens appended one after another are what prefill would have put there."""
        q, k, v = (randn(1, heads, 30, 16, seed=heads) for heads in (4, 2, 2))
        rotary = angles(30, 16)
        caches = [torch.zeros(1, 2, 32, 16, device=DEVICE) for _ in range(2)]
        lengths = int32([0])
        rows = []
        for start in range(0, 30, 3):
            part = slice(start, start + 3)
            rows.append(
                flash_decode(
                    q[:, :, part], k[:, :, part], v[:, :, part], *caches, lengths, rotary=rotary
                )
            )  # fmt: skip
            lengths += 3
        everywhere = torch.arange(30, device=DEVICE)
        queries, keys = (rotated(x[0], everywhere, rotary) for x in (q, k))
        expected = attention(queries, keys, v[0].double(), 0.25)
        assert_close(torch.cat(rows, dim=2)[0], expected, "o", 2e-5)

    def test_a_full_cache_is_not_overrun(self) -> None:
        """The owner checks; if it does not, other sequences' memory stays as it is."""
        caches = [torch.zeros(2, 1, 16, 16, device=DEVICE) for _ in range(2)]
        new = torch.ones(2, 1, 2, 16, device=DEVICE)
        flash_decode(new, new, new, *caches, int32([15, 3]))
        for cache in caches:
            assert cache[0, 0, :, 0].tolist() == [0.0] * 15 + [1.0]
            assert cache[1, 0, :, 0].tolist() == [0.0] * 3 + [1.0] * 2 + [0.0] * 11

    @settings(max_examples=12)
    @given(data=st.data())
    def test_any_small_call(self, data: st.DataObject) -> None:
        draw = data.draw
        new, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        max_len = draw(st.integers(new, 60))
        lengths = draw(st.lists(st.integers(0, max_len - new), min_size=1, max_size=4))
        head_dim = draw(st.integers(2, 24))
        rotary_dim = 2 * draw(st.integers(0, head_dim // 2))
        rotary = angles(max_len, rotary_dim, draw(st.booleans())) if rotary_dim else None
        setting = Setting(
            lengths=lengths, heads=kv_heads * draw(st.integers(1, 6)), kv_heads=kv_heads, new=new,
            head_dim=head_dim, page=draw(st.sampled_from([0, 5, 16, 32])), max_len=max_len,
            rotary=rotary, scale=draw(st.floats(-1, 1)),
        )  # fmt: skip
        check(setting, num_splits=draw(st.sampled_from([None, 1, 2, 7])))


def check_default(setting: Setting) -> Tensor:
    """The result of a call without ``scale`` on the inputs of :func:`check`."""
    s = setting
    past = [s.history(1), s.history(2)]
    fresh = s.fresh(s.heads, 3), s.fresh(s.kv_heads, 4), s.fresh(s.kv_heads, 5)
    return flash_decode(*fresh, *past, int32(s.lengths))


class TestLatentDecode:
    @pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
    def test_ragged_lengths(self, page: int) -> None:
        check_latent(LatentSetting(lengths=[1, *RAGGED[1:], 80], page=page))

    @pytest.mark.parametrize("new", [2, 3])
    def test_new_tokens(self, new: int) -> None:
        """Lengths that leave one key of a tile, which early new tokens do not see."""
        for num_splits in (None, 1, 4):
            lengths = [new, 17, 18, 33, 65]
            check_latent(LatentSetting(lengths=lengths, new=new, page=16), num_splits=num_splits)

    @pytest.mark.parametrize("heads", [1, 16, 40])
    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    def test_heads(self, heads: int, dtype: torch.dtype) -> None:
        check_latent(LatentSetting(lengths=[50, 9], heads=heads, dtype=dtype), num_splits=3)

    @pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (48, 8), (16, 20)])
    def test_widths(self, rank: int, rope_dim: int) -> None:
        check_latent(LatentSetting(lengths=[33], rank=rank, rope_dim=rope_dim, scale=0.04))

    @pytest.mark.parametrize("num_splits", [1, 4])
    def test_a_latent_that_is_not_a_number(self, num_splits: int) -> None:
        q, q_rope = randn(2, 4, 1, 16), randn(2, 4, 1, 8)
        cache = randn(2, 80, 24)
        cache[0, 33, 20] = torch.nan
        lengths = int32([70, 70])
        out = mla_decode(q, q_rope, cache, lengths, scale=0.3, num_splits=num_splits)
        assert out[0].isnan().all()
        assert out[1].isfinite().all()

    def test_a_sequence_of_nothing(self) -> None:
        assert (check_latent(LatentSetting(lengths=[20, 0]))[1] == 0).all()

    @settings(max_examples=10)
    @given(data=st.data())
    def test_any_small_call(self, data: st.DataObject) -> None:
        draw = data.draw
        new = draw(st.integers(1, 3))
        setting = LatentSetting(
            lengths=draw(st.lists(st.integers(new, 60), min_size=1, max_size=4)),
            heads=draw(st.integers(1, 20)), new=new, rank=draw(st.integers(1, 40)),
            rope_dim=draw(st.integers(1, 20)), page=draw(st.sampled_from([0, 5, 16, 32])),
            max_len=60, scale=draw(st.floats(-1, 1)),
        )  # fmt: skip
        check_latent(setting, num_splits=draw(st.sampled_from([None, 1, 2, 7])))


def divided(units: list[int], num_workers: int) -> list[list[tuple[int, int, int]]]:
    """Pieces of each line, (worker, first unit, end), of shares as equal as they can be."""
    starts = [w * sum(units) // num_workers for w in range(num_workers + 1)]
    lines, before = [], 0
    for count in units:
        pieces = [
            (w, max(a, before) - before, min(b, before + count) - before)
            for w, (a, b) in enumerate(itertools.pairwise(starts))
        ]
        lines.append([piece for piece in pieces if piece[1] < piece[2]])
        before += count
    return lines


class TestMerge:
    @pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 11, 13])
    def test_pieces_of_a_launch_before(self, num_workers: int) -> None:
        """Partial results of a kernel without a merge: attention over the keys of a piece."""
        from kernels.decode.latent.merge_kernel import merge_kernel

        rows, width, block_m, row_tiles, new = 20, 16, 16, 2, 2
        lengths = [40, 1, 0, 16, 100]
        units = [max(1, -(-length // 16)) for length in lengths]
        assert sum(units) == 13
        o = torch.zeros(num_workers, row_tiles, 2, block_m, width)
        lse = torch.full((num_workers, row_tiles, 2, block_m), torch.nan)
        out = torch.full((len(lengths), rows // new, new, width), torch.nan)
        expected = torch.zeros(len(lengths), rows, width, dtype=torch.float64)
        for b, (length, pieces) in enumerate(
            zip(lengths, divided(units, num_workers), strict=True)
        ):
            scores, v = randn(rows, length, seed=b).cpu().double(), randn(length, width).cpu()
            expected[b] = (scores.softmax(-1) @ v.double()).nan_to_num(0.0)
            if len(pieces) == 1:
                # The kernel has written the line itself, and it stays as it is.
                out[b] = expected[b] = b + 0.5
                continue
            for worker, first, end in pieces:
                keys = slice(first * 16, end * 16)
                part = (scores[:, keys].softmax(-1) @ v[keys].double()).nan_to_num(0.0).float()
                part_lse = (scores[:, keys].logsumexp(-1) / math.log(2)).float()
                for row in range(rows):
                    place = worker, row // block_m, 0 if first else 1, row % block_m
                    o[place], lse[place] = part[row], part_lse[row]
        out = out.to(DEVICE)
        merge_kernel[(len(lengths) * row_tiles, 4)](
            int32(lengths), out, torch.cat([o.flatten(), lse.flatten()]).to(DEVICE),
            *out.stride()[:3], rows, len(lengths), num_workers, 1, num_workers * row_tiles,
            NEW=new, BLOCK_B=16, BLOCK_M=block_m, BLOCK_N=16, BLOCK_D=width,
            ROW_TILES=row_tiles, MERGE_PIECES=2, MERGE_ROWS=4,
        )  # fmt: skip
        assert_close(out.flatten(1, 2), expected.to(DEVICE), "out", 1e-5)
