"""How FlashAttention in Triton is called: autograd, autocast, compilation, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from exact_attention import assert_close, backend, exact, exact_gradients, inputs, packed
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels import BACKENDS, AttentionProblem, Packing
from kernels.flash import FlashAttentionTriton, flash_attention, operator, validate
from kernels.flash.any_gpu import launch
from kernels.flash.call.arguments import FlashCall, FlashOptions
from kernels.problem import AttentionSpec
from kernels.toolchain import why_not_compile

pytestmark = [*RUNS_TRITON, pytest.mark.usefixtures("exact_float32")]


class TestFunctions:
    @pytest.mark.parametrize("shape", [(2, 33, 16), (2, 3, 33, 16)])
    @pytest.mark.parametrize("is_causal", [True, False])
    def test_the_course_contract(self, shape: tuple[int, ...], is_causal: bool) -> None:
        """CS336 assignment 2: what is saved besides Q, K, V and O is the log-sum-exp."""
        Q, K, V, dO = (randn(*shape, seed=s) for s in range(4))
        leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
        O = FlashAttentionTriton.apply(*leaves, is_causal)  # noqa: E741
        saved = [x for x in O.grad_fn.saved_tensors if x.shape == shape[:-1]]
        assert len(saved) == 1
        assert len(O.grad_fn.saved_tensors) == 5
        q, k, v, do = (x if x.dim() == 4 else x[:, None] for x in (Q, K, V, dO))
        expected_o, expected_lse = exact(q, k, v, is_causal, 0.25)
        assert_close(O, expected_o.view(shape), "O", 2e-5)
        assert_close(saved[0], expected_lse.view(shape[:-1]), "L", 2e-5)
        wanted = exact_gradients(q, k, v, do, is_causal, 0.25)
        for got, expected in zip(torch.autograd.grad(O, leaves, dO), wanted, strict=True):
            assert_close(got, expected.view(shape), "gradient", 2e-5)

    def test_not_causal_by_default(self) -> None:
        Q, K, V = (randn(2, 20, 16, seed=s) for s in range(3))
        assert torch.equal(
            FlashAttentionTriton.apply(Q, K, V), FlashAttentionTriton.apply(Q, K, V, False)
        )

    def test_autocast(self) -> None:
        q, k, v, _ = inputs()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            o = flash_attention(q, k, v.bfloat16(), causal=True)
        assert o.dtype == torch.bfloat16
        assert_close(o, exact(q, k, v, True, 0.25)[0], "o", 3e-2)

    def test_without_gradients_nothing_is_kept(self) -> None:
        q, k, v, _ = (x.requires_grad_() for x in inputs())
        with torch.no_grad():
            assert flash_attention(q, k, v).grad_fn is None

    @pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
    def test_compiles_without_graph_break(self, compiler: str) -> None:
        if compiler == "inductor" and (reason := why_not_compile(DEVICE)):
            pytest.skip(reason)
        torch._dynamo.reset()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            o, lse = flash_attention(q * 2, k, v, causal=True, return_lse=True)
            return o.sin(), lse

        q, k, v, do = inputs(heads=4)
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
        results = []
        for function in (attend, torch.compile(attend, fullgraph=True, backend=compiler)):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            o, lse = function(*leaves)
            results.append([o, lse, *torch.autograd.grad((o, lse), leaves, (do, do[..., 0]))])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)

    def test_backend_and_packed_batch_compile(self) -> None:
        torch._dynamo.reset()
        q, k, v, do, packing = packed([(20, 20), (5, 9)])
        flash = backend()

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash.attend(q, k, v, AttentionSpec(causal=True, scale=0.3, packing=packing))

        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
        for own, function in zip(leaves, (attend, compiled), strict=True):
            function(*own).backward(do)
        for eager, other in zip(*leaves, strict=True):
            assert eager.grad is not None
            assert torch.equal(eager.grad, other.grad)

    def test_course_function_compiles(self) -> None:
        torch._dynamo.reset()
        Q, K, V = (randn(2, 20, 16, seed=s).requires_grad_() for s in range(3))
        compiled = torch.compile(FlashAttentionTriton.apply, fullgraph=True, backend="aot_eager")
        compiled(Q, K, V, True).sum().backward()
        assert Q.grad is not None
        wanted = torch.autograd.grad(FlashAttentionTriton.apply(Q, K, V, True).sum(), Q)[0]
        assert torch.equal(Q.grad, wanted)

    def test_backward_of_o_in_either_dtype(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A ring has o in float32, and a launch reads what it was prepared for."""
        prepared: dict[Any, Any] = {}
        monkeypatch.setattr(launch, "_row_terms", prepared)
        q, k, v, do = (randn(1, 2, 40, 16).to(torch.bfloat16) for _ in range(4))
        spec = AttentionSpec(causal=True, scale=0.25)
        call = FlashCall(q=q, k=k, v=v, spec=spec, options=FlashOptions(implementation="plain"))
        o, lse = operator.forward(call)
        expected = operator.backward(call, do, o, lse)
        for _ in range(2):
            found = operator.backward(call, do, o.float(), lse)
            assert all(map(torch.equal, found, expected))
        assert len(prepared) == 2

    def test_operators_keep_pytorchs_rules(self) -> None:
        q, k, v, _ = (x.requires_grad_() for x in inputs(q_len=5, kv_len=5))
        arguments = (q, k, v, True, 0.3, None, None, 0, 0, "ieee", "auto", False, None, None)
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        flash_forward = torch.ops.attnbench.flash_forward.default
        torch.library.opcheck(flash_forward, arguments, test_utils=checks)
        accumulator = (torch.zeros_like(q).detach(), torch.zeros(q.shape[:-1], device=DEVICE))
        arguments = (*(x.detach() for x in arguments[:3]), *arguments[3:12], *accumulator)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(flash_forward, arguments, test_utils=checks)


