"""Windows, prefixes, caps and sinks of the library's functions, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from masked_split import CLOSENESS, MaskedBatch, exact
from ranks import on_ranks
from split_attention import SCALE
from torch import Tensor, nn

from parallel.split import (
    release,
    shard,
    shard_stream,
    split_attention,
    stream_attention,
)
from parallel.split.calls import scheme_of
from parallel.split.hugging_face import attention_function

SCHEMES = (
    *("ring", "zigzag", "striped", "llama3", "zigzag_llama3"),
    *("ulysses", "ulysses_ring", "ulysses_zigzag"),
)

MASKS: tuple[dict[str, Any], ...] = (
    {"window": 5, "softcap": 0.7},
    {"prefix_len": 7, "with_sinks": True},
)

KERNEL = {"kernel": "flash_torch"}


def own_parts(scheme: str, batch: MaskedBatch, tensors: Any, group: Any) -> list[Tensor]:
    """This rank's parts, of dense tensors as [B, H, S, D]."""
    if scheme == "stream":
        return [shard_stream(x, pad_value=0, group=group) for x in tensors]
    starts = batch.packing().cu_seqlens_q if batch.packed else None
    dim = 0 if batch.packed else 2
    return [shard(x, scheme, dim=dim, cu_seqlens=starts, pad_value=0, group=group) for x in tensors]


def arguments_of(batch: MaskedBatch) -> dict[str, Any]:
    found: dict[str, Any] = {
        "causal": batch.causal,
        "window": batch.window,
        "prefix_len": batch.prefix_len,
        "softcap": batch.softcap,
        "scale": SCALE,
    }
    return found | ({"cu_seqlens": batch.packing().cu_seqlens_q} if batch.packed else {})


def errors(group: dist.ProcessGroup, scheme: str, batch: MaskedBatch) -> dict[str, float]:
    """Of o, lse, gradients, and those of sinks summed over ranks."""
    q, k, v, do = own_parts(scheme, batch, batch.tensors(), group)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    sinks = batch.sinks()
    if sinks is not None:
        leaves.append(sinks.requires_grad_())
    arguments = {**arguments_of(batch), **KERNEL, "group": group, "sinks": sinks}
    if scheme == "stream":
        o, lse = stream_attention(*leaves[:3], **arguments, return_lse=True)
    else:
        dense = {} if batch.packed else {"layout": "bhsd"}
        o, lse = split_attention(scheme, *leaves[:3], **arguments, **dense, return_lse=True)
    gradients = torch.autograd.grad(o, leaves, do)
    release(group)
    expected, d_sinks = exact(batch)
    column = (lse.mT if batch.packed else lse).unsqueeze(-1)
    found = [o.detach(), column, *gradients[:3]]
    names = ("o", "lse", "dq", "dk", "dv")
    differences = {
        name: float((got - want).abs().max() / want.abs().max().clamp_min(0.1))
        for name, got, want in zip(
            names, found, own_parts(scheme, batch, expected, group), strict=True
        )
    }
    if d_sinks is not None:
        total = gradients[3].double()
        dist.all_reduce(total, group=group)
        differences["dsinks"] = float((total - d_sinks).abs().max() / d_sinks.abs().max())
    return differences


@pytest.mark.parametrize("scheme", SCHEMES)
def test_functions_of_schemes(scheme: str) -> None:
    for mask in MASKS:
        for batch in (
            MaskedBatch(lengths=(24, 24), **mask),
            MaskedBatch(lengths=(24, 8), packed=True, **mask),
        ):
            for found in on_ranks(4, errors, scheme, batch):
                assert max(found.values()) < CLOSENESS[torch.float32], found


@pytest.mark.parametrize("scheme", ["stream", "documents"])
def test_packed_batches_alone(scheme: str) -> None:
    for mask in MASKS:
        # A window and a prefix that reach over the edges of ranks.
        for lengths in ((24, 3, 9), (5, 31), (36,)):
            batch = MaskedBatch(lengths=lengths, packed=True, **mask)
            for found in on_ranks(3, errors, scheme, batch):
                assert max(found.values()) < CLOSENESS[torch.float32], found


class Layer(nn.Module):
    is_causal = True


def errors_of_a_model(group: dist.ProcessGroup, batch: MaskedBatch) -> float:
    """Called as transformers does for a model with a window, a cap and sinks."""
    q, k, v, _ = own_parts("zigzag", batch, batch.tensors(), group)
    attend = attention_function(_zigzag, group=group, **KERNEL)
    more = {"sliding_window": batch.window, "softcap": batch.softcap, "s_aux": batch.sinks()}
    o, _ = attend(Layer(), q, k, v, None, scaling=SCALE, **more)
    release(group)
    want = own_parts("zigzag", batch, exact(batch)[0][:1], group)[0]
    return float((o.transpose(1, 2) - want).abs().max())


def _zigzag(*tensors: Tensor, **arguments: Any) -> Any:
    return split_attention("zigzag", *tensors, **arguments)


def test_what_a_model_of_transformers_passes() -> None:
    batch = MaskedBatch(lengths=(24,), window=5, softcap=0.7, with_sinks=True)
    assert max(on_ranks(3, errors_of_a_model, batch)) < CLOSENESS[torch.float32]


def message(group: dist.ProcessGroup, scheme: str, arguments: dict[str, Any]) -> str:
    """What is raised; rank 0 alone asks for ``of_rank_0``."""
    more = dict(arguments)
    of_first = more.pop("of_rank_0", {})
    if dist.get_rank(group) == 0:
        more |= of_first
    x = torch.zeros(4, 2, 8) if scheme == "stream" else torch.zeros(1, 4, 2, 8)
    try:
        if scheme == "stream":
            stream_attention(x, x, x, cu_seqlens=[0, 8], group=group, **more)
        else:
            split_attention(scheme, x, x, x, group=group, **more)
    except ValueError as error:
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("scheme", "arguments", "reason"),
    [
        ("ring", {"window": 0}, "rank 0: window=0: must be at least 1"),
        ("ring", {"prefix_len": 3}, "rank 0: prefix_len=3: needs a causal mask"),
        ("ring", {"softcap": 0.0}, "rank 0: softcap=0.0: must be a positive number"),
        ("ring", {"softcap": "abc"}, "rank 0: softcap=abc: must be a positive number"),
        ("ring", {"softcap": True}, "rank 0: softcap=True: must be a positive number"),
        ("ring", {"window": 2.5}, "rank 0: window=2.5: must be a whole number"),
        ("ring", {"sinks": [0.0, 1.0]}, "rank 0: sinks is list: must be a tensor with a number "),
        ("ring", {"sinks": torch.zeros(3)}, "rank 0: sinks is float32 [3]: must be a number for "),
        ("stream", {"window": 3}, "rank 0: window=3: needs causal=True in a stream"),
        (
            "llama3",
            {"causal": True, "window": 3, "kernel": "sdpa_flash"},
            "rank 0: llama3_attention: attention.kernel=sdpa_flash: takes no attention.window=3",
        ),
        (
            "ring",
            {"causal": True, "of_rank_0": {"window": 3}},
            "ranks disagree on what they attend to: rank 0 has [1, 4, 2, 8] float32",
        ),
    ],
)
def test_refusals(scheme: str, arguments: dict[str, Any], reason: str) -> None:
    for found in on_ranks(2, message, scheme, arguments):
        assert found.startswith(reason)


def test_a_mask_is_an_argument_of_calls_and_no_option() -> None:
    with pytest.raises(ValueError, match=r"zigzag_attention\(window=...\): its options are"):
        scheme_of("zigzag", (("window", 5),))
