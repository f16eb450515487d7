"""The compiled autograd node: built here, and run over kernels made of Python."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_kernels import CONTEXT, Callbacks, EmulatedGpu, emulate
from native_node import NODE, ON_HOPPER, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernels.backends import flash_triton
from kernels.backends.auto import Auto
from kernels.flash import flash_attention, function, native
from kernels.flash.call.arguments import FlashOptions
from kernels.problem import AttentionSpec

PASS = ["flash_forward", "row_statistics", "flash_backward", "finish_dq"]


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


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, causal: bool, scale: float | None = None
) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in float64 by PyTorch's own formulas."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ keys.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
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
    "wide": {"head_dim": 128, "q_len": 70, "kv_len": 70},
    "odd width": {"head_dim": 80, "q_len": 33, "kv_len": 33},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "transposed": True},
    "more keys": {"kv_len": 200},
    "one token": {"q_len": 1, "kv_len": 1},
}


class TestGradients:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("causal", [True, False])
    def test_against_float64(self, setting: Setting, shape: str, causal: bool) -> None:
        learn(causal, **SHAPES[shape])
        by_triton = setting.by_triton
        for seed in range(2):
            given = inputs(**SHAPES[shape], seed=seed)
            assert flash_attention(*given[:3], causal=causal).grad_fn.name() == NODE
            got = run(*given, causal=causal)
            assert_near(got, exact(*given, causal=causal))
            by_python = run(*given, causal=causal, autograd="python")
            assert all(map(torch.equal, got, by_python))
            for x, like in zip(got, (given[0], *given[:3]), strict=True):
                assert x.stride() == like.stride()
        assert setting.by_triton == by_triton
        assert setting.in_python == 0

    def test_what_is_launched(self, setting: Setting) -> None:
        learn()
        assert setting.gpu.launches == []
        run(*inputs(), causal=True)
        assert setting.gpu.launches == PASS
        assert setting.gpu.streams == [77] * 4
        setting.driver.stream = 99
        run(*inputs(), causal=True)
        assert setting.gpu.streams[4:] == [99] * 4

    def test_one_tensor_as_three_teaches_nothing_wrong(self, setting: Setting) -> None:
        x, *_, do = inputs()
        for _ in range(2):
            o = flash_attention(x, x, x, causal=True)
            (dx,) = torch.autograd.grad(o, x, do)
            expected = exact(x, x, x, do, causal=True)
            assert_near((o, *[dx] * 3), (expected[0], *[sum(expected[1:])] * 3))  # type: ignore[list-item]
        assert o.grad_fn.name() == NODE
        given = inputs(seed=3)
        assert_near(run(*given, causal=True), exact(*given, causal=True))

    def test_every_scale_of_one_plan(self, setting: Setting) -> None:
        learn()
        by_triton = setting.by_triton
        for scale in (0.3, 0.05, 1):
            given = inputs()
            got = run(*given, causal=True, scale=scale)
            assert_near(got, exact(*given, causal=True, scale=scale))
        assert setting.by_triton == by_triton

    def test_several_plans(self, setting: Setting) -> None:
        shapes = ({}, {"q_len": 64, "kv_len": 64}, {"kv_heads": 2}, {"transposed": True})
        for shape in shapes:
            for causal in (True, False):
                learn(causal, **shape)
        by_triton = setting.by_triton
        for shape in shapes:
            for causal in (True, False):
                given = inputs(**shape)
                assert_near(run(*given, causal=causal), exact(*given, causal=causal))
        assert setting.by_triton == by_triton

    def test_inputs_without_gradients(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        expected = exact(q, k, v, do, causal=True)
        o = flash_attention(q.detach(), k, v.detach(), causal=True)
        assert o.grad_fn.name() == NODE
        o.backward(do)
        assert k.grad is not None
        assert_near((o.detach(), *[k.grad] * 3), (expected[0], *[expected[2]] * 3))
        with torch.no_grad():
            assert not flash_attention(q, k, v, causal=True).requires_grad
        assert not flash_attention(q.detach(), k.detach(), v.detach(), causal=True).requires_grad

    def test_without_any_gradient_it_is_zero(self, setting: Setting) -> None:
        class Drops(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, dx: Tensor) -> None:
                return None

        learn()
        q, k, v, _ = inputs()
        Drops.apply(flash_attention(q, k, v, causal=True)).sum().backward()
        for x in (q, k, v):
            assert x.grad is not None
            assert not x.grad.any()

    @pytest.mark.parametrize("layout", ["expanded", "transposed", "odd rows", "misaligned"])
    def test_any_layout_of_do(self, setting: Setting, layout: str) -> None:
        learn()
        for number in range(3):
            q, k, v, do = inputs(seed=number)
            if layout == "expanded":
                do = do[:1, :1, :1, :1].expand(do.shape)
            elif layout == "transposed":
                do = do.transpose(1, 2).contiguous().transpose(1, 2)
            elif layout == "odd rows":
                do = torch.cat([do, do[..., :1]], dim=-1)[..., :64]
            else:
                do = torch.cat([do.flatten()[:1], do.flatten()])[1:].view(do.shape)
            assert_near(run(q, k, v, do, causal=True), exact(q, k, v, do, causal=True))
        # What is not aligned is not so from call to call.
        assert setting.in_python == (3 if layout == "misaligned" else 1)


class TestAutograd:
    def test_two_backward_passes(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        first = torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        second = torch.autograd.grad(o, (q, k, v), do)
        assert all(map(torch.equal, first, second))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(o, (q, k, v), do)

    @pytest.mark.parametrize("what", ["q", "v", "o"])
    def test_a_saved_tensor_that_changed(self, setting: Setting, what: str) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        with torch.no_grad():
            {"q": q, "v": v, "o": o}[what].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.backward(do)

    def test_a_second_derivative_is_refused(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        o = flash_attention(q, k, v, causal=True)
        (dq,) = torch.autograd.grad(o, q, do, create_graph=True)
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            (dq.float() ** 2).sum().backward()

    def test_saved_tensors_hooks(self, setting: Setting) -> None:
        learn()
        given = inputs()
        for unpack, in_python in ((lambda x: x.clone(), 0), (_transposed_copy, 1)):
            packed: list[Tensor] = []

            def pack(x: Tensor, packed: list[Tensor] = packed) -> Tensor:
                packed.append(x)
                return x.detach().clone()

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                got = run(*given, causal=True)
            assert [list(x.shape) for x in packed] == [[2, 4, 130, 64]] * 4 + [[2, 4, 130]]
            assert packed[0] is given[0]
            assert_near(got, exact(*given, causal=True))
            assert setting.in_python == in_python

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("first", ["native", "python"])
    def test_checkpoints(self, setting: Setting, reentrant: bool, first: str) -> None:
        """Also where Python ran the forward pass, and the node does so again."""
        if first == "native":
            learn()
        q, k, v, do = inputs()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attention(q * 1, k * 1, v * 1, causal=True)

        o = checkpoint(attend, q, k, v, use_reentrant=reentrant)
        o.backward(do)
        got = (o.detach(), *(x.grad for x in (q, k, v)))
        assert_near(got, exact(q, k, v, do, causal=True))

    def test_hooks_of_tensors_and_nodes(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        expected = exact(q, k, v, 2 * do, causal=True)
        o = flash_attention(q, k, v, causal=True)
        seen: list[int] = []
        o.register_hook(lambda gradient: 2 * gradient)
        o.grad_fn.register_hook(lambda inputs, outputs: seen.append(len(inputs)))
        o.retain_grad()
        o.backward(do)
        assert seen == [3]
        assert torch.equal(o.grad, 2 * do)
        got = (o.detach(), *(x.grad for x in (q, k, v)))
        assert_near(got, expected)

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
            o.backward(do.transpose(1, 2).contiguous().transpose(1, 2))

    def test_threads_share_a_plan(self, setting: Setting) -> None:
        learn()
        setting.gpu.delay_s = 1e-3
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                given = inputs(seed=seed)
                expected = exact(*given, causal=True)
                for _ in range(10):
                    assert_near(run(*given, causal=True), expected)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def _transposed_copy(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class TestWhatIsLeftToPython:
    def left(self, setting: Setting, call: Callable[[], Any]) -> Any:
        before = len(setting.gpu.launches)
        result = call()
        assert result.grad_fn.name() != NODE
        # Python's own launches go to the same driver.
        assert set(setting.gpu.launches[before:]) <= {"flash_forward"}
        return result

    def test_misaligned_tensors(self, setting: Setting) -> None:
        learn()
        q, k, v, do = inputs()
        shifted = torch.cat([q.detach().flatten()[:1], q.detach().flatten()])[1:]
        q = shifted.view(q.shape).requires_grad_()
        o = self.left(setting, lambda: flash_attention(q, k, v, causal=True))
        gradients = torch.autograd.grad(o, (q, k, v), do)
        assert_near((o.detach(), *gradients), exact(q, k, v, do, causal=True))

    def test_subclasses(self, setting: Setting) -> None:
        class Named(Tensor):
            pass

        learn()
        q, k, v, _ = inputs()
        named = q.detach().as_subclass(Named).requires_grad_()
        self.left(setting, lambda: flash_attention(named, k, v, causal=True))
        parameter = torch.nn.Parameter(q.detach())
        assert flash_attention(parameter, k, v, causal=True).grad_fn.name() == NODE

    def test_modes_that_see_every_operation(self, setting: Setting) -> None:
        class Counts(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                names.append(str(function))
                return function(*args, **(kwargs or {}))

        learn()
        q, k, v, do = inputs()
        names: list[str] = []
        with Counts():
            self.left(setting, lambda: flash_attention(q, k, v, causal=True))
        assert any("empty" in name for name in names)
        o = flash_attention(q, k, v, causal=True)
        with Counts():
            o.backward(do)
        assert setting.in_python == 1

    def test_functional_transformations(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        launches = list(setting.gpu.launches)
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda q: flash_attention(q, k, v, causal=True).float().sum())(q)
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.vmap(lambda q: flash_attention(q, k, v, causal=True))(torch.stack([q, q]))
        assert setting.gpu.launches == launches

    def test_forward_mode_derivatives(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
            with pytest.raises(RuntimeError, match="jvp"):
                flash_attention(dual, k, v, causal=True)

    @pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
    def test_scales(self, setting: Setting, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
        learn()
        monkeypatch.setattr(native.dispatch, "forward_of", lambda *_, **__: 1 / 0)
        q, k, v, _ = inputs()
        with pytest.raises(ZeroDivisionError):
            flash_attention(q, k, v, causal=True, scale=scale)

    def test_what_does_not_fit_is_refused_as_ever(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        with pytest.raises(ValueError, match="must be bfloat16, like q"):
            flash_attention(q, k, v.half(), causal=True)
        with pytest.raises(ValueError, match="like k"):
            flash_attention(q, k, v[:, :2], causal=True)

    def test_lse_and_python_by_choice(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        self.left(setting, lambda: flash_attention(q, k, v, causal=True, return_lse=True)[0])
        self.left(
            setting,
            lambda: flash_attention(q, k, v, causal=True, options=FlashOptions(autograd="python")),
        )

    def test_a_profiler_of_triton(self, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
        learn()
        monkeypatch.setattr(native, "is_watched", lambda: True)
        q, k, v, _ = inputs()
        self.left(setting, lambda: flash_attention(q, k, v, causal=True))

    def test_launches_that_the_driver_refuses(self, setting: Setting) -> None:
        learn()
        given = inputs()
        expected = exact(*given, causal=True)
        for refused in ("forward", "backward"):
            q, k, v, do = given
            by_triton = setting.by_triton
            setting.gpu.error = 700 if refused == "forward" else 0
            o = flash_attention(q, k, v, causal=True)
            setting.gpu.error = 700 - setting.gpu.error
            got = (o.detach(), *torch.autograd.grad(o, (q, k, v), do))
            setting.gpu.error = 0
            assert_near(got, expected)
            assert setting.by_triton == by_triton + (1 if refused == "forward" else 3)
        assert setting.in_python == 1

    def test_a_thread_without_a_context_is_given_one(self, setting: Setting) -> None:
        learn()
        run(*inputs(), causal=True)
        assert setting.driver.contexts == []
        setting.driver.has_context = False
        run(*inputs(), causal=True)
        assert setting.driver.contexts == [CONTEXT] * 2

    def test_maps_are_left_alone_while_they_lead_to_the_same_place(self, setting: Setting) -> None:
        learn()
        q, k, v, _ = inputs()
        numbers = []
        for given in ((q, k, v), (q, k, v), (k, q, v), (k, q, v)):
            before = setting.driver.num_replaced
            flash_attention(*given, causal=True)
            numbers.append(setting.driver.num_replaced - before)
        assert numbers == [3, 0, 2, 0]


class TestRecords:
    def test_they_say_where_gradients_ran_through_the_node(self, setting: Setting) -> None:
        q, k, v, do = inputs()
        for autograd, noted in (
            ("auto", {}),
            ("auto", {"autograd": "native"}),
            ("python", {}),
            ("native", {"autograd": "native"}),
        ):
            notes: dict[str, Any] = {}
            backend = flash_triton.FlashTriton(name="flash_triton", autograd=autograd)
            with backend.noting(notes):
                o = backend.attend(q, k, v, AttentionSpec(causal=True, scale=0.1))
                torch.autograd.grad(o, (q, k, v), do)
            assert notes == noted

    def test_attention_auto_says_so_too(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v, do = inputs()
        chosen = flash_triton.FlashTriton(name="flash_triton")
        monkeypatch.setattr("kernels.backends._auto.backend_of_call", lambda *call: chosen)
        for noted in ({}, {"autograd": "native"}):
            notes: dict[str, Any] = {}
            backend = Auto(name="auto")
            with backend.noting(notes):
                o = backend.attend(q, k, v, AttentionSpec(causal=True, scale=0.1))
                torch.autograd.grad(o, (q, k, v), do)
            assert notes == noted


class TestChoice:
    def test_names_are_one_list(self) -> None:
        assert function.AUTOGRAD == flash_triton.AUTOGRAD

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="autograd=c: must be one of auto, native, python"):
            flash_triton.FlashTriton(name="flash_triton", autograd="c")
        with pytest.raises(ValueError, match="not implementation=plain"):
            flash_triton.FlashTriton(
                name="flash_triton", autograd="native", implementation="plain"
            )  # fmt: skip
        q = torch.zeros(1, 1, 4, 16, requires_grad=True)
        with pytest.raises(ValueError, match="autograd is c: must be one of"):
            flash_attention(q, q, q, options=FlashOptions(autograd="c"))

    @pytest.mark.skipif(ON_HOPPER, reason="has the node")
    def test_native_where_hopper_kernels_do_not_run(self) -> None:
        q = torch.zeros(1, 1, 4, 16, requires_grad=True)
        with pytest.raises(ValueError, match="autograd=native: ") as caught:
            flash_attention(q, q, q, options=FlashOptions(autograd="native"))
        assert "\n" not in str(caught.value)


class TestWithoutACompiler:
    def test_without_a_compiler_python_goes_on_and_warns_once(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.undo()
        emulate(monkeypatch, batch=2)
        unlearnt(monkeypatch)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
        given = inputs()
        with pytest.warns(UserWarning, match="no-such-compiler is not found") as caught:
            got = run(*given, causal=True)
        (warning,) = caught
        assert "\n" not in str(warning.message)
        assert_near(got, exact(*given, causal=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_near(run(*given, causal=True), exact(*given, causal=True))

    def test_native_is_an_error_without_a_compiler(
        self, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.undo()
        emulate(monkeypatch, batch=2)
        unlearnt(monkeypatch)
        monkeypatch.setattr(function.dispatch, "why_not", lambda *_: None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setenv("CXX", "no-such-compiler")
        for _ in range(2):
            with pytest.raises(ValueError, match="autograd=native: no C\\+\\+ compiler"):
                flash_attention(*inputs()[:3], causal=True, options=FlashOptions(autograd="native"))