class TestErrors:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"q": (2, 3, 16)}, r"q is \[2, 3, 16\]: must be \[batch, heads, seq, head_dim\]"),
            ({"v": (1, 2, 8, 16)}, r"v is \[1, 2, 8, 16\]: must be \[1, 2, 9, 16\], like k"),
            ({"q": (1, 2, 9, 8)}, "k has head_dim 16: must be 8, like q"),
            ({"q": (3, 2, 9, 16)}, "k has batch size 1: must be 3, like q"),
            ({"q": (1, 3, 9, 16)}, "k has 2 heads: must divide the 3 heads of q"),
            (
                {"q": (1, 2, 9, 257), "k": (1, 2, 9, 257), "v": (1, 2, 9, 257)},
                "head_dim is 257: must be 1 to 256",
            ),
            ({"dtype_k": torch.float16}, "k is float16: must be float32, like q"),
            ({"dtype_q": torch.float64}, "q is float64: must be one of float32, float16, bfloat16"),
            ({"device_v": "meta"}, "v is on meta: must be on cpu, like q"),
            ({"precision": "high"}, "precision is high: must be one of auto, ieee, bf16x6, tf32"),
            ({"o": torch.float16}, r"the accumulator's o is .*float16.*must be .*float32"),
            ({"cu_dtype": torch.int64}, r"cu_seqlens_q is \[2\] int64 .*: must be .* int32"),
            ({"cu_length": 3}, "cu_seqlens_k has 3 entries: must be 2, like cu_seqlens_q"),
        ],
    )
    def test_one_line_that_says_what_would_be_right(
        self, change: dict[str, Any], message: str
    ) -> None:
        shapes = {name: change.get(name, (1, 2, 9, 16)) for name in "qkv"}
        dtypes = {name: change.get(f"dtype_{name}", torch.float32) for name in "qkv"}
        q, k, v = (
            torch.zeros(
                shapes[name], dtype=dtypes[name], device=change.get(f"device_{name}", "cpu")
            )
            for name in "qkv"
        )
        options: dict[str, Any] = {"precision": change.get("precision", "ieee")}
        if "o" in change:
            options["accumulator"] = (q.to(change["o"]), torch.zeros(1, 2, 9))
        if change.keys() & {"cu_dtype", "cu_length"}:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            options["packing"] = Packing(
                cu_seqlens_q=torch.tensor([0, 9], dtype=change.get("cu_dtype", torch.int32)),
                cu_seqlens_k=torch.zeros(change.get("cu_length", 2), dtype=torch.int32),
                max_q_len=9,
                max_kv_len=9,
            )
        with pytest.raises(ValueError, match=message) as caught:
            validate(q, k, v, **options)
        assert "\n" not in str(caught.value)

    def test_gradients_that_do_not_fit(self) -> None:
        q, k, v, do = inputs(q_len=5, kv_len=5)
        o, lse = backend().forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        spec = AttentionSpec(causal=True, scale=0.3)
        with pytest.raises(ValueError, match=r"do is \[1, 2, 4, 16\]: must be \[1, 2, 5, 16\]"):
            backend().backward(do[:, :, 1:], q, k, v, o, lse, spec)
        with pytest.raises(ValueError, match="do is float16: must be float32, like q"):
            backend().backward(do.half(), q, k, v, o, lse, spec)
        with pytest.raises(ValueError, match="lse is float16: must be float32"):
            backend().backward(do, q, k, v, o, lse.half(), spec)

    def test_options(self) -> None:
        q, k, v, _ = inputs(q_len=5, kv_len=5)
        options = FlashOptions(implementation="best")
        with pytest.raises(ValueError, match="implementation is best: must be one of auto"):
            operator.forward(
                FlashCall(
                    q=q, k=k, v=v, spec=AttentionSpec(causal=True, scale=0.3), options=options
                )
            )
        with pytest.raises(
            ValueError, match=r"attention\.implementation=best: must be one of auto"
        ):
            backend(implementation="best")
        with pytest.raises(ValueError, match=r"attention\.float32_precision=fp8: must be one of"):
            backend(float32_precision="fp8")


