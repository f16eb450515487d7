"""The functions of the library against float64 attention of the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from split_attention import CLOSENESS, SCALE, Batch, exact
from torch import Tensor

import parallel.split
from kernels import BACKENDS, AttentionSpec
from parallel.context.attention import GatherAttention
from parallel.context.blocks.layouts import Layout, Zigzag
from parallel.split import (
    bound_attention,
    local_cu_seqlens,
    release,
    scheme_names,
    shard,
    split_attention,
    unshard,
)

SCHEMES = (
    *("ring", "zigzag", "striped", "llama3", "zigzag_llama3"),
    *("ulysses", "ulysses_ring", "ulysses_zigzag"),
)

FULL = ("ring", "llama3", "ulysses", "ulysses_ring")
"""Schemes that take a full mask."""

DENSE = Batch(lengths=(24, 24))
RAGGED = Batch(lengths=(24, 7, 1, 13), packed=True)


def parts_of(
    batch: Batch, scheme: str, tensors: Any, layout: str, group: dist.ProcessGroup
) -> list[Tensor]:
    """This rank's part of whole tensors, in the layout that is asked for."""
    if batch.packed:
        starts = batch.packing().cu_seqlens_q
        return [
            shard(x, scheme, dim=0, cu_seqlens=starts, pad_value=0, group=group) for x in tensors
        ]
    found = [shard(x, scheme, dim=2, pad_value=0, group=group) for x in tensors]
    return [x.transpose(1, 2) if layout == "bshd" else x for x in found]


def results(
    group: dist.ProcessGroup,
    scheme: str,
    batch: Batch,
    layout: str = "bhsd",
    options: dict[str, Any] | None = None,
    spoilt: float = 0.0,
    local: bool = False,
) -> list[Tensor]:
    """o, dq, dk, dv of this rank.

    Args:
        spoilt: what reaches padded rows of o as their gradient.
        local: whether offsets are told as those of this rank's parts.
    """
    q, k, v, do = parts_of(batch, scheme, batch.tensors(), layout, group)
    (real,) = parts_of(batch, scheme, [torch.ones_like(batch.tensors()[0])], layout, group)
    arguments: dict[str, Any] = {"layout": layout, "length": batch.lengths[0]}
    if batch.packed:
        starts = batch.packing().cu_seqlens_q
        arguments = {"cu_seqlens": starts}
        if local:
            arguments = {"local_cu_seqlens": local_cu_seqlens(scheme, starts, group=group)}
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    function = getattr(parallel.split, f"{scheme}_attention")
    o = function(
        *leaves, causal=batch.causal, scale=SCALE, group=group, **arguments, **(options or {})
    )
    gradients = torch.autograd.grad(o, leaves, do + spoilt * (1 - real))
    return [o.detach(), *gradients]


def errors(group: dist.ProcessGroup, scheme: str, batch: Batch, *more: Any) -> list[float]:
    """Largest errors of real tokens' o, dq, dk and dv, relative to the largest entry."""
    layout = more[0] if more else "bhsd"
    found = results(group, scheme, batch, *more)
    whole = exact(batch)
    wanted = parts_of(batch, scheme, whole, layout, group)
    real = parts_of(batch, scheme, [torch.ones_like(x) for x in whole], layout, group)
    return [
        float(((got.double() - want).abs() * mask).max() / want.abs().max().clamp_min(0.1))
        for got, want, mask in zip(found, wanted, real, strict=True)
    ]


def check(num_ranks: int, scheme: str, batch: Batch, *more: Any) -> None:
    for rank, found in enumerate(on_ranks(num_ranks, errors, scheme, batch, *more)):
        for what, error in zip(("o", "dq", "dk", "dv"), found, strict=True):
            assert error < CLOSENESS, f"{what} on rank {rank} is off by {error:.2g}"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("scheme", SCHEMES)
class TestAgainstOneProcess:
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    def test_dense(self, scheme: str, num_ranks: int, layout: str) -> None:
        check(num_ranks, scheme, DENSE, layout)

    def test_packed(self, scheme: str, num_ranks: int) -> None:
        check(num_ranks, scheme, RAGGED)

    def test_no_gradient_leaks_from_padding(self, scheme: str, num_ranks: int) -> None:
        check(num_ranks, scheme, Batch(lengths=(23,)), "bshd", None, 100.0)
        check(num_ranks, scheme, RAGGED, "bhsd", None, 100.0)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
