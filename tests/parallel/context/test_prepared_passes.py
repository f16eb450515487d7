"""Calls of one bound attention after one another: what was prepared for one never serves another.

Each call differs from the one before in one thing, and is compared with float64.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from masked_split import MaskedBatch, exact
from ranks import on_ranks
from split_attention import CPU, scheme_of, shard
from torch import Tensor

from kernels.problem import AttentionSpec
from parallel.context.transports.messages import Messages

CLOSENESS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
"""Largest error by dtype, relative to the largest expected entry."""

DENSE = MaskedBatch(lengths=(16, 16), num_heads=4, num_kv_heads=4)
PACKED = MaskedBatch(lengths=(24, 8), packed=True, num_heads=4, num_kv_heads=4)

FORMS = {
    "dense": (
        DENSE,
        replace(DENSE, lengths=(24, 24)),
        replace(DENSE, lengths=(16,)),
        replace(DENSE, num_kv_heads=2),
        replace(DENSE, num_heads=8),
        replace(DENSE, head_dim=16),
        replace(DENSE, dtype=torch.bfloat16),
    ),
    "packed": (
        PACKED,
        replace(PACKED, lengths=(8, 24)),
        replace(PACKED, lengths=(8, 8, 16)),
        replace(PACKED, num_kv_heads=2),
        replace(PACKED, num_heads=8),
        replace(PACKED, head_dim=16),
        replace(PACKED, dtype=torch.bfloat16),
    ),
}

MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.7},
    {"softcap": 0.5},
    {"softcap": 2.0},
    {"window": 5},
    {"window": 9},
    {"prefix_len": 3},
    {"prefix_len": 6},
    {"with_sinks": True},
    {"causal": False},
)

CHOICES = [
    ("ring", "send_recv"),
    ("ring", "symmetric"),
    ("zigzag", "send_recv"),
    ("zigzag", "symmetric"),
    ("striped", "symmetric"),
    ("llama3", "all_gather"),
    ("llama3", "symmetric"),
    ("zigzag_llama3", "all_gather"),
    ("zigzag_llama3", "symmetric"),
    ("ulysses", "all_to_all"),
    ("ulysses", "symmetric"),
    ("documents", "all_to_all"),
    ("documents", "symmetric"),
]


@contextlib.contextmanager
def bound_to(group: dist.ProcessGroup, name: str, transport: str, **more: Any) -> Iterator[Any]:
    options = {"kernel": "flash_torch", "transport": transport, **more}
    with scheme_of(name, **options).bind(group, CPU) as bound:
        yield bound


def leaves_of(bound: Any, batch: MaskedBatch) -> tuple[list[Tensor], Tensor]:
    """This rank's q, k and v, and the gradient of its o."""
    q, k, v, do = (shard(bound, x, batch).clone() for x in batch.tensors())
    return [x.requires_grad_() for x in (q, k, v)], do


def worst(bound: Any, batch: MaskedBatch, found: dict[str, Tensor]) -> list[str]:
    """The results that are off, in words."""
    whole, _ = exact(batch)
    wrong = []
    for what, wanted in zip(("o", "lse", "dq", "dk", "dv"), whole, strict=True):
        if what not in found:
            continue
        mine = shard(bound, wanted, batch)
        error = float((found[what].double() - mine).abs().max() / wanted.abs().max())
        if not error < CLOSENESS[batch.dtype]:
            wrong.append(f"{what} is off by {error:.2g}: {batch}")
    return wrong


def trained(bound: Any, batch: MaskedBatch, spec: AttentionSpec | None = None) -> list[str]:
    """A forward and a backward pass."""
    leaves, do = leaves_of(bound, batch)
    o = bound.attend(*leaves, spec or batch.spec(batch.sinks()))
    found = (o.detach(), *torch.autograd.grad(o, leaves, do))
    return worst(bound, batch, dict(zip(("o", "dq", "dk", "dv"), found, strict=True)))


def one_after_another(
    group: dist.ProcessGroup, name: str, transport: str, batches: list[MaskedBatch]
) -> list[str]:
    with bound_to(group, name, transport) as bound:
        return [fault for batch in batches for fault in trained(bound, batch)]


