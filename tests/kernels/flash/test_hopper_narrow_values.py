"""Values of fewer columns than keys on the Hopper kernels: what is launched, and what is refused.

Launches are emulated in float64, from their descriptors, strides and constants. The kernels' own
source runs on the models of test_hopper_protocol and test_hopper_backward_protocol, which say what
was multiplied with what; these products are evaluated here, in float64, too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from emulated_kernels import emulate
from gluon_backward_model import KEY_SUMS, Call, Pair, run_call
from gluon_model import Scores, run_program
from torch import Tensor

from kernels.flash.call.arguments import BackwardPass, ForwardPass
from kernels.flash.call.problem import Problem, describe
from kernels.flash.hopper import backward_memory, launch, plans

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

SCALE = 0.1


def inputs(
    heads: int, kv_heads: int, q_len: int, kv_len: int, value_dim: int = 128
) -> tuple[Tensor, ...]:
    """q, k, v and do of two sequences, as a transformer stores them: [B, S, H, D] underneath."""
    torch.manual_seed(0)
    sizes = ((q_len, heads, 192), (kv_len, kv_heads, 192), (kv_len, kv_heads, value_dim))
    return tuple(
        torch.randn(2, *size).to(torch.bfloat16).transpose(1, 2)
        for size in (*sizes, (q_len, heads, value_dim))
    )


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in float64 by autograd."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * SCALE
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -torch.inf)
    o = scores.softmax(-1) @ values
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "q_len", "kv_len", "value_dim"),
    [
        *((4, 4, 130, 130, 128), (4, 2, 100, 300, 128), (4, 4, 512, 512, 128)),
        *((20, 20, 512, 512, 128), (2, 1, 70, 70, 64)),
    ],
)
def test_launches(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    kv_heads: int,
    q_len: int,
    kv_len: int,
    value_dim: int,
    causal: bool,
) -> None:
    gpu = emulate(monkeypatch, batch=2)
    q, k, v, do = inputs(heads, kv_heads, q_len, kv_len, value_dim)
    problem = describe(q, k, v, causal=causal)
    assert (problem.v_dim, problem.head_dim) == (value_dim, 192)
    o = torch.full_like(do, torch.nan)
    lse = torch.full((2, heads, q_len), torch.nan)
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    launch.forward(ForwardPass(problem=problem, q=q, k=k, v=v, o=o, lse=lse, scale=SCALE))
    launch.backward(
        BackwardPass(
            problem=problem, do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=None, dq=dq, dk=dk, dv=dv,
            scale=SCALE,
        )
    )  # fmt: skip
    launched = {name for name, kernel in gpu.kernels.items() if kernel.by_triton}
    assert launched == {"flash_forward", "row_statistics", "flash_backward_narrow", "finish_dq"}
    expected = exact(q, k, v, do, causal)
    for what, got, wanted in zip(("o", "dq", "dk", "dv"), (o, dq, dk, dv), expected, strict=True):
        error = float((got.double() - wanted).norm())
        assert error <= 5e-3 * float(wanted.norm()), f"{what}: {error:.3g}"


def test_tiles_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys in panels of 64 columns, three in all; values of 128 columns."""
    emulate(monkeypatch, batch=2)
    q, k, v, do = inputs(4, 2, 100, 300)
    problem = describe(q, k, v, causal=True)
    lse = torch.empty(2, 4, 100)
    forward = plans.plan_forward(
        ForwardPass(problem=problem, q=q, k=k, v=v, o=do, lse=lse, scale=SCALE)
    )
    constants = forward.constants
    assert [constants[name] for name in ("BLOCK_D", "PANELS", "BLOCK_V")] == [192, 3, 128]
    shapes = [make(x).block_shape for make, x in zip(forward.descriptors, (q, k, v), strict=True)]
    assert shapes == [[1, 1, 64, 64], [1, 1, 128, 64], [1, 1, 128, 128]]
    call = BackwardPass(
        problem=problem, do=do, q=q, k=k, v=v, o=do, lse=lse, dlse=None, dq=q, dk=k, dv=v,
        scale=SCALE,
    )  # fmt: skip
    main = plans.plan_backward(call).main
    shapes = [
        make(x).block_shape for make, x in zip(main.descriptors[:4], (q, do, k, v), strict=True)
    ]
    assert shapes == [[1, 1, 64, columns] for columns in (64, 128, 64, 128)]