class TestOtherCalls:
    @pytest.mark.parametrize("scheme", FULL)
    def test_full_masks(self, scheme: str, num_ranks: int) -> None:
        check(num_ranks, scheme, replace(DENSE, causal=False))
        check(num_ranks, scheme, Batch(lengths=(24, 12), packed=True, causal=False))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_empty_sequences_change_nothing(self, scheme: str, num_ranks: int) -> None:
        check(num_ranks, scheme, Batch(lengths=(0, 24, 0, 7, 0), packed=True))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_offsets_of_parts(self, scheme: str, num_ranks: int) -> None:
        even = Batch(lengths=(24, 48), packed=True)
        check(num_ranks, scheme, even, "bhsd", None, 0.0, True)


def defaults(group: dist.ProcessGroup) -> tuple[float, bool]:
    """Errors with the default group, scale and layout, and bits of the function by name."""
    batch = DENSE
    q, k, v, _ = batch.tensors()
    own = [shard(x, "zigzag", dim=2).transpose(1, 2) for x in (q, k, v)]
    o = parallel.split.zigzag_attention(*own, causal=True)
    same = split_attention("zigzag", *own, causal=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    whole = unshard(o, "zigzag", dim=1).transpose(1, 2)
    return float((whole - wanted).abs().max()), torch.equal(o, same)


def test_defaults() -> None:
    for error, same in on_ranks(4, defaults):
        assert error < 1e-6
        assert same


def hybrid_errors(group: dist.ProcessGroup, degree: int) -> float:
    """A hybrid whose layout follows its option, padded."""
    q, k, v, _ = Batch(lengths=(23,)).tensors()
    options: dict[str, Any] = {"ulysses": degree, "group": group}
    own = [shard(x, "ulysses_zigzag", dim=2, pad_value=0, **options) for x in (q, k, v)]
    o = split_attention(
        "ulysses_zigzag", *own, causal=True, scale=SCALE, layout="bhsd", length=23, **options
    )
    whole = unshard(o, "ulysses_zigzag", dim=2, length=23, **options)
    release(group)
    return float((whole - exact(Batch(lengths=(23,)))[0]).abs().max())


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_options_of_a_hybrid(degree: int) -> None:
    assert max(on_ranks(4, hybrid_errors, degree)) < 1e-5


def twice(group: dist.ProcessGroup, scheme: str, batch: Batch) -> bool:
    runs = [results(group, scheme, batch) for _ in range(2)]
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_equal_bits_in_two_runs(scheme: str) -> None:
    assert all(on_ranks(3, twice, scheme, DENSE))
    assert all(on_ranks(3, twice, scheme, RAGGED))


def lse_errors(group: dist.ProcessGroup, scheme: str, batch: Batch, with_grad: bool) -> list[float]:
    """Errors of o and lse, and of dq where gradients are needed."""
    q, k, v, do = batch.tensors()
    whole_lse = BACKENDS["flash_torch"].target(name="flash_torch")
    packing = batch.packing() if batch.packed else None
    spec = AttentionSpec(causal=True, scale=SCALE, packing=packing)
    o, lse = whole_lse.forward(q, k, v, spec)
    column = lse.mT.unsqueeze(-1) if batch.packed else lse.unsqueeze(-1)
    own_q, own_k, own_v, own_do = parts_of(batch, scheme, (q, k, v, do), "bhsd", group)
    own_o, own_lse, real = parts_of(
        batch, scheme, (o, column, torch.ones_like(column)), "bhsd", group
    )
    arguments: dict[str, Any] = {"layout": "bhsd"}
    if packing:
        arguments = {"cu_seqlens": packing.cu_seqlens_q}
    leaf = own_q.detach().requires_grad_(with_grad)
    got_o, got_lse = split_attention(
        scheme,
        *(leaf, own_k, own_v),
        causal=True,
        scale=SCALE,
        return_lse=True,
        group=group,
        **arguments,
    )
    assert got_o.requires_grad == with_grad
    assert not got_lse.requires_grad
    got_column = got_lse.mT.unsqueeze(-1) if packing else got_lse.unsqueeze(-1)
    found = [((got_o - own_o) * real), ((got_column - own_lse) * real)]
    if with_grad:
        (dq,) = torch.autograd.grad(got_o, leaf, own_do)
        (want,) = parts_of(batch, scheme, [exact(batch)[1]], "bhsd", group)
        found.append((dq - want) * real)
    return [float(x.abs().max()) for x in found]


@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("batch", [DENSE, RAGGED], ids=["dense", "packed"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_log_sum_exp(scheme: str, batch: Batch, with_grad: bool) -> None:
    for found in on_ranks(2, lse_errors, scheme, batch, with_grad):
        assert max(found) < 1e-5


def under_autocast(group: dist.ProcessGroup, scheme: str) -> tuple[torch.dtype, ...]:
    q, k, v, _ = parts_of(DENSE, scheme, DENSE.tensors(), "bhsd", group)
    leaves = [q.requires_grad_(), k.bfloat16().requires_grad_(), v.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        o = split_attention(scheme, *leaves, causal=True, layout="bhsd", group=group)
    o.float().sum().backward()
    return (o.dtype, *(x.grad.dtype for x in leaves))  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mixed_dtypes_under_autocast(scheme: str) -> None:
    """As kernels.flash_attention casts: o in autocast's dtype, gradients in those of the leaves."""
    wanted = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    assert on_ranks(2, under_autocast, scheme) == [wanted] * 2


def second_derivative(group: dist.ProcessGroup, scheme: str) -> str:
    q, k, v, _ = parts_of(DENSE, scheme, DENSE.tensors(), "bhsd", group)
    q.requires_grad_()
    o = split_attention(scheme, q, k, v, causal=True, layout="bhsd", group=group)
    try:
        torch.autograd.grad(o.square().sum(), q, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_second_derivatives_raise(scheme: str) -> None:
    for message in on_ranks(2, second_derivative, scheme):
        assert message.startswith(f"{scheme}_attention: create_graph=True asks for second deriv")


def bound_call(group: dist.ProcessGroup) -> float:
    q, k, v, _ = DENSE.tensors()
    with bound_attention("llama3", group=group, kernel="naive", kv_heads_at_once=1) as attend:
        own = parts_of(DENSE, "llama3", (q, k, v), "bhsd", group)
        o = attend(*own, causal=True, scale=SCALE, layout="bhsd")
    (want,) = parts_of(DENSE, "llama3", exact(DENSE)[:1], "bhsd", group)
    release(group)
    return float((o - want).abs().max())


def test_a_bound_scheme_with_options() -> None:
    assert max(on_ranks(2, bound_call)) < 1e-5


class Compiled(torch.nn.Module):
    """A module that attends over a group between operations that can be compiled."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = split_attention("zigzag", q * 2, k, v, causal=True, layout="bhsd", group=self.group)
        return o + 1


def compiled_error(group: dist.ProcessGroup) -> float:
    own = parts_of(DENSE, "zigzag", DENSE.tensors()[:3], "bhsd", group)
    module = Compiled(group)
    compiled = torch.compile(module, backend="eager")
    return float((compiled(*own) - module(*own)).abs().max())


def test_inside_a_compiled_module() -> None:
    assert on_ranks(2, compiled_error) == [0.0] * 2


def plugin_error(group: dist.ProcessGroup) -> float:
    """Of a scheme that a plugin registers: zigzag's layout, keys gathered."""
    registered = BACKENDS.register("from_outside")(_FromOutside)
    try:
        q, k, v, _ = DENSE.tensors()
        own = [shard(x, "from_outside", dim=2, group=group) for x in (q, k, v)]
        arguments: dict[str, Any] = {"scale": SCALE, "layout": "bhsd", "group": group}
        o = parallel.split.from_outside_attention(*own, causal=True, **arguments)
        whole = unshard(o, "from_outside", dim=2, group=group)
        assert registered is _FromOutside
    finally:
        del BACKENDS._entries["from_outside"], parallel.split.from_outside_attention
    release(group)
    return float((whole - exact(DENSE)[0]).abs().max())


@dataclass(kw_only=True, slots=True)
class _FromOutside(GatherAttention):
    layout_type: ClassVar[type[Layout]] = Zigzag


def test_a_scheme_of_a_plugin() -> None:
    assert max(on_ranks(3, plugin_error)) < 1e-5


class TestNames:
    def test_a_function_for_each_scheme(self) -> None:
        listed = dir(parallel.split)
        for scheme in scheme_names():
            function = getattr(parallel.split, f"{scheme}_attention")
            assert function.__name__ == f"{scheme}_attention"
            assert function.__doc__.startswith(f"attention={scheme}")
            assert "    cu_seqlens: offsets of whole sequences" in function.__doc__
            assert "    scheme:" not in function.__doc__
            assert f"{scheme}_attention" in listed
        assert set(SCHEMES) <= set(scheme_names())

    @pytest.mark.parametrize("name", ["naive_attention", "no_such_attention", "no_such_name"])
    def test_no_others(self, name: str) -> None:
        with pytest.raises(AttributeError, match=name):
            getattr(parallel.split, name)
