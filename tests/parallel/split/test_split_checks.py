"""What the library refuses: in one line, on all ranks, whichever of them is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor

from parallel.split import release, shard, shard_stream, split_attention, stream_attention, unshard

Call = dict[str, Any]


def tensors(call: Call) -> list[Tensor]:
    """q, k, v of the shapes and dtypes that a call names; by default [1, 8, 2, 4]."""
    shapes = {name: call.pop(name, call.get("shape", (1, 8, 2, 4))) for name in "qkv"}
    dtypes = {name: call.pop(f"{name}_dtype", torch.float32) for name in "qkv"}
    call.pop("shape", None)
    found = [torch.zeros(shapes[name], dtype=dtypes[name]) for name in "qkv"]
    return [x.requires_grad_() for x in found] if call.pop("grad", False) else found


def message_of(group: dist.ProcessGroup, calls: list[Call]) -> str:
    """What this rank raises, called as its entry says."""
    call = dict(calls[dist.get_rank(group)])
    scheme, own = call.pop("scheme", "zigzag"), tensors(call)
    arguments = {"causal": True, "group": group, **call}
    try:
        if scheme == "stream":
            stream_attention(*own, **arguments)
        else:
            split_attention(scheme, *own, **arguments)
    except ValueError as error:
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


def messages(num_ranks: int, *calls: Call) -> set[str]:
    """What the ranks raise, all of them the same; the last call is that of all further ranks."""
    by_rank = [calls[min(rank, len(calls) - 1)] for rank in range(num_ranks)]
    found = set(on_ranks(num_ranks, message_of, by_rank))
    assert all("\n" not in message for message in found)
    return found


PACKED = (9, 2, 4)

WRONG: dict[str, tuple[Call, str]] = {
    "offsets of parts": (
        {"shape": PACKED, "cu_seqlens": [0, 4, 9]},
        "rank 0: cu_seqlens ends at 9, the tokens of one rank's part: must count those of whole "
        "sequences, over all ranks",
    ),
    "lengths that do not add up": (
        {"shape": PACKED, "cu_seqlens": [0, 8, 20]},
        "rank 0: q has 9 tokens, and one of 2 parts of sequences of 8, 12 has 10: lengths must "
        "add up",
    ),
    "other keys": (
        {"shape": (8, 2, 4), "cu_seqlens": [0, 8, 16], "cu_seqlens_k": [0, 4, 16]},
        "rank 0: cu_seqlens_k has sequences of 4, 12, cu_seqlens of 8, 8: queries and keys of "
        "split sequences are the same tokens",
    ),
    "offsets that begin elsewhere": (
        {"shape": (8, 2, 4), "cu_seqlens": [1, 16]},
        "rank 0: cu_seqlens is 1, 16: must begin at 0 and not decrease",
    ),
    "offsets that decrease": (
        {"shape": (8, 2, 4), "cu_seqlens": [0, 20, 16]},
        "rank 0: cu_seqlens is 0, 20, 16: must begin at 0 and not decrease",
    ),
    "offsets in floats": (
        {"shape": (8, 2, 4), "cu_seqlens": torch.tensor([0.0, 16.0])},
        "rank 0: cu_seqlens is float32 [2]: must be int32 or int64 [sequences + 1]",
    ),
    "both kinds of offsets": (
        {"shape": (8, 2, 4), "cu_seqlens": [0, 16], "local_cu_seqlens": [0, 8]},
        "rank 0: cu_seqlens and local_cu_seqlens: give whole sequences or parts, not both",
    ),
    "a full mask with padding": (
        {"scheme": "ring", "causal": False, "length": 15},
        "rank 0: ring_attention: 15 tokens do not divide by 2, and without a causal mask the "
        "padding would be attended to",
    ),
    "a full mask with packed padding": (
        {"scheme": "llama3", "shape": (8, 2, 4), "causal": False, "cu_seqlens": [0, 7, 14]},
        "rank 0: causal=False: a sequence of 7 tokens does not divide by 2, and without a causal "
        "mask its padding would be attended to",
    ),
    "a full mask that a layout does not balance": (
        {"causal": False},
        "rank 0: zigzag_attention: zigzag balances a causal mask; without one use ring or llama3",
    ),
    "an odd zigzag part": (
        {"shape": (1, 7, 2, 4)},
        "rank 0: q has 7 tokens: a zigzag part is made of 2 equal chunks",
    ),
    "an odd zigzag part of a packed batch": (
        {"shape": (8, 2, 4), "local_cu_seqlens": [0, 3, 8]},
        "rank 0: local_cu_seqlens has a part of 3 tokens: a zigzag part is made of 2 equal chunks",
    ),
    "a length of another part": (
        {"length": 23},
        "rank 0: length=23: its part on one of 2 ranks has 12 tokens, and q has 8",
    ),
    "other tokens in k": (
        {"k": (1, 6, 2, 4), "v": (1, 6, 2, 4)},
        "rank 0: q has 8 tokens, k 6: queries and keys of split sequences are the same tokens",
    ),
    "another shape of v": (
        {"v": (1, 8, 2, 6)},
        "rank 0: k has shape [1, 8, 2, 4], v [1, 8, 2, 6]: must be the same",
    ),
    "heads that do not divide": (
        {"q": (1, 8, 3, 4)},
        "rank 0: q has 3 heads, k and v 2: must divide those of q",
    ),
    "mixed dtypes": (
        {"k_dtype": torch.bfloat16},
        "rank 0: q, k and v are float32, bfloat16 and float32: must be of one dtype, or under "
        "torch.autocast, which casts them",
    ),
    "doubles": (
        {"q_dtype": torch.float64},
        "rank 0: q is float64: must be one of float32, bfloat16, float16",
    ),
    "a packed batch without offsets": (
        {"shape": (8, 2, 4)},
        "rank 0: q has shape [8, 2, 4]: must be [B, S, H, D], layout=bshd",
    ),
    "an unknown layout": (
        {"layout": "sbhd"},
        "rank 0: layout='sbhd': must be one of bshd, bhsd",
    ),
    "no tokens": (
        {"shape": (0, 2, 4), "cu_seqlens": [0, 0]},
        "rank 0: q has shape [0, 2, 4]: no tokens to attend with",
    ),
    "an unknown kernel": (
        {"kernel": "zigzag"},
        "rank 0: attention.kernel=zigzag: must be an attention on one device, such as "
        "flash_triton or sdpa_flash",
    ),
    "too few heads": (
        {"scheme": "ulysses", "shape": (1, 8, 1, 4)},
        "rank 0: ulysses_attention: 1 query heads are too few for 2 ranks, which attend with at "
        "least one each",
    ),
    "no scheme": (
        {"scheme": "naive"},
        "rank 0: scheme='naive': attends on one device; must be one of ",
    ),
    "no such option": (
        {"heads": 2},
        "rank 0: zigzag_attention(heads=...): its options are kernel, transport",
    ),
    "no such comparison": (
        {"compare": "never"},
        "rank 0: compare='never': must be one of new, every",
    ),
    "a stream with offsets of parts": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 3, 8]},
        "rank 0: cu_seqlens ends at 8, the tokens of one rank's part: must count those of whole "
        "sequences, over all ranks",
    ),
    "a stream whose lengths do not add up": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 3, 18]},
        "rank 0: q has 8 tokens, and one of 2 parts of sequences of 3, 15 has 9: lengths must "
        "add up",
    ),
    "other keys in a stream": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 16], "cu_seqlens_k": [0, 8]},
        "rank 0: cu_seqlens_k has sequences of 8, cu_seqlens of 16: queries and keys of split "
        "sequences are the same tokens",
    ),
    "a stream's kernel without packed batches": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 16], "kernel": "sdpa_flash"},
        "rank 0: stream_attention: kernel=sdpa_flash: takes no packed batch of different lengths",
    ),
    "a stream's kernel over ranks": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 16], "kernel": "ring"},
        "rank 0: kernel=ring: must be an attention on one device",
    ),
    "heads at once that do not divide": (
        {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 16], "kv_heads_at_once": 3},
        "rank 0: kv_heads_at_once=3: must divide the 2 KV heads",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call(name: str) -> None:
    call, message = WRONG[name]
    for found in messages(2, call):
        assert found.startswith(message)


@pytest.mark.parametrize("name", ["offsets of parts", "mixed dtypes", "no such option"])
def test_one_wrong_rank_stops_all(name: str) -> None:
    """The others, whose own calls are right, raise what it raises."""
    call, message = WRONG[name]
    (found,) = messages(3, {"shape": (8, 2, 4), "cu_seqlens": [0, 24]}, call)
    assert found.startswith(message.replace("rank 0", "rank 1"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"shape": (1, 12, 2, 4)}),
        ({}, {"q_dtype": torch.bfloat16, "k_dtype": torch.bfloat16, "v_dtype": torch.bfloat16}),
        ({}, {"scheme": "striped"}),
        ({}, {"kernel": "naive"}),
        ({}, {"scale": 0.5}),
        ({}, {"grad": True}),
        ({}, {"layout": "bhsd"}),
        ({"length": 15}, {"length": 16}),
        ({"scheme": "ring"}, {"scheme": "ring", "causal": False}),
        (
            {"shape": (8, 2, 4), "cu_seqlens": [0, 4, 16]},
            {"shape": (8, 2, 4), "cu_seqlens": [0, 12, 16]},
        ),
        (
            {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 4, 16]},
            {"scheme": "stream", "shape": (8, 2, 4), "cu_seqlens": [0, 12, 16]},
        ),
    ],
    ids=lambda call: ",".join(call) or "plain",
)
def test_ranks_that_differ(one: Call, other: Call) -> None:
    (message,) = messages(2, one, other)
    assert message.startswith("ranks disagree on what they attend to: rank 0 has [")


def changing_shapes(group: dist.ProcessGroup, compare: str, lengths: list[list[int]]) -> list[str]:
    """What each of this rank's calls raises."""
    found = []
    for length in lengths[dist.get_rank(group)]:
        q = torch.zeros(1, length, 2, 4)
        try:
            split_attention("ring", q, q, q, causal=True, compare=compare, group=group)
            found.append("")
        except ValueError as error:
            found.append(str(error).partition(":")[0])
    release(group)
    return found


