"""Parts of whole tensors: shards and their inverse, positions, offsets, labels."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import on_ranks

from parallel.split import (
    local_cu_seqlens,
    next_token_labels,
    position_ids,
    shard,
    shard_stream,
    unshard,
    unshard_stream,
)

SCHEMES = (
    *("ring", "zigzag", "striped", "llama3", "zigzag_llama3"),
    *("ulysses", "ulysses_ring", "ulysses_zigzag"),
)

STARTS = [0, 24, 31, 31, 44]


def there_and_back(group: dist.ProcessGroup, scheme: str) -> list[bool]:
    dense = torch.arange(2 * 23 * 3).reshape(2, 23, 3)
    packed = torch.arange(44 * 3).reshape(44, 3)
    own = shard(dense, scheme, dim=1, pad_value=-1, group=group)
    mine = shard(packed, scheme, dim=0, cu_seqlens=STARTS, pad_value=-1, group=group)
    stream = shard_stream(packed, pad_value=-1, group=group)
    return [
        torch.equal(unshard(own, scheme, dim=1, length=23, group=group), dense),
        torch.equal(unshard(mine, scheme, dim=0, cu_seqlens=STARTS, group=group), packed),
        torch.equal(unshard_stream(stream, length=44, group=group), packed),
        len(mine) == int(local_cu_seqlens(scheme, STARTS, group=group)[-1]),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_unshard_is_the_inverse(scheme: str, num_ranks: int) -> None:
    assert on_ranks(num_ranks, there_and_back, scheme) == [[True] * 4] * num_ranks


def positions_of(group: dist.ProcessGroup, scheme: str) -> list[bool]:
    whole = torch.arange(24)
    each = torch.cat([torch.arange(length) for length in (24, 7, 0, 13)])
    starts = torch.tensor(STARTS)
    own = position_ids(scheme, cu_seqlens=starts, group=group)
    want = shard(each, scheme, dim=0, cu_seqlens=starts, pad_value=-1, group=group)
    return [
        torch.equal(
            position_ids(scheme, length=24, group=group), shard(whole, scheme, dim=0, group=group)
        ),
        torch.equal(own[want >= 0], want[want >= 0]),
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_positions_go_where_tokens_go(scheme: str) -> None:
    assert on_ranks(3, positions_of, scheme) == [[True, True]] * 3


class TestLabels:
    def test_of_a_dense_batch(self) -> None:
        tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
        assert next_token_labels(tokens).tolist() == [[2, 3, -100], [5, 6, -100]]

    def test_of_a_packed_batch(self) -> None:
        tokens = torch.tensor([1, 2, 3, 4, 5, 6])
        starts = [0, 0, 2, 2, 5, 6, 6]
        labels = next_token_labels(tokens, cu_seqlens=starts, ignore_index=-1)
        assert labels.tolist() == [2, -1, 4, 5, -1, -1]

    def test_of_no_tokens(self) -> None:
        assert next_token_labels(torch.zeros(2, 0)).shape == (2, 0)


def border_labels(group: dist.ProcessGroup) -> list[int]:
    tokens = torch.arange(8)
    return shard_stream(next_token_labels(tokens, cu_seqlens=[0, 6, 8]), group=group).tolist()


def test_labels_reach_over_borders_of_ranks() -> None:
    assert on_ranks(4, border_labels) == [[1, 2], [3, 4], [5, -100], [7, -100]]


def test_positions_need_lengths_of_one_kind() -> None:
    assert all(on_ranks(1, neither))


def neither(group: dist.ProcessGroup) -> bool:
    with pytest.raises(ValueError, match="give length= or cu_seqlens="):
        position_ids("ring", group=group)
    return True


def run_the_page(group: dist.ProcessGroup, code: str) -> dict[str, list[int]]:
    names: dict[str, object] = {}
    exec(compile(code, "docs/library.md", "exec"), names)
    return {
        name: list(x.shape) for name, x in names.items() if isinstance(x, torch.Tensor)
    }  # fmt: skip


def test_the_page_runs_as_it_stands() -> None:
    """Its blocks of Python, in order, on four ranks."""
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL))
    assert code.count("_attention(") >= 2
    for shapes in on_ranks(4, run_the_page, code):
        assert shapes["labels"] == [2, 16]
        assert shapes["lse"] == [4, 4]
        assert shapes["o"] == [2, 4, 16, 16]


def parts_of_nothing(group: dist.ProcessGroup) -> list[list[int]]:
    x = torch.zeros(0, 3)
    own = shard(x, "zigzag", dim=0, cu_seqlens=[0, 0], group=group)
    positions = position_ids("zigzag", cu_seqlens=[0, 0], group=group)
    return [list(own.shape), list(positions.shape)]


def test_no_tokens() -> None:
    assert on_ranks(2, parts_of_nothing) == [[[0, 3], [0]]] * 2


def hybrid_parts(group: dist.ProcessGroup) -> list[bool]:
    """The layout of a hybrid follows how many ranks exchange heads."""
    x = torch.arange(24)
    found = []
    for degree in (1, 2, 4):
        own = shard(x, "ulysses_zigzag", dim=0, group=group, ulysses=degree)
        at = position_ids("ulysses_zigzag", length=24, group=group, ulysses=degree)
        joined = unshard(own, "ulysses_zigzag", dim=0, group=group, ulysses=degree)
        found += [torch.equal(own, at), torch.equal(joined, x)]
    zigzag = position_ids("zigzag", length=24, group=group)
    return [
        *found,
        torch.equal(zigzag, position_ids("ulysses_zigzag", length=24, ulysses=1, group=group)),
    ]


def test_options_that_change_the_layout() -> None:
    assert on_ranks(4, hybrid_parts) == [[True] * 7] * 4


def wrong_sum(group: dist.ProcessGroup) -> str:
    with pytest.raises(ValueError, match="cu_seqlens ends at 9: x has 8 tokens") as raised:
        shard(torch.zeros(8), "ring", dim=0, cu_seqlens=[0, 9], group=group)
    return str(raised.value)


def test_lengths_must_add_up() -> None:
    assert len(on_ranks(1, wrong_sum)) == 1