def all_right(by_rank: list[list[str]]) -> None:
    assert by_rank == [[] for _ in by_rank]


def taken(name: str, batch: MaskedBatch) -> bool:
    """Whether a scheme takes a batch."""
    if name == "documents":
        return batch.packed and (batch.causal or batch.window is None)
    return batch.causal or not name.startswith("zigzag")


@pytest.mark.parametrize(("name", "transport"), CHOICES)
@pytest.mark.parametrize("form", FORMS)
def test_another_shape(name: str, transport: str, form: str) -> None:
    batches = [batch for batch in FORMS[form] if taken(name, batch)]
    if not batches:
        pytest.skip("documents are packed")
    # The first ones again, after the others.
    all_right(on_ranks(2, one_after_another, name, transport, [*batches, *batches[:3]]))


@pytest.mark.parametrize(("name", "transport"), CHOICES)
@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
def test_another_mask(name: str, transport: str, base: MaskedBatch) -> None:
    batches = [replace(base, **mask) for mask in MASKS]
    batches = [batch for batch in batches if taken(name, batch)]
    if not batches:
        pytest.skip("documents are packed")
    all_right(on_ranks(2, one_after_another, name, transport, [*batches, *batches[:3]]))


def in_place(group: dist.ProcessGroup, name: str, transport: str) -> list[str]:
    """One tensor of offsets, under masks in turns, that gets other values on the way."""
    others = replace(PACKED, lengths=(8, 24))
    packing = PACKED.packing()
    wrong = []
    with bound_to(group, name, transport) as bound:
        for batch in (PACKED, others, PACKED):
            packing.cu_seqlens_q.copy_(batch.packing().cu_seqlens_q)
            for mask in ({}, {"window": 5}, {"scale": 0.7}):
                masked = replace(batch, **mask)
                spec = replace(masked.spec(None), packing=packing)
                wrong += trained(bound, masked, spec)
    return wrong


@pytest.mark.parametrize(("name", "transport"), CHOICES)
def test_offsets_that_change_in_place(name: str, transport: str) -> None:
    all_right(on_ranks(2, in_place, name, transport))


def interleaved(
    group: dist.ProcessGroup, name: str, transport: str, batches: list[MaskedBatch]
) -> list[str]:
    """Forward passes of all batches, then their backward passes from the last to the first."""
    wrong = []
    with bound_to(group, name, transport) as bound:
        made = []
        for batch in batches:
            leaves, do = leaves_of(bound, batch)
            made.append((batch, leaves, do, bound.attend(*leaves, batch.spec(None))))
        for batch, leaves, do, o in reversed(made):
            for _ in range(2):
                gradients = torch.autograd.grad(o, leaves, do, retain_graph=True)
                found = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
                wrong += worst(bound, batch, found | {"o": o.detach()})
    return wrong


@pytest.mark.parametrize(("name", "transport"), CHOICES)
def test_layers_before_their_backward_passes(name: str, transport: str) -> None:
    """As in a model: what a pass is given stays with it, whatever was called meanwhile."""
    batches = [PACKED, replace(PACKED, lengths=(8, 24)), replace(PACKED, window=5), PACKED]
    if name != "documents":
        # Few keys of other ranks, which a pass keeps; all of them; and few again.
        batches += [replace(DENSE, window=4), DENSE, replace(DENSE, window=3)]
    all_right(on_ranks(2, interleaved, name, transport, batches))


def without_gradients(group: dist.ProcessGroup, name: str, transport: str) -> list[str]:
    """Evaluation before training, training before evaluation, and a forward pass for the lse."""
    wrong = []
    with bound_to(group, name, transport) as bound:
        leaves, _ = leaves_of(bound, PACKED)
        spec = PACKED.spec(None)
        for _ in range(2):
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    o = bound.attend(*leaves, spec)
                wrong += worst(bound, PACKED, {"o": o})
                wrong += [f"{name}: o has a graph"] * o.requires_grad
            o, lse = bound.attend_with_lse(*leaves, spec)
            wrong += [f"{name}: o, or lse, has a graph"] * (o.requires_grad or lse.requires_grad)
            wrong += worst(bound, PACKED, {"o": o.detach(), "lse": lse.detach().mT[:, :, None]})
            wrong += trained(bound, PACKED, spec)
            # As where k alone is trained.
            leaves[0].requires_grad_(False)
            gradient = torch.autograd.grad(bound.attend(*leaves, spec).sum(), leaves[1])
            leaves[0].requires_grad_()
            both = torch.autograd.grad(bound.attend(*leaves, spec).sum(), leaves)
            wrong += [f"{name}: dk depends on dq"] * (not torch.equal(gradient[0], both[1]))
    return wrong