class TestLaterCalls:
    def test_each_new_shape_is_compared(self) -> None:
        differ = "ranks disagree on what they attend to"
        found = on_ranks(2, changing_shapes, "new", [[8, 8, 12, 8], [8, 8, 16, 8]])
        assert found == [["", "", differ, ""]] * 2

    def test_every_call_is_compared_if_asked(self) -> None:
        """Also where a rank repeats a shape that the ranks have agreed on, and another has not."""
        differ = "ranks disagree on what they attend to"
        found = on_ranks(2, changing_shapes, "every", [[8, 12, 8, 8], [8, 12, 12, 8]])
        assert found == [["", "", differ, ""]] * 2


def comparisons(group: dist.ProcessGroup) -> int:
    """All-gathers of statements in five calls of two layers' shapes."""
    count = 0
    original = dist.all_gather

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        return original(*arguments, **more)

    starts = torch.tensor([0, 8, 16], dtype=torch.int32)
    q = torch.zeros(8, 2, 4)
    dist.all_gather = counted
    try:
        for _ in range(5):
            split_attention("ring", q, q, q, causal=True, cu_seqlens=starts, group=group)
            stream_attention(q, q, q, causal=True, cu_seqlens=starts, group=group)
    finally:
        dist.all_gather = original
        release(group)
    return count