@pytest.mark.parametrize(
    ("heads", "causal", "window"),
    [
        *(((64, 64), True, None), ((64, 16), True, None), ((8, 8), True, None)),
        *(((8, 2), False, None), ((8, 4), False, None), ((10, 10), True, 64)),
    ],
)
def test_workspace_is_as_predicted(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], causal: bool, window: int | None
) -> None:
    """But for the counts, of 4 bytes for 64 rows."""
    emulate(monkeypatch, batch=2)
    sizes = ((heads[0], 192), (heads[1], 192), (heads[1], 128), (heads[0], 128))
    q, k, v, do = (torch.empty(2, n, 1024, width, dtype=torch.bfloat16) for n, width in sizes)
    plan = plans.plan_backward(
        BackwardPass(
            problem=describe(q, k, v, causal=causal, window=window), do=do, q=q, k=k, v=v, o=do,
            lse=torch.empty(2, heads[0], 1024), dlse=None, dq=q, dk=k, dv=v, scale=SCALE,
        )
    )  # fmt: skip
    allocated = sum(math.prod(shape) * dtype.itemsize for shape, dtype in plan.workspace)
    predicted = backward_memory.backward_workspace(
        batch_size=2, num_heads=heads[0], num_kv_heads=heads[1], q_len=1024, kv_len=1024,
        head_dim=192, value_dim=128, causal=causal, window=window,
    )  # fmt: skip
    assert predicted < allocated < 1.001 * predicted


