"""The decode kernels against float64 attention over the whole history, and what they write.

Without a GPU they run under Triton's interpreter, with tiles of 16 and three multiprocessors.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.decode import Rotary, flash_decode, mla_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device or TRITON_INTERPRET=1",
    ),
    # Rows past the end overflow before they are dropped; numpy says so, a GPU does not.
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

CLOSENESS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error, relative to the largest entry of the expected tensor."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def angles(max_positions: int, rotary_dim: int, interleaved: bool = False) -> Rotary:
    """Angles that differ for each position and pair, as RoPE's do."""
    frequencies = 1.0 / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    turn = (torch.arange(max_positions)[:, None] * frequencies).to(DEVICE)
    return Rotary(turn.cos(), turn.sin(), interleaved)


def rotated(x: Tensor, positions: Tensor, rotary: Rotary | None) -> Tensor:
    """x [heads, T, D] in float64, each pair of entries as a complex number times e^(i angle)."""
    x = x.double()
    if rotary is None:
        return x
    turn = torch.complex(rotary.cos[positions].double(), rotary.sin[positions].double())
    width = rotary.rotary_dim
    if rotary.interleaved:
        pairs = x[..., :width].unflatten(-1, (-1, 2))
    else:
        pairs = x[..., :width].unflatten(-1, (2, -1)).transpose(-1, -2)
    done = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    if not rotary.interleaved:
        done = done.transpose(-1, -2)
    return torch.cat([done.flatten(-2), x[..., width:]], dim=-1)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [H, T, D], k and v [H_kv, N, ..], float64; new token t sees the keys up to its own."""
    group_size = q.shape[0] // k.shape[0]
    k, v = (x.repeat_interleave(group_size, dim=0) for x in (k, v))
    new, kv_len = q.shape[1], k.shape[1]
    hidden = torch.ones(new, kv_len, dtype=torch.bool, device=q.device).triu(kv_len - new + 1)
    return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def assert_close(got: Tensor, expected: Tensor, what: str, limit: float) -> None:
    assert got.shape == expected.shape, what
    assert bool(got.isfinite().all()), what
    error = float((got.double() - expected).abs().max())
    allowed = limit * max(0.5, float(expected.abs().max()))
    assert error <= allowed, f"{what} is off by {error:.3g}, more than {allowed:.3g}"


@dataclass(kw_only=True, slots=True)
class Setting:
    """A cache with a history, and new tokens for it."""

    lengths: list[int]
    heads: int = 2
    kv_heads: int = 2
    new: int = 1
    head_dim: int = 16
    page: int = 0
    """Block size; the table is shuffled, and entries that nothing needs point far outside."""
    max_len: int = 80
    dtype: torch.dtype = torch.float32
    rotary: Rotary | None = None
    scale: float = 0.3

    def history(self, seed: int) -> Tensor:
        """[B, H_kv, max_len, D]; what lies beyond a length is not a number."""
        shape = (len(self.lengths), self.kv_heads, self.max_len, self.head_dim)
        x = randn(*shape, dtype=self.dtype, seed=seed)
        for one, length in zip(x, self.lengths, strict=True):
            one[:, length:] = torch.nan
        return x

    def fresh(self, heads: int, seed: int) -> Tensor:
        shape = (len(self.lengths), heads, self.new, self.head_dim)
        return randn(*shape, dtype=self.dtype, seed=seed)


def shuffled_table(batch: int, blocks_each: int, used: list[int]) -> Tensor:
    """A block table [B, blocks_each] over 2 B blocks_each blocks; unused entries are -10^9."""
    generator = torch.Generator().manual_seed(batch + blocks_each)
    table = torch.randperm(2 * batch * blocks_each, generator=generator)[: batch * blocks_each]
    table = table.view(batch, blocks_each).to(DEVICE, torch.int32)
    for row, count in zip(table, used, strict=True):
        row[count:] = -(10**9)
    return table


def to_pages(x: Tensor, table: Tensor, page: int) -> Tensor:
    """[B, .., max_len, D] as blocks [2 B blocks, .., page, D], not-a-number where none points."""
    blocks = x.new_full((2 * table.numel(), *x.shape[1:-2], page, x.shape[-1]), torch.nan)
    for b, row in enumerate(table.tolist()):
        for i, block in enumerate(row):
            if block >= 0:
                part = x[b, ..., i * page : (i + 1) * page, :]
                blocks[block, ..., : part.shape[-2], :] = part
    return blocks


def from_pages(blocks: Tensor, table: Tensor, like: Tensor) -> Tensor:
    """The inverse of :func:`to_pages`."""
    x = torch.full_like(like, torch.nan)
    page = blocks.shape[-2]
    for b, row in enumerate(table.tolist()):
        for i, block in enumerate(row):
            if block >= 0:
                part = x[b, ..., i * page : (i + 1) * page, :]
                part.copy_(blocks[block, ..., : part.shape[-2], :])
    return x


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, where numbers; not-a-numbers at the same places."""
    return torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def check(setting: Setting, limit: float | None = None, **options: Any) -> Tensor:
    """One call: its output, the appended tokens, and that nothing else has changed."""
    s = setting
    limit = limit or CLOSENESS[s.dtype]
    k_past, v_past = s.history(1), s.history(2)
    q, k_new, v_new = s.fresh(s.heads, 3), s.fresh(s.kv_heads, 4), s.fresh(s.kv_heads, 5)
    lengths = int32(s.lengths)
    if s.page:
        used = [-(-(length + s.new) // s.page) for length in s.lengths]
        table = shuffled_table(len(s.lengths), -(-s.max_len // s.page), used)
        caches = [to_pages(x, table, s.page) for x in (k_past, v_past)]
        options["block_table"] = table
    else:
        caches = [k_past.clone(), v_past.clone()]
    before = [x.clone() for x in caches]
    o = flash_decode(
        q, k_new, v_new, *caches, lengths, rotary=s.rotary, scale=s.scale, **options
    )  # fmt: skip
    assert o.dtype == q.dtype
    assert lengths.tolist() == s.lengths, "lengths are the caller's"
    after = [x.clone() for x in caches]
    if s.page:
        caches = [from_pages(x, options["block_table"], k_past) for x in caches]
    for b, length in enumerate(s.lengths):
        positions = torch.arange(length, length + s.new, device=DEVICE)
        keys = rotated(k_new[b], positions, s.rotary)
        assert_close(caches[0][b, :, positions], keys, "appended keys", limit)
        assert torch.equal(caches[1][b, :, positions], v_new[b]), "appended values"
        expected = attention(
            rotated(q[b], positions, s.rotary),
            torch.cat([k_past[b, :, :length].double(), keys], dim=1),
            torch.cat([v_past[b, :, :length].double(), v_new[b].double()], dim=1),
            s.scale,
        )
        assert_close(o[b], expected, f"o of length {length}", limit)
        for cache, past in zip(caches, (k_past, v_past), strict=True):
            cache[b, :, positions] = past[b, :, positions]
    for cache, past in zip(caches, (k_past, v_past), strict=True):
        assert same(cache, past), "nothing else of the sequences' caches changes"
    written = sum(int((~x.isnan() & y.isnan()).sum()) for x, y in zip(after, before, strict=True))
    assert written == 2 * k_new.numel(), "nothing is written outside of them"
    return o


@dataclass(kw_only=True, slots=True)
class LatentSetting:
    """A latent cache that already holds the new tokens; ``lengths`` count them."""

    lengths: list[int]
    heads: int = 3
    new: int = 1
    rank: int = 32
    rope_dim: int = 16
    page: int = 0
    max_len: int = 80
    dtype: torch.dtype = torch.float32
    scale: float = 0.2


def check_latent(setting: LatentSetting, limit: float | None = None, **options: Any) -> Tensor:
    """One call of mla_decode against attention with keys [c, k_rope] and values c."""
    s = setting
    batch = len(s.lengths)
    cache = randn(batch, s.max_len, s.rank + s.rope_dim, dtype=s.dtype, seed=1)
    for one, length in zip(cache, s.lengths, strict=True):
        one[length:] = torch.nan
    q = randn(batch, s.heads, s.new, s.rank, dtype=s.dtype, seed=2)
    q_rope = randn(batch, s.heads, s.new, s.rope_dim, dtype=s.dtype, seed=3)
    held = cache
    if s.page:
        used = [-(-length // s.page) for length in s.lengths]
        table = shuffled_table(batch, -(-s.max_len // s.page), used)
        held = to_pages(cache, table, s.page)
        options["block_table"] = table
    before = held.clone()
    o = mla_decode(q, q_rope, held, int32(s.lengths), scale=s.scale, **options)
    assert o.dtype == q.dtype
    assert same(held, before), "the cache is only read"
    for b, length in enumerate(s.lengths):
        keys = cache[None, b, :length].double()
        queries = torch.cat([q[b], q_rope[b]], dim=-1).double()
        expected = attention(queries, keys, keys[..., : s.rank], s.scale).nan_to_num(0.0)
        assert_close(o[b], expected, f"o of length {length}", limit or CLOSENESS[s.dtype])
    return o


RAGGED = [0, 1, 15, 16, 17, 63, 64, 77]
"""Nothing, one token, and tile and block boundaries with their neighbours."""

PAGES = {"contiguous": 0, "blocks of 8": 8, "blocks of 16": 16, "blocks of 24": 24, "of 64": 64}


class TestFlashDecode:
    @pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
    @pytest.mark.parametrize("new", [1, 3])
    def test_ragged_lengths(self, new: int, page: int) -> None:
        check(Setting(lengths=RAGGED, heads=4, new=new, page=page, rotary=angles(80, 16)))

    @pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8, 16])
    @pytest.mark.parametrize("kv_heads", [1, 2])
    def test_grouped_queries(self, kv_heads: int, group_size: int) -> None:
        """With three new tokens, up to 48 rows: several tiles side by side."""
        heads = group_size * kv_heads
        check(Setting(lengths=[40, 3], heads=heads, kv_heads=kv_heads, new=3))

    def test_one_kv_head_of_many(self) -> None:
        check(Setting(lengths=[33], heads=70, kv_heads=1), num_splits=3)

    @pytest.mark.parametrize("dtype", CLOSENESS, ids=lambda dtype: str(dtype)[6:])
    @pytest.mark.parametrize("head_dim", [1, 16, 64, 80, 128, 256])
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

    @settings(max_examples=12, deadline=None, derandomize=True)
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
    """What a call without ``scale`` gives on the inputs of :func:`check`."""
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

    def test_a_sequence_of_nothing(self) -> None:
        assert (check_latent(LatentSetting(lengths=[20, 0]))[1] == 0).all()

    @settings(max_examples=10, deadline=None, derandomize=True)
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
        """What a kernel without a merge of its own leaves: attention over the keys of a piece."""
        from kernels.decode.merge_kernel import merge_kernel

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


class TestBadInput:
    """One line that names the argument, before anything is written."""

    FLASH: dict[str, tuple[dict[str, Any], str]] = {  # noqa: RUF012
        "dims": ({"q": (2, 4, 16)}, r"q is \[2, 4, 16\]: must be \[batch, heads, new"),
        "heads": ({"q": (2, 3, 1, 16)}, "k_new has 2 heads: must divide the 3 heads of q"),
        "head_dim": (
            {"q": (2, 4, 1, 300), "k_new": (2, 2, 1, 300)},
            "q has head_dim 300: must be 1 to 256",
        ),
        "new": ({"v_new": (2, 2, 2, 16)}, r"v_new is .*: must be \[2, 2, 1, 16\] float32"),
        "cache": ({"k_cache": (2, 2, 40, 8)}, r"k_cache is .*: must be \[2, 2, 40, 16\] float32"),
        "caches": ({"v_cache": (2, 2, 39, 16)}, r"v_cache is .*: must be \[2, 2, 40, 16\] float32"),
        "room": (
            dict.fromkeys(("k_new", "v_new"), (2, 2, 41, 16)) | {"q": (2, 4, 41, 16)},
            "q has 41 new tokens: must be 1 to 40, the cache's capacity",
        ),
    }

    @pytest.mark.parametrize("name", FLASH)
    def test_shapes(self, name: str) -> None:
        change, message = self.FLASH[name]
        shapes = {
            "q": (2, 4, 1, 16), "k_new": (2, 2, 1, 16), "v_new": (2, 2, 1, 16),
            "k_cache": (2, 2, 40, 16), "v_cache": (2, 2, 40, 16),
        } | change  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            flash_decode(*(randn(*shape) for shape in shapes.values()), int32([3, 4]))
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lengths": torch.tensor([3, 4])}, r"lengths is \[2\] int64 .*: must be \[2\] int32"),
            ({"block_table": torch.zeros(2, 3)}, r"block_table is .*: must be \[2, blocks\] int32"),
            ({"rotary": Rotary(torch.ones(9, 9), torch.ones(9, 9))}, "turns 18 entries: must be"),
            ({"rotary": Rotary(torch.ones(9, 4), torch.ones(9, 2))}, "rotary.sin is .*alike"),
            ({"num_splits": 0}, "num_splits is 0: must be 1 or more"),
            ({"out": torch.zeros(2, 4, 1, 8)}, r"out is .*: must be \[2, 4, 1, 16\]"),
            ({"q": torch.zeros(2, 4, 1, 16).int()}, "q is int32: must be one of float32, float16"),
            ({"k_cache": torch.zeros(2, 2, 16, 40).mT}, "k_cache has a last stride of 40"),
        ],
    )
    def test_arguments(self, options: dict[str, Any], message: str) -> None:
        if "rotary" in options and DEVICE == "cuda":
            old = options["rotary"]
            options = {"rotary": Rotary(old.cos.to(DEVICE), old.sin.to(DEVICE))}
        moved = {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in options.items()}
        given = {
            "q": randn(2, 4, 1, 16), "k_new": randn(2, 2, 1, 16), "v_new": randn(2, 2, 1, 16),
            "k_cache": randn(2, 2, 40, 16), "v_cache": randn(2, 2, 40, 16),
            "lengths": int32([3, 4]),
        }  # fmt: skip
        cache = given["k_cache"].clone()
        with pytest.raises(ValueError, match=message) as error:
            flash_decode(**(given | moved))
        assert "\n" not in str(error.value)
        assert torch.equal(given["k_cache"], cache)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"q_rope": torch.zeros(2, 4, 2, 8)}, r"q_rope is .*: must be \[2, 4, 1, 8\]"),
            (
                {"latent_cache": torch.zeros(2, 40, 16)},
                r"latent_cache is .*: must be \[2, 40, 24\]",
            ),
            ({"latent_cache": torch.zeros(2, 1, 40, 24)}, r"must be \[batch, max_len, rank"),
            ({"block_table": torch.zeros(1, 3).int()}, r"block_table is .*: must be \[2, blocks\]"),
        ],
    )
    def test_latent(self, options: dict[str, Any], message: str) -> None:
        given = {
            "q_latent": randn(2, 4, 1, 16), "q_rope": randn(2, 4, 1, 8),
            "latent_cache": randn(2, 40, 24), "lengths": int32([3, 4]), "scale": 0.2,
        }  # fmt: skip
        moved = {name: x.to(DEVICE) for name, x in options.items()}
        with pytest.raises(ValueError, match=message):
            mla_decode(**(given | moved))

    def test_implementation(self) -> None:
        tensors = randn(1, 4, 1, 16), randn(1, 4, 1, 8), randn(1, 40, 24), int32([3])
        with pytest.raises(ValueError, match="implementation is fast: must be auto, hopper or"):
            mla_decode(*tensors, scale=0.2, implementation="fast")
        with pytest.raises(ValueError, match="implementation is hopper: "):
            mla_decode(*tensors, scale=0.2, implementation="hopper")