def test_known_calls_are_not_compared() -> None:
    assert on_ranks(2, comparisons) == [2, 2]


def helper_messages(group: dist.ProcessGroup) -> list[str]:
    found = []
    x = torch.zeros(1, 7, 2)
    rank = dist.get_rank(group)
    for call in (
        lambda: shard(x, "zigzag", dim=1, group=group),
        lambda: shard_stream(x, dim=1, group=group),
        lambda: unshard(x[:, : 6 + rank], "ring", dim=1, group=group),
        lambda: unshard(x, "ring", dim=1, length=20, group=group),
        lambda: shard(x, "ring", dim=1, group=dist.GroupMember.NON_GROUP_MEMBER),
    ):
        try:
            call()
            found.append("nothing was raised")
        except ValueError as error:
            found.append(str(error))
    release(group)
    return found


def test_helpers() -> None:
    for found in on_ranks(2, helper_messages):
        assert found[0] == (
            "7 tokens do not divide by 4, as zigzag over 2 ranks needs: give pad_value="
        )
        assert found[1] == "7 tokens do not divide by 2 ranks: give pad_value="
        assert found[2].startswith("ranks disagree")
        assert found[3] == "rank 0: x has 7 tokens along dim 1, and a part of 20 has 10"
        assert found[4] == "group: must be a process group that this process is a member of"


def test_no_process_group() -> None:
    q = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match=r"no process group: call torch\.distributed\.init"):
        split_attention("ring", q, q, q)
