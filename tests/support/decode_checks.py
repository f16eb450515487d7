"""Checks of the decode kernels: outputs against float64 attention, and all that they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton_device import CLOSENESS, DEVICE, randn

from kernels.decode import Rotary, flash_decode, mla_decode


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


def check(
    setting: Setting,
    limit: float | None = None,
    *,
    num_splits: int | None = None,
    also_split: Sequence[int] = (),
) -> Tensor:
    """One call: its output, the appended tokens, and that nothing else has changed.

    The same again with each number of splits in ``also_split``, against the same reference.
    """
    s = setting
    limit = limit or CLOSENESS[s.dtype]
    k_past, v_past = s.history(1), s.history(2)
    q, k_new, v_new = s.fresh(s.heads, 3), s.fresh(s.kv_heads, 4), s.fresh(s.kv_heads, 5)
    lengths = int32(s.lengths)
    before, table = [k_past, v_past], None
    if s.page:
        used = [-(-(length + s.new) // s.page) for length in s.lengths]
        table = shuffled_table(len(s.lengths), -(-s.max_len // s.page), used)
        before = [to_pages(x, table, s.page) for x in before]
    outputs, keys = [], []
    for b, length in enumerate(s.lengths):
        positions = torch.arange(length, length + s.new, device=DEVICE)
        keys.append(rotated(k_new[b], positions, s.rotary))
        outputs.append(
            attention(
                rotated(q[b], positions, s.rotary),
                torch.cat([k_past[b, :, :length].double(), keys[-1]], dim=1),
                torch.cat([v_past[b, :, :length].double(), v_new[b].double()], dim=1),
                s.scale,
            )
        )
    for splits in (*also_split, num_splits):
        caches = [x.clone() for x in before]
        o = flash_decode(
            q, k_new, v_new, *caches, lengths, rotary=s.rotary, scale=s.scale,
            block_table=table, num_splits=splits,
        )  # fmt: skip
        assert o.dtype == q.dtype
        assert lengths.tolist() == s.lengths, "lengths are the caller's"
        written = sum(
            int((~x.isnan() & y.isnan()).sum()) for x, y in zip(caches, before, strict=True)
        )
        assert written == 2 * k_new.numel(), "nothing is written outside of them"
        if table is not None:
            caches = [from_pages(x, table, k_past) for x in caches]
        for b, length in enumerate(s.lengths):
            positions = torch.arange(length, length + s.new, device=DEVICE)
            assert_close(o[b], outputs[b], f"o of length {length}", limit)
            assert_close(caches[0][b, :, positions], keys[b], "appended keys", limit)
            assert torch.equal(caches[1][b, :, positions], v_new[b]), "appended values"
            for cache, past in zip(caches, (k_past, v_past), strict=True):
                cache[b, :, positions] = past[b, :, positions]
        for cache, past in zip(caches, (k_past, v_past), strict=True):
            assert same(cache, past), "nothing else of the sequences' caches changes"
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


def check_latent(
    setting: LatentSetting,
    limit: float | None = None,
    *,
    implementation: str = "auto",
    num_splits: int | None = None,
    also_split: Sequence[int] = (),
) -> Tensor:
    """One call of mla_decode against attention with keys [c, k_rope] and values c.

    The same again with each number of splits in ``also_split``, against the same reference.
    """
    s = setting
    batch = len(s.lengths)
    cache = randn(batch, s.max_len, s.rank + s.rope_dim, dtype=s.dtype, seed=1)
    for one, length in zip(cache, s.lengths, strict=True):
        one[length:] = torch.nan
    q = randn(batch, s.heads, s.new, s.rank, dtype=s.dtype, seed=2)
    q_rope = randn(batch, s.heads, s.new, s.rope_dim, dtype=s.dtype, seed=3)
    held, table = cache, None
    if s.page:
        used = [-(-length // s.page) for length in s.lengths]
        table = shuffled_table(batch, -(-s.max_len // s.page), used)
        held = to_pages(cache, table, s.page)
    before = held.clone()
    outputs = []
    for b, length in enumerate(s.lengths):
        keys = cache[None, b, :length].double()
        queries = torch.cat([q[b], q_rope[b]], dim=-1).double()
        outputs.append(attention(queries, keys, keys[..., : s.rank], s.scale).nan_to_num(0.0))
    for splits in (*also_split, num_splits):
        o = mla_decode(
            q, q_rope, held, int32(s.lengths), scale=s.scale, block_table=table,
            implementation=implementation, num_splits=splits,
        )  # fmt: skip
        assert o.dtype == q.dtype
        assert same(held, before), "the cache is only read"
        for b, length in enumerate(s.lengths):
            assert_close(o[b], outputs[b], f"o of length {length}", limit or CLOSENESS[s.dtype])
    return o


RAGGED = [0, 1, 15, 16, 17, 63, 64, 77]
"""Nothing, one token, and tile and block boundaries with their neighbours."""

PAGES = {"contiguous": 0, "blocks of 8": 8, "blocks of 16": 16, "blocks of 24": 24, "of 64": 64}