class TestTiles:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from kernels.decode import configs

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(configs, "device_facts", lambda device: ("Some GPU", 10, 99 * 1024))
        configs._users.cache_clear()

    def call(self, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16, heads: int = 4) -> Any:
        from kernels.decode.call import Call

        return Call(
            device=torch.device("cpu"), dtype=dtype, batch_size=1, num_heads=heads, num_kv_heads=1,
            new=1, head_dim=head_dim, capacity=64, page=0, rope_dim=64,
        )  # fmt: skip

    def test_the_users_table_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import json
        from dataclasses import asdict

        from kernels.decode import configs

        row = configs.shape_class("flash", self.call())
        assert row == "flash/16bit/d128/rows16"
        rule = configs.choose("flash", self.call(), interpreted=False)
        assert rule == configs.flash_rule(self.call(), 99 * 1024)
        pinned, mine = (
            configs.Tiles(block_m=16, block_n=n, num_warps=4, num_stages=2, programs_per_sm=3)
            for n in (32, 256)
        )
        monkeypatch.setattr(configs, "_pinned", lambda: {"Some GPU": {row: pinned}})
        assert configs.choose("flash", self.call(), interpreted=False) == pinned
        path = configs.user_table_path("Some GPU")
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({row: asdict(mine)}), encoding="utf-8")
        configs._users.cache_clear()
        assert configs.choose("flash", self.call(), interpreted=False) == mine
        path.write_text("{", encoding="utf-8")
        configs._users.cache_clear()
        with pytest.warns(UserWarning, match="ignored, not a table"):
            assert configs.choose("flash", self.call(), interpreted=False) == pinned

    @pytest.mark.parametrize("shared_memory_kib", [64, 99, 163, 227])
    def test_rules_fit(self, shared_memory_kib: int) -> None:
        from kernels.decode import configs

        for dtype in CLOSENESS:
            for head_dim in (16, 64, 128, 256):
                for heads in (1, 16, 128):
                    call = self.call(head_dim, dtype, heads)
                    tiles = configs.flash_rule(call, shared_memory_kib * 1024)
                    row_bytes = head_dim * dtype.itemsize
                    buffers = max(1, tiles.num_stages - 1)
                    held = (tiles.block_m + 2 * buffers * tiles.block_n) * row_bytes
                    assert held <= shared_memory_kib * 1024
            for heads in (1, 16, 128):
                call = self.call(512, dtype, heads)
                tiles = configs.latent_rule(call, shared_memory_kib * 1024)
                width = (512 + 64) * dtype.itemsize
                buffers = max(1, tiles.num_stages - 1)
                held = (tiles.block_m + buffers * tiles.block_n) * width
                assert held <= shared_memory_kib * 1024 or tiles.block_n == 16

    def test_shipped_table(self) -> None:
        from kernels.decode import configs

        rows = configs._pinned()["NVIDIA H200"]
        known = {
            configs.shape_class(kernel, self.call(head_dim, heads=heads))
            for kernel, head_dim, heads in (
                ("flash", 64, 4), ("flash", 128, 4), ("flash", 256, 4), ("latent", 512, 128),
            )
        }  # fmt: skip
        assert set(rows) == known
