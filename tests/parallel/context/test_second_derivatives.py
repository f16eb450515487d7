"""Second derivatives of attention on split sequences: an error on every rank, never a number."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import (
    CPU,
    Batch,
    Hidden,
    attend,
    scheme_of,
    shard,
)

DENSE, PACKED = Batch(lengths=(24,)), Batch(lengths=(24, 8), packed=True)

CONTEXT = "context-parallel attention"
HEADS = "attention over heads (ulysses)"

SCHEMES = {
    "ring": (DENSE, "flash_torch", f"{CONTEXT} (contiguous)"),
    "zigzag": (PACKED, "naive", f"{CONTEXT} (zigzag)"),
    "llama3": (DENSE, "naive", f"{CONTEXT} (contiguous)"),
    "ulysses": (DENSE, "naive", HEADS),
    "ulysses in groups": (DENSE, "naive", HEADS),
    "ulysses_zigzag": (DENSE, "flash_torch", HEADS),
    "documents": (PACKED, "flash_torch", "document attention"),
    "documents without lse": (PACKED, "hidden", "document attention"),
}
"""A batch, a kernel, and who raises."""


def messages(group: dist.ProcessGroup, name: str, batch: Batch, kernel: str) -> list[str]:
    """What penalties on the gradient of a linear and of another loss raise, grad and backward."""
    found = []
    hidden = kernel == "hidden"
    options = {"head_groups": 2} if name.endswith("in groups") else {}
    scheme = scheme_of(name.split()[0], kernel="naive" if hidden else kernel, **options)
    with scheme.bind(group, CPU) as bound:
        if hidden:
            bound._kernel = Hidden(name="hidden")
        for power in (1, 2):
            tensors = batch.tensors()[:3]
            q, k, v = (shard(bound, x, batch).detach().requires_grad_() for x in tensors)
            loss = attend(bound, [q, k, v], batch).pow(power).sum()
            gradients = torch.autograd.grad(loss, (q, k, v), create_graph=True)
            total = loss + sum(dx.square().sum() for dx in gradients)
            for ask in (torch.autograd.grad, torch.autograd.backward):
                try:
                    ask(total, inputs=k, retain_graph=True)
                    found.append("nothing was raised")
                except RuntimeError as error:
                    found.append(str(error))
    return found


@pytest.mark.parametrize(("name", "expected"), SCHEMES.items(), ids=SCHEMES)
def test_a_penalty_on_the_gradient_raises(name: str, expected: tuple[Batch, str, str]) -> None:
    batch, kernel, who = expected
    wanted = f"{who}: second derivatives are not available; attention=naive has them"
    num_ranks = 4 if name == "ulysses_zigzag" else 2
    for found in on_ranks(num_ranks, messages, name, batch, kernel):
        assert found == [wanted] * 4


def messages_of_the_other_gradient(group: dist.ProcessGroup, head_groups: int) -> list[str]:
    """What a derivative of dq by the gradient of o raises, q, k and v apart."""
    found = []
    scheme = scheme_of("ulysses", kernel="flash_torch", head_groups=head_groups)
    with scheme.bind(group, CPU) as bound:
        q, k, v, do = (shard(bound, x, DENSE).detach() for x in DENSE.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        do.requires_grad_()
        o = attend(bound, leaves, DENSE)
        (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
        try:
            torch.autograd.grad(dq.sum(), do, allow_unused=True)
            found.append("nothing was raised")
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("head_groups", [1, 2])
def test_gradients_depend_on_that_of_the_output(head_groups: int) -> None:
    wanted = f"{HEADS}: second derivatives are not available; attention=naive has them"
    assert on_ranks(2, messages_of_the_other_gradient, head_groups) == [[wanted]] * 2
