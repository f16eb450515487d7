"""Windows, prefixes, shifts and caps in the Hopper kernels, run against float64.

Each test runs many calls, since every width and kind of mask is compiled once, and names all that
went wrong. Most run the forward pass alone: test_flash_hopper_masks_backward.py has the other.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.flash import operator
from kernels.flash.call.arguments import FlashCall, FlashOptions, ForwardPass
from kernels.flash.call.problem import describe
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans
from kernels.flash.hopper.program_size import ProgramSize
from kernels.problem import AttentionSpec, Packing

ROOT = Path(__file__).parents[3]

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(
    not ON_HOPPER, reason="needs a CUDA device of compute capability 9.0"
)
ON_HOPPER_ONLY = FlashOptions(implementation="hopper")

CAP = 5.0
"""On scores, in most tests: each kernel is compiled for the caps that it gets."""


@dataclass(kw_only=True, frozen=True)
class Case:
    """A call. Its repr says which one failed."""

    head_dim: int
    lengths: tuple[int, int] = (777, 777)
    """Queries and keys."""
    causal: bool = True
    window: int | None = None
    prefix_len: int = 0
    shift: int = 0
    softcap: float | None = None
    batch: int = 1
    heads: tuple[int, int] = (4, 2)
    """Of queries and of keys."""
    dtype: torch.dtype = torch.bfloat16
    spread: float = 0.7
    """Standard deviation of the scores."""

    def spec(self, packing: Packing | None = None) -> AttentionSpec:
        return AttentionSpec(
            causal=self.causal,
            scale=self.spread * self.head_dim**-0.5,
            packing=packing,
            window=self.window,
            prefix_len=self.prefix_len,
            shift=self.shift,
            softcap=self.softcap,
        )

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and do as a transformer stores them: [B, S, H, D] underneath."""
        generator = torch.Generator("cuda").manual_seed(11)

        def randn(length: int, heads: int) -> Tensor:
            shape = (self.batch, length, heads, self.head_dim)
            x = torch.randn(shape, generator=generator, device="cuda")
            return x.to(self.dtype).transpose(1, 2)

        (q_len, kv_len), (heads, kv_heads) = self.lengths, self.heads
        return (
            randn(q_len, heads),
            randn(kv_len, kv_heads),
            randn(kv_len, kv_heads),
            randn(q_len, heads),
        )


def visible(case: Case, q_len: int, kv_len: int) -> Tensor:
    """Which query sees which key, [q_len, kv_len], pair by pair."""
    p = torch.arange(q_len, device="cuda")[:, None] + kv_len - q_len + case.shift
    key = torch.arange(kv_len, device="cuda")[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device="cuda")
    if case.causal:
        seen &= key <= p
    if case.window is not None:
        seen &= (p - key).abs() < case.window
    return seen | (key < case.prefix_len)