@pytest.mark.parametrize(("name", "transport"), CHOICES)
def test_with_and_without_gradients(name: str, transport: str) -> None:
    all_right(on_ranks(2, without_gradients, name, transport))


def in_a_mesh(group: dist.ProcessGroup, batches: list[MaskedBatch]) -> list[str]:
    with bound_to(group, "ulysses_zigzag", "send_recv", ulysses=2) as bound:
        return [fault for batch in batches for fault in trained(bound, batch)]


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
def test_heads_exchanged_inside_groups(base: MaskedBatch) -> None:
    forms = FORMS["packed" if base.packed else "dense"]
    batches = [*forms, *(replace(base, **mask) for mask in MASKS[:-1]), base]
    all_right(on_ranks(4, in_a_mesh, batches))


def refused(
    group: dist.ProcessGroup,
    name: str,
    base: MaskedBatch,
    new: dict[str, Any],
    more: dict[str, Any],
) -> list[str]:
    """What a rank says to a second call, new on both ranks, in which rank 1 has more that is."""
    with bound_to(group, name, "all_to_all") as bound:
        spec = base.spec(None)
        wrong = trained(bound, base, spec)
        mine = replace(base, **new, **(more if bound.rank else {}))
        leaves, _ = leaves_of(bound, mine)
        packing = mine.packing() if "lengths" in more and base.packed else spec.packing
        try:
            bound.attend(*leaves, replace(mine.spec(None), packing=packing))
        except ValueError as error:
            return [*wrong, str(error)]
    return [*wrong, "nothing"]


@pytest.mark.parametrize(
    ("name", "base", "new", "more", "words"),
    [
        ("ulysses", DENSE, {"num_heads": 8}, {"lengths": (24, 24)}, "[2, 8, 12, 8]"),
        ("ulysses", DENSE, {"dtype": torch.bfloat16}, {"head_dim": 16}, "[2, 4, 8, 16] bfloat16"),
        ("ulysses", DENSE, {"softcap": 1.0}, {"window": 5}, "window=5, softcap=1.0"),
        ("ulysses", PACKED, {"softcap": 1.0}, {"lengths": (8, 24)}, "lengths [8, 24]"),
        ("ulysses", PACKED, {"prefix_len": 4}, {"softcap": 1.0}, "prefix_len=4, softcap=1.0"),
        ("documents", PACKED, {"num_heads": 8}, {"lengths": (8, 24)}, "lengths [8, 24]"),
        ("documents", PACKED, {"softcap": 1.0}, {"window": 5}, "window=5, softcap=1.0"),
    ],
)
def test_ranks_that_differ_after_a_call_alike(
    name: str, base: MaskedBatch, new: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    first, second = on_ranks(2, refused, name, base, new, more)
    assert first == second
    (said,) = first
    assert said.startswith("ranks disagree on what they attend to")
    assert words in said


def kept_alive(group: dist.ProcessGroup) -> list[bool]:
    """Whether a tensor that was sent, and one that came, are there after their last use."""
    messages = Messages(group)
    peer = 1 - messages.rank
    sent, received = torch.full((3,), float(messages.rank)), torch.empty(3)
    for work in messages.start([sent], peer, [received], peer, 0):
        work.wait()
    assert received.tolist() == [float(peer)] * 3
    found = [weakref.ref(sent), weakref.ref(received)]
    del sent, received, work
    return [reference() is not None for reference in found]


def test_operations_keep_no_tensors() -> None:
    """Of 131,072 tokens, keys that stayed until the next message would be gigabytes."""
    assert on_ranks(2, kept_alive) == [[False, False]] * 2
