"""The compiled autograd node: built here, and run over kernels made of Python."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_kernels import Callbacks, EmulatedGpu, emulate
from native_node import NODE, run
from torch import Tensor

from kernels.backends import flash_triton
from kernels.flash import flash_attention, function, native
from kernels.flash.any_gpu import launch as any_gpu
from kernels.flash.call.arguments import FlashOptions
from kernels.problem import AttentionSpec

PASS = ["flash_forward_small", "row_statistics", "flash_backward", "finish_dq"]


class Setting:
    """Emulated kernels, a driver of callbacks, and a node that has learnt nothing yet."""

    def __init__(self, gpu: EmulatedGpu, driver: Callbacks) -> None:
        self.gpu, self.driver = gpu, driver
        self.in_python = 0
        """How many backward passes the node has left to Python."""

    @property
    def by_triton(self) -> int:
        return sum(kernel.by_triton for kernel in self.gpu.kernels.values())


@pytest.fixture
def setting(native_module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    gpu = emulate(monkeypatch, batch=2)
    made = Setting(gpu, Callbacks(gpu))
    monkeypatch.setattr(native, "build", lambda folder: native_module)
    monkeypatch.setattr(native, "_addresses", lambda: made.driver.addresses)
    unlearnt(monkeypatch)
    backward = native._backward

    def counted(*arguments: Any) -> Any:
        made.in_python += 1
        return backward(*arguments)

    monkeypatch.setattr(native, "_backward", counted)
    yield made
    native_module.forget()


def unlearnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._Node, "module", None)
    monkeypatch.setattr(native._Node, "reason", None)


def inputs(
    heads: int = 4, kv_heads: int = 4, q_len: int = 130, kv_len: int = 130, head_dim: int = 64,
    *, seed: int = 0, transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """q, k, v, which require gradients, and do; with a batch size of 2."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for n, length in ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len), (heads, q_len)):
        shape = (2, length, n, head_dim) if transposed else (2, n, length, head_dim)
        x = torch.randn(shape, generator=generator).to(torch.bfloat16)
        made.append(x.transpose(1, 2) if transposed else x)
    q, k, v, do = made
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), do


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool = True) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in float64 by PyTorch's own formulas."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool)
        scores = scores.masked_fill(~visible.tril(k.shape[2] - q.shape[2]), -torch.inf)
    o = scores.softmax(-1) @ values
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def assert_near(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for what, x, wanted in zip(("o", "dq", "dk", "dv"), got, expected, strict=True):
        error = float((x.detach().double() - wanted).norm())
        assert error <= 5e-3 * float(wanted.norm()) + 1e-4, f"{what}: {error:.3g}"


def learn(causal: bool = True, **shape: Any) -> None:
    """One call of Python's, after which the node knows those like it."""
    run(*inputs(**shape, seed=100), causal=causal)


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "as a transformer stores them": {"transposed": True},
    "odd width": {"head_dim": 80, "q_len": 33, "kv_len": 33},
    "grouped": {"kv_heads": 2, "kv_len": 200},
    "in bands": {"heads": 1, "kv_heads": 1, "q_len": 1030, "kv_len": 1030},
    "in halves": {"heads": 6, "kv_heads": 3, "q_len": 1024, "kv_len": 1024, "head_dim": 16},
}


class TestGradients:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("causal", [True, False])
    def test_bit_for_bit_as_python_and_near_float64(
        self, setting: Setting, shape: str, causal: bool
    ) -> None:
        learn(causal, **SHAPES[shape])
        by_triton = setting.by_triton
        given = inputs(**SHAPES[shape])
        assert flash_attention(*given[:3], causal=causal).grad_fn.name() == NODE
        got = run(*given, causal=causal)
        assert_near(got, exact(*given, causal=causal))
        by_python = run(*given, causal=causal, autograd="python")
        assert all(map(torch.equal, got, by_python))
        for x, like in zip(got, (given[0], *given[:3]), strict=True):
            assert x.stride() == like.stride()
        assert setting.by_triton == by_triton
        assert setting.in_python == 0

    def test_launches_go_to_the_current_stream(self, setting: Setting) -> None:
        learn()
        assert setting.gpu.launches == []
        setting.driver.stream = 99
        run(*inputs(), causal=True)
        assert setting.gpu.launches == PASS
        assert setting.gpu.streams == [99] * 4

    def test_every_scale_of_one_plan(self, setting: Setting) -> None:
        learn()
        by_triton = setting.by_triton
        for scale in (0.3, 1):
            given = inputs()
            got = run(*given, causal=True, scale=scale)
            assert all(
                map(torch.equal, got, run(*given, causal=True, scale=scale, autograd="python"))
            )
        assert setting.by_triton == by_triton

    @pytest.mark.parametrize("layout", ["expanded", "transposed", "misaligned"])
    def test_any_layout_of_do(self, setting: Setting, layout: str) -> None:
        learn()
        for number in range(2):
            q, k, v, do = inputs(seed=number)
            if layout == "expanded":
                do = do[:1, :1, :1, :1].expand(do.shape)
            elif layout == "transposed":
                do = do.transpose(1, 2).contiguous().transpose(1, 2)
            else:
                do = torch.cat([do.flatten()[:1], do.flatten()])[1:].view(do.shape)
            assert_near(run(q, k, v, do, causal=True), exact(q, k, v, do))