def numbers(**changes: Any) -> AttentionProblem:
    small = AttentionProblem(
        batch_size=1, num_heads=2, num_kv_heads=2, q_len=8, kv_len=8, head_dim=16,
        dtype="bfloat16", device=DEVICE, causal=True, needs_grad=True,
    )  # fmt: skip
    return replace(small, **changes)


class TestSupport:
    def test_says_what_it_cannot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert backend().supports(numbers()) is None
        assert backend().supports(numbers(q_len=8, kv_len=3, packed=True)) is None
        assert "256" in backend().supports(numbers(head_dim=512))
        assert "float64" in backend().supports(numbers(dtype="float64"))
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert "CUDA" in backend().supports(numbers(device="cpu"))


class TestResultsIntoTensorsThatThereAre:
    """Rows in the middle of larger tensors, of a packed batch and of a dense one."""

    @pytest.mark.parametrize("name", ["flash_triton", "naive"])
    @pytest.mark.parametrize("is_packed", [True, False])
    @pytest.mark.parametrize("dense_rows", [True, False])
    def test_rows_of_larger_ones(self, name: str, is_packed: bool, dense_rows: bool) -> None:
        q, k, v, do = inputs(heads=4)
        packing = None
        if is_packed:
            q, k, v, do = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, do))
            packing = packing_of(5, len(q) - 5)
        spec = AttentionSpec(causal=True, scale=0.25, packing=packing)
        kernel: Any = BACKENDS[name].target(name=name)
        o, lse = kernel.forward(q, k, v, spec)
        into = room(o, dense_rows)
        assert torch.equal(kernel.forward_into(into, q, k, v, spec), lse)
        assert torch.equal(into, o)
        gradients = kernel.backward(do, q, k, v, o, lse, spec)
        places = tuple(room(x, dense_rows) for x in gradients)
        kernel.backward_into(places, do, q, k, v, o, lse, spec)
        for place, gradient in zip(places, gradients, strict=True):
            assert torch.equal(place, gradient)
        for x in (into, *places):
            # Nothing around them.
            assert float(x._base.isnan().sum()) == x._base.numel() - x.numel()

    def test_no_room(self) -> None:
        q, k, v, do = inputs(heads=4)
        spec = AttentionSpec(causal=True, scale=0.25)
        kernel = backend()
        with pytest.raises(
            ValueError, match=r"^o is .* float64 .*: must be .* float32 on [a-z0-9:]+$"
        ):
            kernel.forward_into(q.double(), q, k, v, spec)
        o, lse = kernel.forward(q, k, v, spec)
        with pytest.raises(ValueError, match=r"^dk is \[.*\] .*: must be \["):
            kernel.backward_into((q, q[:, :, 1:], v), do, q, k, v, o, lse, spec)


def packing_of(*lengths: int) -> Packing:
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    longest = max(lengths)
    return Packing(cu_seqlens_q=starts, cu_seqlens_k=starts, max_q_len=longest, max_kv_len=longest)


def room(x: Tensor, dense_rows: bool) -> Tensor:
    """Rows 3 to -2 of a tensor of NaN; or also every other number of each row."""
    dim = 0 if x.dim() == 3 else 2
    shape = list(x.shape)
    shape[dim] += 5
    shape[-1] *= 1 if dense_rows else 2
    whole = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    rows = [slice(None)] * x.dim()
    rows[dim] = slice(3, -2)
    if not dense_rows:
        rows[-1] = slice(None, None, 2)
    return whole[tuple(rows)]