def exact(
    case: Case, q: Tensor, k: Tensor, v: Tensor, do: Tensor, got_o: Tensor
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv in float64; rows without keys are zero, lse -inf.

    The gradients take rowsum(do * o) from the output ``got_o`` that the backward pass was given.
    Where softmax has all its weight on one key, dP minus this sum cancels, and the output's
    rounding alone can move dq by 1.3%.
    """
    q, k, v, do, got_o = (x.double() for x in (q, k, v, do, got_o))
    scale = case.spec().scale
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ keys.mT * scale
    slope = 1.0
    if case.softcap is not None:
        tanh = torch.tanh(scores / case.softcap)
        scores, slope = case.softcap * tanh, 1 - tanh.square()
    scores = scores.masked_fill(~visible(case, q.shape[2], k.shape[2]), -torch.inf)
    lse = scores.logsumexp(dim=-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
    o = p @ values
    ds = p * (do @ values.mT - (do * got_o).sum(-1, keepdim=True)) * slope * scale
    dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (ds.mT @ q, p.mT @ do))
    return o, lse, ds @ keys, dk, dv


def excess(got: Tensor, expected: Tensor) -> Tensor:
    """How far rows of o are off, each for itself, so that one among thousands is noticed."""
    error = (got.double() - expected).norm(dim=-1)
    return error / (1e-2 * expected.norm(dim=-1) + 2e-3)


def excess_of_lse(got: Tensor, expected: Tensor, spread: float = 1.0) -> Tensor:
    """A key too many of a thousand changes it by 1e-3, and float32's sums by 1e-5.

    Both grow with the scores. Infinite where one of the two is minus infinity.
    """
    unseen = expected == -torch.inf
    error = (got.double() - expected).masked_fill(unseen, 0.0).abs()
    found = error / (1e-4 * max(1.0, spread))
    return found.masked_fill((got == -torch.inf) != unseen, torch.inf)


def excess_of_gradient(got: Tensor, expected: Tensor) -> Tensor:
    """How far a gradient is off as a whole: one number, at most 1."""
    return (got.double() - expected).norm() / (5e-3 * expected.norm() + 1e-3)


def wrong(found: dict[str, Tensor]) -> list[str]:
    """What exceeds 1, or is no number, and where.

    Processes that share a GPU wait for each other whenever one waits for its results: it does so
    once for all that is right.
    """
    # Of no rows, all are right.
    right = {what: (x <= 1).all() for what, x in found.items()}
    if bool(torch.stack([*right.values()]).all()):
        return []
    named = []
    for what, x in found.items():
        if not bool(right[what]):
            worst = x.nan_to_num(torch.inf).argmax()
            place = [int(index) for index in torch.unravel_index(worst, x.shape)]
            named.append(f"{what}{place or ''} at {float(x.flatten()[worst]):.3g} of its bound")
    return named


def failures(case: Case, *, backward: bool = False) -> list[str]:
    """What is wrong with the results of a call, and of the same call again."""
    q, k, v, do = case.tensors()
    call = FlashCall(q=q, k=k, v=v, spec=case.spec(), options=ON_HOPPER_ONLY)
    results: list[tuple[Tensor, ...]] = []
    for _ in range(2):
        o, lse = operator.forward(call)
        results.append((o, lse, *(operator.backward(call, do, o, lse) if backward else ())))
    o, lse, *gradients = results[0]
    expected = exact(case, q, k, v, do, o)
    found = {
        "o": excess(o, expected[0]),
        "lse": excess_of_lse(lse, expected[1], case.spread),
    }
    for name, got, wanted in zip(("dq", "dk", "dv"), gradients, expected[2:], strict=False):
        found[name] = excess_of_gradient(got, wanted)
    for name, first, second in zip(("o", "lse", "dq", "dk", "dv"), *results, strict=False):
        found[f"{name} from run to run"] = (first != second).any() * 2.0
    return wrong(found)


def check(cases: Iterable[Case], *, backward: bool = False) -> None:
    """Runs all, and names those that fail."""
    found = [(c, what) for c in cases if (what := failures(c, backward=backward))]
    assert not found, "\n" + "\n".join(f"{case}: {'; '.join(what)}" for case, what in found)


@pytest.mark.gpu
@needs_hopper
class TestOnHopper:
    # Ends within tiles and beside their ends, and more or fewer keys than queries. Multiples of 16
    # have kernels of their own.
    LENGTHS = ((3, 2), (129, 129), (383, 385), (300, 1111), (1111, 300), (1500, 1500))
    WINDOWS = (1, 7, 64, 128, 129, 200, 1000)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_windows_at_ends_of_tiles(self, head_dim: int) -> None:
        check(
            Case(head_dim=head_dim, lengths=lengths, window=window)
            for lengths, window in product(((384, 512), (512, 384)), (64, 128, 200))
        )

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
    @pytest.mark.parametrize("causal", [True, False])
    def test_windows(self, head_dim: int, causal: bool) -> None:
        check(
            Case(head_dim=head_dim, lengths=lengths, causal=causal, window=window)
            for lengths, window in product(self.LENGTHS, self.WINDOWS)
        )

    @pytest.mark.parametrize(
        ("head_dim", "size"),
        [*product((64, 96, 128), [(2, 2), (2, 4)]), (64, (3, 1)), (64, (3, 2))],
    )
    @pytest.mark.parametrize("causal", [True, False])
    def test_windows_with_larger_programs(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool, size: tuple[int, int]
    ) -> None:
        """Programs of sizes that so few heads would not get, and windows that hide something.

        No length is a multiple of 16, so that one kernel is compiled.
        """
        monkeypatch.setattr(plans, "FORWARD_SIZE", ProgramSize(*size))
        monkeypatch.setattr(plans, "FORWARD_PLANS", {})
        lengths_and_windows = [
            (lengths, window)
            for lengths, window in product(self.LENGTHS, self.WINDOWS)
            if window < min(lengths) and not any(length % 16 == 0 for length in lengths)
        ]
        check(
            Case(head_dim=head_dim, lengths=lengths, causal=causal, window=window)
            for lengths, window in lengths_and_windows
        )
        for plan in plans.FORWARD_PLANS.values():
            assert (plan.constants["CONSUMERS"], plan.constants["TILES"]) == size

    @pytest.mark.parametrize(
        ("head_dim", "key_tile"), [(64, 64), (64, 128), (40, 64), (96, 64), (128, 64)]
    )
    @pytest.mark.parametrize("causal", [True, False])
    def test_small_programs(
        self, monkeypatch: pytest.MonkeyPatch, head_dim: int, key_tile: int, causal: bool
    ) -> None:
        """All masks; prefixes, caps and packed batches would get other programs."""
        monkeypatch.setattr(plans, "FORWARD_SIZE", ProgramSize(1, 1, key_tile))
        monkeypatch.setattr(plans, "FORWARD_PLANS", {})
        plain = Case(head_dim=head_dim, causal=causal)
        windows = [replace(plain, window=window) for window in (None, *self.WINDOWS)]
        cases = [
            *(replace(case, lengths=x) for case in windows for x in self.LENGTHS),
            *(
                replace(plain, lengths=(300, 1111), window=200, shift=shift)
                for shift in (-2000, -129, 1, 500, 3000)
            ),
            *(replace(plain, softcap=CAP, spread=spread) for spread in (0.7, 100.0)),
            replace(plain, dtype=torch.float16, batch=3, heads=(6, 1), spread=20.0),
        ]
        if causal:
            prefixes = product((1, 128, 333), (0, -129, 500))
            cases += [replace(plain, prefix_len=n, shift=shift) for n, shift in prefixes]
        check(cases)
        for case in (plain, replace(plain, window=100, softcap=CAP)):
            self.check_packed(case, backward=False)
        assert all("CONSUMERS" not in plan.constants for plan in plans.FORWARD_PLANS.values())

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("causal", [True, False])
    def test_shifted_windows(self, head_dim: int, causal: bool) -> None:
        """Queries without any key before, or behind, or both beside others that have some."""
        shifts = (-2000, -700, -129, -1, 1, 63, 500, 3000)
        check(
            Case(head_dim=head_dim, lengths=lengths, causal=causal, window=window, shift=shift)
            for lengths, window, shift in product(
                ((777, 777), (300, 1111), (1111, 300)), (7, 200), shifts
            )
        )
        backward = (
            Case(head_dim=head_dim, lengths=lengths, causal=causal, window=200, shift=shift)
            for lengths, shift in product(((300, 1111), (1111, 300)), (-129, 500))
        )
        check(backward, backward=True)

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
    def test_shifts_and_prefixes(self, head_dim: int) -> None:
        check(
            Case(head_dim=head_dim, lengths=lengths, prefix_len=prefix_len, shift=shift)
            for lengths, prefix_len, shift in product(
                ((777, 777), (300, 1111), (1111, 300)),
                (0, 1, 100, 128, 333, 2000),
                (0, -2000, -129, -1, 1, 127, 500, 3000),
            )
        )
        backward = (
            Case(head_dim=head_dim, lengths=lengths, prefix_len=prefix_len, shift=shift)
            for lengths, prefix_len, shift in product(
                ((300, 1111), (1111, 300)), (1, 333, 2000), (-129, 127, 3000)
            )
        )
        check(backward, backward=True)

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize(
        "mask", [{}, {"causal": False}, {"window": 200}, {"prefix_len": 300}], ids=str
    )
    def test_caps(self, mask: dict, head_dim: int) -> None:
        """Scores well below the cap, around it, and far beyond."""
        case = Case(head_dim=head_dim, softcap=CAP, **mask)
        check(replace(case, spread=spread) for spread in (0.7, 5.0, 100.0))
        if not mask:
            check([replace(case, softcap=50.0, spread=30.0)])
            # Most scores are at the cap, where it has no slope.
            check([replace(case, spread=100.0)], backward=True)

    @pytest.mark.parametrize("lengths", [(1, 1), (1, 1500), (1500, 1)])
    @pytest.mark.parametrize("causal", [True, False])
    def test_one_query_and_one_key(self, causal: bool, lengths: tuple[int, int]) -> None:
        case = Case(head_dim=64, lengths=lengths, causal=causal)
        masks = ((1, 0), (200, 0), (200, -7))
        check([replace(case, window=x, shift=shift) for x, shift in masks], backward=True)

    @pytest.mark.parametrize("heads", [(1, 1), (6, 6), (8, 1)])
    @pytest.mark.parametrize("causal", [True, False])
    def test_float16_heads_and_batches(self, causal: bool, heads: tuple[int, int]) -> None:
        case = Case(head_dim=80, dtype=torch.float16, batch=3, window=130, lengths=(515, 600))
        check([replace(case, heads=heads, causal=causal)], backward=True)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_long_sequences_many_times(self, head_dim: int) -> None:
        """Many programs, whose rings go round often: equal bits each time, and the right ones."""
        case = Case(head_dim=head_dim, lengths=(8192, 8192), window=1024, heads=(4, 1))
        check([case], backward=True)
        q, k, v, _ = case.tensors()
        call = FlashCall(q=q, k=k, v=v, spec=case.spec(), options=ON_HOPPER_ONLY)
        first = operator.forward(call)
        for _ in range(100):
            assert all(map(torch.equal, operator.forward(call), first))

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize("causal", [True, False])
    def test_keys_outside_all_windows_are_not_read(self, head_dim: int, causal: bool) -> None:
        """Where no tile of keys begins or ends: a number that is none has no place to hide."""
        case = Case(head_dim=head_dim, lengths=(100, 1500), causal=causal, window=64, shift=-700)
        q, k, v, _ = case.tensors()
        spec = case.spec()
        clean = operator.forward(FlashCall(q=q, k=k, v=v, spec=spec, options=ON_HOPPER_ONLY))
        seen = visible(case, 100, 1500).any(0).nonzero().flatten().tolist()
        start, stop = seen[0], seen[-1] + 1
        k, v = k.clone(), v.clone()
        k[:, :, :start], k[:, :, stop:] = torch.nan, torch.nan
        # Hidden values of a tile that is visited are multiplied with zero, which is NaN of NaN.
        v[:, :, : start // 128 * 128], v[:, :, -(-stop // 128) * 128 :] = torch.nan, torch.nan
        planted = operator.forward(FlashCall(q=q, k=k, v=v, spec=spec, options=ON_HOPPER_ONLY))
        assert clean[0].isfinite().all()
        assert all(map(torch.equal, planted, clean))

    @pytest.mark.parametrize(
        "case",
        [
            Case(head_dim=64, window=100),
            Case(head_dim=128, window=130, causal=False, softcap=CAP),
            Case(head_dim=256, window=65, shift=-3),
            Case(head_dim=64, prefix_len=150, shift=2),
            Case(head_dim=128, softcap=CAP),
        ],
        ids=("window", "symmetric, cap", "wide, shift", "prefix, shift", "cap"),
    )
    def test_packed(self, case: Case) -> None:
        self.check_packed(case, backward=True)

    def check_packed(self, case: Case, *, backward: bool) -> None:
        """The mask is of each sequence; some have no queries, or no keys."""
        pairs = ((300, 300), (1, 1), (0, 40), (513, 700), (64, 0), (700, 513), (65, 129))
        ends_q, ends_k = ([0, *accumulate(x)] for x in zip(*pairs, strict=True))
        packing = Packing(
            cu_seqlens_q=torch.tensor(ends_q, dtype=torch.int32, device="cuda"),
            cu_seqlens_k=torch.tensor(ends_k, dtype=torch.int32, device="cuda"),
            max_q_len=700,
            max_kv_len=700,
        )
        dense = replace(case, lengths=(ends_q[-1], ends_k[-1])).tensors()
        q, k, v, do = (x[0].transpose(0, 1) for x in dense)
        call = FlashCall(q=q, k=k, v=v, spec=case.spec(packing), options=ON_HOPPER_ONLY)
        o, lse = operator.forward(call)
        gradients = operator.backward(call, do, o, lse) if backward else ()
        found = []
        spans = zip(pairwise(ends_q), pairwise(ends_k), strict=True)
        for number, (queries, keys) in enumerate((slice(*a), slice(*b)) for a, b in spans):
            q_, do_, o_ = (dense_part(x, queries) for x in (q, do, o))
            k_, v_ = (dense_part(x, keys) for x in (k, v))
            expected = exact(case, q_, k_, v_, do_, o_)
            what = {
                "o": excess(o_, expected[0]),
                "lse": excess_of_lse(lse[None, :, queries], expected[1]),
            }
            for name, got, wanted, rows in zip(
                ("dq", "dk", "dv"), gradients, expected[2:], (queries, keys, keys), strict=False
            ):
                what[name] = excess_of_gradient(dense_part(got, rows), wanted)
            found += [f"sequence {number}, {pairs[number]}: {x}" for x in wrong(what)]
        assert not found, "\n" + "\n".join(found)


def dense_part(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> [1, H, S, D] of one sequence."""
    return x[rows].transpose(0, 1).unsqueeze(0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_compiles_for_masks(kernel: str, head_dim: int) -> None:
    """In a process of its own, since this one may have Triton's interpreter."""
    pytest.importorskip("triton.experimental.gluon")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_hopper", kernel, str(head_dim), "masks"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", run.stdout)]
    # Besides, short windows in the backward pass, and programs of other sizes in the forward pass.
    usual, extra = spilled[:5], spilled[5:]
    sizes = 4 if head_dim <= 64 else 3
    assert len(extra) == (0 if head_dim > 128 else 1 if kernel == "backward" else sizes)
    if kernel == "backward":
        limit = 512 if head_dim <= 128 else 128
    else:
        limit = 0 if head_dim <= 128 else 32
    assert max(usual) <= limit, run.stdout
    assert max(extra, default=0) <= (256 if kernel == "backward" else 16), run.stdout