class TestAutograd:
    def test_a_graph_is_used_once_unless_it_is_kept(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        second = torch.autograd.grad(o, (q, k, v), do)
        assert all(map(torch.equal, first, second))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(o, (q, k, v), do)

    @pytest.mark.parametrize("what", ["q", "o"])
    def test_a_saved_tensor_that_changed(self, setting: Setting, what: str) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        with torch.no_grad():
            {"q": q, "o": o}[what].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.backward(do)

    def test_a_second_derivative_is_refused(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
        penalty = (dq.float() ** 2).sum() + o.float().sum()
        message = "^flash_attention: second derivatives are not available; attention=naive has them"
        for ask in (lambda: torch.autograd.grad(penalty, k, retain_graph=True), penalty.backward):
            with pytest.raises(RuntimeError, match=message):
                ask()

    def test_saved_tensors_hooks(self, setting: Setting) -> None:
        """Activation offloading and checkpointing: other tensors may come back than were saved."""
        learn()
        given = inputs()
        for unpack, in_python in ((lambda x: x.clone(), 0), (_transposed_copy, 1)):
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), unpack):
                got = run(*given, causal=True)
            assert_near(got, exact(*given))
            assert setting.in_python == in_python

    def test_a_failure_in_python_arrives_as_it_is(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(*arguments: Any) -> None:
            raise KeyError("of its own")

        monkeypatch.setattr(native, "_backward", fails)
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        with pytest.raises(KeyError, match="of its own"):
            o.backward(_transposed_copy(do))

    def test_nothing_outlives_the_result(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        given = q * 1
        o = flash_attention(given, k, v, causal=True)
        assert o.grad_fn.name() == NODE
        kept = weakref.ref(given)
        del given
        del o
        assert kept() is None


def _transposed_copy(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class TestWhatIsLeftToPython:
    def test_tensors_that_the_kernels_cannot_take_as_they_are(self, setting: Setting) -> None:
        class Named(Tensor):
            pass

        learn()
        q, k, v, do = inputs()
        shifted = torch.cat([q.detach().flatten()[:1], q.detach().flatten()])[1:].view(q.shape)
        for other in (shifted.requires_grad_(), q.detach().as_subclass(Named).requires_grad_()):
            o = flash_attention(other, k, v, causal=True)
            assert o.grad_fn.name() != NODE
            assert_near(
                (o.detach(), *torch.autograd.grad(o, (other, k, v), do)), exact(q, k, v, do)
            )

    def test_functional_transformations(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda q: flash_attention(q, k, v, causal=True).float().sum())(q)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(RuntimeError, match="jvp"):
                flash_attention(dual, k, v, causal=True)

    def test_lse_and_python_by_choice(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        o, _ = flash_attention(q, k, v, causal=True, return_lse=True)
        assert o.grad_fn.name() != NODE
        o = flash_attention(q, k, v, causal=True, options=FlashOptions(autograd="python"))
        assert o.grad_fn.name() != NODE

    def test_launches_that_the_driver_refuses(self, setting: Setting) -> None:
        learn()
        q, k, v, do = given = inputs()
        for refused in ("forward", "backward"):
            setting.gpu.error = 700 if refused == "forward" else 0
            o = flash_attention(q, k, v, causal=True)
            setting.gpu.error = 700 - setting.gpu.error
            got = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
            setting.gpu.error = 0
            assert_near(got, exact(*given))
        assert setting.in_python == 1


class TestChoice:
    def test_records_say_where_gradients_ran_through_the_node(self, setting: Setting) -> None:
        q, k, v, do = inputs()
        for autograd, calls, noted in (
            ("auto", 1, {}),
            ("auto", 1, {}),
            ("auto", 2, {"autograd": "native"}),
            ("python", 2, {}),
            ("native", 2, {"autograd": "native"}),
        ):
            notes: dict[str, Any] = {}
            backend = flash_triton.FlashTriton(name="flash_triton", autograd=autograd)
            with backend.noting(notes):
                # Of the first call of each case Python is asked.
                for _ in range(calls):
                    o = backend.attend(q, k, v, AttentionSpec(causal=True, scale=0.1))
                    torch.autograd.grad(o, (q, k, v), do)
            assert notes == noted

    def test_what_makes_no_sense_is_refused(self) -> None:
        assert function.AUTOGRAD == flash_triton.AUTOGRAD
        with pytest.raises(ValueError, match="autograd=c: must be one of auto, native, python"):
            flash_triton.FlashTriton(name="flash_triton", autograd="c")

    @pytest.mark.skipif(not any_gpu.INTERPRETED, reason="runs under Triton's interpreter")
    def test_native_where_nothing_is_compiled(self) -> None:
        q = torch.zeros(1, 1, 4, 16, requires_grad=True)
        with pytest.raises(ValueError, match="autograd=native: Triton's interpreter compiles noth"):
            flash_attention(q, q, q, options=FlashOptions(autograd="native"))


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulate(monkeypatch, batch=2)
    unlearnt(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")


class TestWithoutACompiler:
    @pytest.mark.usefixtures("no_compiler")
    def test_python_goes_on_and_warns_once(self) -> None:
        given = inputs()
        with pytest.warns(UserWarning, match="no-such-compiler is not found") as caught:
            got = run(*given, causal=True)
        assert len(caught) == 1
        assert_near(got, exact(*given))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(*given, causal=True)

    @pytest.mark.usefixtures("no_compiler")
    def test_native_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(function.dispatch, "why_not", lambda *_: None)
        with pytest.raises(ValueError, match="autograd=native: no C\\+\\+ compiler"):
            flash_attention(*inputs()[:3], options=FlashOptions(autograd="native"))