class TestWhatIsRefused:
    def reason(self, head_dim: int, value_dim: int) -> str | None:
        return launch.schedule.why_not_narrow(head_dim, value_dim)

    def test_takes_what_latent_attention_has(self) -> None:
        assert self.reason(192, 128) is None
        assert self.reason(136, 64) is None

    @pytest.mark.parametrize(
        ("head_dim", "value_dim"), [(128, 64), (96, 64), (256, 128), (192, 136), (192, 100)]
    )
    def test_says_why_not(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, value_dim: int
    ) -> None:
        monkeypatch.setattr(launch.any_gpu, "INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        q = torch.empty(1, 2, 8, head_dim, dtype=torch.bfloat16)
        problem: Problem = describe(q, q, q[..., :value_dim], causal=True)
        reason = launch.why_not(replace(problem, device=torch.device("cuda", 0)))
        assert reason is not None
        assert f"value_dim {value_dim} of head_dim {head_dim}" in reason
        assert "\n" not in reason


PARTS = [
    pytest.param(lengths, causal, id=f"{name}-{'causal' if causal else 'full'}")
    for name, lengths in (("dense", [(200, 330)]), ("packed", [(130, 200), (0, 60), (65, 65)]))
    for causal in (True, False)
]
"""Lengths of queries and keys of each sequence, and whether the mask is causal."""


class Batch:
    """Sequences end to end, in float64: [heads, tokens, columns], and what attention makes of them.

    Args:
        lengths: queries and keys of each sequence.
    """

    def __init__(self, lengths: list[tuple[int, int]], heads: int, kv_heads: int, causal: bool):
        torch.manual_seed(0)
        self.starts = tuple([0, *accumulate(x)] for x in zip(*lengths, strict=True))
        sizes = ((heads, 0, 192), (kv_heads, 1, 192), (kv_heads, 1, 128), (heads, 0, 128))
        self.q, self.k, self.v, self.do = (
            torch.randn(n, self.starts[i][-1], columns, dtype=torch.float64)
            for n, i, columns in sizes
        )
        self.group = heads // kv_heads
        self.visible = torch.zeros(self.starts[0][-1], self.starts[1][-1], dtype=torch.bool)
        for number, (q_len, kv_len) in enumerate(lengths):
            whole = torch.ones(q_len, kv_len, dtype=torch.bool)
            whole = whole.tril(kv_len - q_len) if causal else whole
            (first, last), (start, stop) = (x[number : number + 2] for x in self.starts)
            self.visible[first:last, start:stop] = whole
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        keys, values = (x.repeat_interleave(self.group, 0) for x in leaves[1:])
        scores = (leaves[0] @ keys.mT * SCALE).masked_fill(~self.visible, -torch.inf)
        self.lse = scores.logsumexp(-1).detach()
        o = scores.softmax(-1) @ values
        self.o = o.detach()
        self.gradients = dict(
            zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, self.do), strict=True)
        )
        self.delta = (self.o * self.do).sum(-1)

    def rows(self, x: Tensor, head: int, first: int, number: int, columns: slice) -> Tensor:
        """Some rows as TMA copies them: those behind the last one are zero."""
        found = x[head, first : first + number, columns]
        return torch.nn.functional.pad(found, (0, 0, 0, number - len(found)))

    def is_behind(self, place: int) -> bool:
        """Whether 64 rows of the sums of dq, of 256 columns, are behind their sequence's queries.

        Sums of a head have room for the sequences to begin at multiples of 128 rows.
        """
        starts = self.starts[0]
        room = (starts[-1] + 128 * len(starts)) // 128 * 128 if len(starts) > 2 else 10**9
        lines = [(x + 128 * n) // 128 * 128 if len(starts) > 2 else 0 for n, x in enumerate(starts)]
        row = place // (64 * 256) * 64 % room
        sequence = max(n for n in range(len(starts) - 1) if lines[n] <= row)
        return len(starts) > 2 and starts[sequence] + row - lines[sequence] >= starts[sequence + 1]

    def mask(self, first_query: int, first_key: int, num_keys: int) -> Tensor:
        """[64, num_keys] of what is visible; all of it for queries that are not there."""
        found = self.visible[first_query : first_query + 64, first_key : first_key + num_keys]
        return torch.nn.functional.pad(
            found, (0, num_keys - found.shape[1], 0, 64 - found.shape[0])
        )


@pytest.mark.parametrize(("lengths", "causal"), PARTS)
def test_products_of_the_forward_kernel(lengths: list[tuple[int, int]], causal: bool) -> None:
    batch = Batch(lengths, 1, 1, causal)
    cu_seqlens = batch.starts if len(lengths) > 1 else None
    q_len, kv_len = (max(x) for x in zip(*lengths, strict=True))
    grid = plans.slots(batch.starts[0][-1], len(lengths), 128) if cu_seqlens else -(-q_len // 128)
    o = torch.full_like(batch.o, torch.nan)
    for program in range(grid):
        stored = run_program(
            seed=program, program=program, grid=grid, q_len=q_len, kv_len=kv_len, consumers=2,
            tiles=1, key_tile=128, stages=2, tail=64, panels=3, causal=causal,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        for scores in stored.values():
            first = scores[0].query
            end = next(x for x in batch.starts[0] if x > first)
            o[0, first : min(end, first + 64)] = output(batch, scores)[: end - first]
    torch.testing.assert_close(o, batch.o, rtol=1e-12, atol=1e-12)


def output(batch: Batch, scores: list[Scores]) -> Tensor:
    """o of 64 queries, of the products that a consumer computed."""
    sums = torch.zeros(64, 128, dtype=torch.float64)
    total = torch.zeros(64, 1, dtype=torch.float64)
    for tile in scores:
        s = torch.zeros(64, 128, dtype=torch.float64)
        for column in tile.columns:
            panel = slice(column, column + 64)
            k = batch.rows(batch.k, 0, tile.key, 128, panel)
            s += batch.rows(batch.q, 0, tile.query, 64, panel) @ k.mT
        p = (s * SCALE).exp()
        if tile.masked_as is not None:
            p = p * batch.mask(tile.query, tile.key, 128)
        total += p.sum(1, keepdim=True)
        sums += p @ batch.rows(batch.v, 0, tile.key, 128, slice(None))
    return sums / total


@pytest.mark.parametrize(("lengths", "causal"), PARTS)
def test_products_of_the_backward_kernel(lengths: list[tuple[int, int]], causal: bool) -> None:
    """Two query heads share a key head, each with a program of its own."""
    batch = Batch(lengths, 2, 1, causal)
    cu_seqlens = batch.starts if len(lengths) > 1 else None
    q_len, kv_len = (max(x) for x in zip(*lengths, strict=True))
    programs = -(-kv_len // 128)
    if cu_seqlens:
        programs = plans.slots(batch.starts[1][-1], len(lengths), 128)
    call = Call(
        q_len=q_len, kv_len=kv_len, cu_seqlens=cu_seqlens, num_heads=2, group_size=2,
        num_members=1, causal=causal, mask="plain", edges=(0, 0, 0), unmasked=True, order="none",
        order_count=0, heads_at_once=2, programs=2 * programs, at_once=3, columns=256, main=128,
        tail=64, softcap=0.0, apart=False, rolled=False, narrow=True,
    )  # fmt: skip
    machine = run_call(call, seed=1)
    found = {name: torch.zeros_like(x) for name, x in batch.gradients.items()}
    for place, sums in machine.added.items():
        if place >= KEY_SUMS or batch.is_behind(place):
            continue
        for pair in (pair for x in sums for pair in x.pairs):
            columns = slice(64 * sums[0].column, 64 * sums[0].column + 64)
            product = p_or_ds(batch, pair) @ batch.rows(batch.k, *pair.key, 64, columns) * SCALE
            head, first = pair.query
            into = found["dq"][head, first : first + 64, columns]
            into += product[: len(into)]
    for (name, head, first, column), pairs in machine.gradients.items():
        width, factor = (64 if column else 128), (SCALE if name == "dk" else 1.0)
        q_end, end = next(x for x in zip(*batch.starts, strict=True) if x[1] > first)
        into = found[name][head, first : min(end, first + 64), column : column + width]
        # Half a turn behind the sequence's last query has rows of the next one, and lse = inf.
        for pair in (x for x in pairs if x.query[1] < q_end):
            right = batch.q if name == "dk" else batch.do
            right = batch.rows(right, *pair.query, 64, slice(column, column + width))
            into += (p_or_ds(batch, pair).mT @ right * factor)[: len(into)]
    for name, wanted in batch.gradients.items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-12, atol=1e-12)


def p_or_ds(batch: Batch, pair: Pair) -> Tensor:
    """[64 queries, 64 keys] of P or dS, zero for queries behind the sequence's last one."""
    (head, first), key = pair.query, pair.key
    end = next(x for x in batch.starts[0] if x > first)
    lse, delta = (
        torch.nn.functional.pad(x[head, first : min(end, first + 64)], (0, 64), value=value)[:64]
        for x, value in ((batch.lse, torch.inf), (batch.delta, 0.0))
    )
    every = slice(None)
    s = batch.rows(batch.q, head, first, 64, every) @ batch.rows(batch.k, *key, 64, every).mT
    p = (s * SCALE - lse[:, None]).exp()
    if pair.is_masked:
        p = p * batch.mask(first, key[1], 64)
    if pair.kind == "p":
        return p
    columns = slice(0, pair.width)
    values = batch.rows(batch.v, *key, 64, columns)
    return p * (batch.rows(batch.do, head, first, 64, columns) @ values.mT - delta[:, None])
