"""PyTorch's attention over split sequences, and the example that trains a model with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from split_attention import CLOSENESS, SCALE, Batch, exact
from torch.utils.checkpoint import checkpoint

from parallel.examples import split_training as example
from parallel.split import release, shard, split_attention, split_sdpa

SCHEMES = (
    *("ring", "zigzag", "striped", "llama3", "zigzag_llama3"),
    *("ulysses", "ulysses_ring", "ulysses_zigzag"),
)

WHOLE = F.scaled_dot_product_attention


def errors(group: dist.ProcessGroup, scheme: str, packed: bool, recomputes: bool) -> list[float]:
    """Of o, dq, dk and dv; backward runs after the context unless it computes forward again."""
    batch = Batch(lengths=(24, 12) if packed else (24, 24), packed=packed)
    starts = batch.packing().cu_seqlens_q if packed else None

    def own(x: torch.Tensor) -> torch.Tensor:
        part = shard(x, scheme, dim=0 if packed else 2, cu_seqlens=starts, group=group)
        return part.transpose(0, 1).unsqueeze(0) if packed else part

    q, k, v, do = (own(x) for x in batch.tensors())
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            *tensors, is_causal=True, scale=SCALE, enable_gqa=True
        )

    # One whose kernel calls PyTorch's function itself, where that can be.
    options = {"kernel": "sdpa"} if scheme == "ulysses" and not packed else {}
    with split_sdpa(scheme, cu_seqlens=starts, group=group, **options):
        if recomputes:
            o = checkpoint(attend, *leaves, use_reentrant=False)
            found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        else:
            o = attend(*leaves)
    if not recomputes:
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
    assert F.scaled_dot_product_attention is WHOLE
    return [
        float((got - want).abs().max() / want.abs().max())
        for got, want in zip(found, map(own, exact(batch)), strict=True)
    ]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_and_gradients(scheme: str, packed: bool, recomputes: bool) -> None:
    for found in on_ranks(2, errors, scheme, packed, recomputes):
        assert max(found) < CLOSENESS


def nested(group: dist.ProcessGroup) -> list[float]:
    """Errors of a scheme whose kernel calls PyTorch's function, inside the context of another."""
    batch = Batch(lengths=(24,))
    whole = exact(batch)[0]
    q, k, v = (shard(x, "ulysses", dim=2, group=group) for x in batch.tensors()[:3])
    want = shard(whole, "ulysses", dim=2, group=group)
    arguments: dict[str, Any] = {"scale": SCALE, "enable_gqa": True, "is_causal": True}
    with split_sdpa("ring", group=group):
        with split_sdpa("ulysses", group=group, kernel="sdpa"):
            inner = F.scaled_dot_product_attention(q, k, v, **arguments)
        outer = F.scaled_dot_product_attention(q, k, v, **arguments)
        called = split_attention(
            *("ulysses", q, k, v),
            causal=True,
            scale=SCALE,
            layout="bhsd",
            kernel="sdpa",
            group=group,
        )
    assert F.scaled_dot_product_attention is WHOLE
    return [float((o - want).abs().max()) for o in (inner, outer, called)]


def test_one_context_in_another() -> None:
    for found in on_ranks(2, nested):
        assert max(found) < 1e-5


def compiled_errors(group: dist.ProcessGroup) -> list[float]:
    """Of a compiled function before, inside and after, and how far inside is from before."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x * 2, x, x, is_causal=True) + 1

    compiled = torch.compile(attend, backend="eager")
    torch.manual_seed(0)
    x = shard(torch.randn(1, 2, 16, 4), "ring", dim=2, group=group)
    before = compiled(x)
    with split_sdpa("ring", group=group):
        inside, wanted = compiled(x), attend(x)
    after = compiled(x)
    differences = (before - attend(x), inside - wanted, after - before, inside - before)
    return [float(difference.abs().max()) for difference in differences]


def test_a_compiled_function_inside_and_outside() -> None:
    first, last = on_ranks(2, compiled_errors)
    assert max(*first[:3], *last[:3]) < 1e-6
    assert last[3] > 0.1, "the second part sees the first, inside only"


def refused(group: dist.ProcessGroup, wrong_rank: int, arguments: dict[str, Any]) -> str:
    q = torch.zeros(1, 4, 8, 2)
    k = torch.zeros(1, arguments.pop("heads", 4), 8, 2)
    if dist.get_rank(group) != wrong_rank:
        k, arguments = q, {}
    try:
        with split_sdpa("ring", group=group):
            F.scaled_dot_product_attention(q, k, k, **arguments)
    except ValueError as error:
        assert F.scaled_dot_product_attention is WHOLE
        return str(error)
    finally:
        release(group)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"attn_mask": torch.ones(8, 8)}, "takes no mask tensor; a causal mask is is_causal=True"),
        ({"dropout_p": 0.5}, "has no dropout; it was asked for 0.5"),
        ({"heads": 2}, "4 query heads and 2 key heads need enable_gqa=True"),
    ],
)
def test_calls_that_it_cannot_split(arguments: dict[str, Any], reason: str) -> None:
    wanted = f"rank 1: split_sdpa: {reason}"
    assert on_ranks(2, refused, 1, arguments) == [wanted] * 2


def losses_of(group: dist.ProcessGroup, scheme: str) -> list[float]:
    return example.train(*example.seeded(), scheme, steps=6, group=group)


def losses_of_one_process(steps: int) -> list[float]:
    """The same training without anything of the library."""
    model, tokens = example.seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        logits = model(tokens, torch.arange(example.LENGTH))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_example_trains_as_one_process_does(scheme: str) -> None:
    wanted = losses_of_one_process(6)
    assert wanted[-1] < wanted[0] - 0.1
    for found in on_ranks(4 if scheme.startswith("ulysses_") else 2, losses_of, scheme):
        assert found == pytest.approx(wanted, rel=2e-5)