class TestPlans:
    """What the forward kernel is told of a mask."""

    def plan(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        causal: bool = True,
        window: int | None = None,
        prefix_len: int = 0,
        shift: int = 0,
        softcap: float | None = None,
    ) -> tuple[str, float, str, tuple[int, ...]]:
        """Its mask, its cap, the size of its programs, and the mask's numbers."""
        pytest.importorskip("triton.experimental.gluon")
        properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        q = torch.empty(8, 12, 1024, 64, dtype=torch.bfloat16)
        problem = describe(
            q, q, q, causal=causal, window=window, prefix_len=prefix_len, shift=shift,
            softcap=softcap,
        )  # fmt: skip
        lse = torch.empty(8, 12, 1024)
        launch = plans.plan_forward(
            ForwardPass(problem=problem, q=q, k=q, v=q, o=q, lse=lse, scale=1.0)
        )
        names = [x for x in launch.kernel.arg_names if x not in launch.constants]
        # Tensors before, the scale behind.
        numbers = dict(zip(names[-1 - len(launch.integers) : -1], launch.integers, strict=True))
        constants = launch.constants
        size = ProgramSize(
            constants.get("CONSUMERS", 1), constants.get("TILES", 1), constants["BLOCK_K"]
        )
        return (
            *(constants["MASK"], constants["SOFTCAP"], size.name),
            tuple(numbers[name] for name in ("window", "prefix_len", "shift")),
        )

    def test_of_plain_masks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.plan(monkeypatch) == ("plain", 0.0, "k64", (0, 0, 0))
        # One that hides nothing.
        assert self.plan(monkeypatch, window=1024) == ("plain", 0.0, "k64", (0, 0, 0))

    def test_of_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Small programs were not measured with shifts, prefixes and caps."""
        assert self.plan(monkeypatch, window=9) == ("window", 0.0, "k64", (9, 0, 0))
        assert self.plan(monkeypatch, causal=False, window=9) == ("window", 0.0, "k64", (9, 0, 0))
        assert self.plan(monkeypatch, window=9, shift=2) == ("window", 0.0, "2x1", (9, 0, 2))
        assert self.plan(monkeypatch, window=9, softcap=9.0) == ("window", 9.0, "2x1", (9, 0, 0))
        assert self.plan(monkeypatch, prefix_len=9) == ("prefix", 0.0, "2x1", (0, 9, 0))
        assert self.plan(monkeypatch, shift=-9) == ("prefix", 0.0, "2x1", (0, 0, -9))
        assert self.plan(monkeypatch, softcap=9.0) == ("plain", 9.0, "2x1", (0, 0, 0))

    def test_the_forward_pass_takes_them(self) -> None:
        q = torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)
        problem = describe(q, q, q, causal=True, window=3, shift=1, softcap=2.0)
        assert problem.asks_for() <= hopper.FORWARD_TAKES
