"""Every attention backend against float64 attention written out in loops.

Parametrised over the registry: a new backend is tested by being registered. Each shape is
either computed correctly or declared unsupported with a reason.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_by_definition import (
    COMPILING,
    INTERPRETED,
    SHAPES,
    assert_close,
    attention_by_definition,
    backend_of,
    broken,
    compare,
    expected_of,
    problem_of,
    require_support,
    scale_of,
    tensors_of,
)
from grids import covering
from torch import Tensor

from kernels import Attention, AttentionSpec, accounting
from kernels.toolchain import why_not_compile
from parallel.context.attention import kernels

NO_CUDA = "needs a CUDA device, and torch sees none"

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)

PAIRED = (("float32", True), ("bfloat16", False))

COMPILED_SHAPES = ("grouped queries",)


def grid() -> list[object]:
    """Backend, shape, dtype and mask; a few only for those that compile or interpret each shape."""
    points = []
    for name in kernels():
        for shape in SHAPES:
            for dtype in ("float32", "bfloat16"):
                for causal in (True, False):
                    if name in COMPILING and (shape not in COMPILED_SHAPES or dtype != "float32"):
                        continue
                    if name in INTERPRETED and (dtype, causal) not in PAIRED:
                        continue
                    words = (name, shape, dtype, "causal" if causal else "full")
                    points.append(pytest.param(name, shape, dtype, causal, id="-".join(words)))
    return points


def strided(x: Tensor) -> Tensor:
    """The same numbers, [B, H, S, D] laid out as [B, H, D, S]."""
    return x.mT.contiguous().mT.detach()


class TestAgainstTheDefinition:
    @pytest.mark.parametrize(("name", "shape", "dtype", "causal"), grid())
    def test_output_and_gradients(self, name: str, shape: str, dtype: str, causal: bool) -> None:
        if name in COMPILING and (reason := why_not_compile("cpu")):
            pytest.skip(f"{name}: {reason}")
        compare(name, problem_of(**SHAPES[shape], dtype=dtype, causal=causal))

    def test_flex_without_gradients(self) -> None:
        """All that FlexAttention can do on a CPU."""
        if reason := why_not_compile("cpu"):
            pytest.skip(reason)
        compare("flex", problem_of(num_heads=4, needs_grad=False))

    @pytest.mark.parametrize("name", kernels())
    def test_without_gradients_nothing_is_kept(self, name: str) -> None:
        if name in COMPILING:
            pytest.skip(f"{name}: compiles for ten seconds; its output is checked above")
        problem = problem_of(needs_grad=False)
        compare(name, problem)
        assert not backend_of(name).keeps_scores(problem)

    @pytest.mark.parametrize("name", kernels())
    def test_inputs_as_the_transformer_stores_them(self, name: str) -> None:
        """[B, S, H, D] in memory, which a kernel must not take for [B, H, S, D]."""
        if name in COMPILING:
            pytest.skip(f"{name}: compiles for ten seconds; strides are Inductor's business")
        problem = problem_of(num_heads=4)
        backend = backend_of(name)
        require_support(backend, problem)
        q, k, v, do = (x.transpose(1, 2).contiguous().mT.mT for x in tensors_of(problem))
        leaves = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
        assert not leaves[0].is_contiguous()
        expected = expected_of(problem)
        o = backend.attend(*leaves, AttentionSpec(causal=True, scale=scale_of(problem)))
        assert_close(o, expected.o, "float32", "o")
        for what, gradient in zip(
            ("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do.transpose(1, 2)), strict=True
        ):
            assert_close(gradient, getattr(expected, what), "float32", what)

    @pytest.mark.parametrize("name", kernels())
    @pytest.mark.parametrize("causal", [True, False])
    def test_entries_of_a_head_far_apart(self, name: str, causal: bool) -> None:
        """A last stride that is not 1, of each argument and of the output's gradient."""
        if name in COMPILING:
            pytest.skip(f"{name}: compiles for ten seconds; it is the naive softmax")
        problem = problem_of(num_heads=4, causal=causal)
        backend = backend_of(name)
        require_support(backend, problem)
        expected = expected_of(problem)
        q, k, v, do = (strided(x) for x in tensors_of(problem))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        assert {x.stride(-1) for x in (*leaves, do)} & {0, 1} == set()
        spec = AttentionSpec(causal=causal, scale=scale_of(problem))
        o = backend.attend(*leaves, spec)
        assert_close(o, expected.o, "float32", "o")
        for what, gradient in zip(
            ("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True
        ):
            assert_close(gradient, getattr(expected, what), "float32", what)

    @pytest.mark.parametrize("name", kernels())
    def test_large_scores_do_not_overflow(self, name: str) -> None:
        """exp(200) is infinite in float32; a softmax subtracts the largest score first."""
        if name in COMPILING:
            pytest.skip(f"{name}: compiles for ten seconds; it is the naive softmax")
        problem = problem_of(needs_grad=False)
        backend = backend_of(name)
        require_support(backend, problem)
        q, k, v, do = tensors_of(problem)
        expected = attention_by_definition(60 * q, k, v, do, causal=True, scale=1.0)
        assert float(expected.lse.max()) > 200
        o = backend.attend(60 * q, k, v, AttentionSpec(causal=True, scale=1.0))
        assert_close(o, expected.o, "bfloat16", "o")


class TestExplicitLse:
    """forward and backward as a ring calls them: with the log-sum-exp as a tensor."""

    @pytest.mark.parametrize(
        ("name", "causal", "dtype"),
        [
            (name, causal, dtype)
            for name in kernels()
            for causal in (True, False)
            for dtype in ("float32", "bfloat16")
            if backend_of(name).gives_lse
            and not (name in INTERPRETED and (dtype, causal) in PAIRED)
        ],
    )
    @pytest.mark.parametrize("shape", SHAPES)
    def test_forward_and_backward(self, name: str, causal: bool, dtype: str, shape: str) -> None:
        problem = problem_of(**SHAPES[shape], dtype=dtype, causal=causal)
        backend = backend_of(name)
        require_support(backend, problem)
        q, k, v, do = tensors_of(problem)
        expected = expected_of(problem)
        spec = AttentionSpec(causal=causal, scale=scale_of(problem))
        with torch.no_grad():
            o, lse = backend.forward(q, k, v, spec)
            gradients = backend.backward(do, q, k, v, o, lse, spec)
        assert lse.dtype == torch.float32
        assert lse.shape == q.shape[:3]
        assert o.dtype == q.dtype
        assert_close(o, expected.o, dtype, "o")
        assert_close(lse, expected.lse, dtype, "lse")
        for what, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_close(gradient, getattr(expected, what), dtype, what)

    @pytest.mark.parametrize("name", [n for n in kernels() if backend_of(n).gives_lse])
    def test_entries_of_a_head_far_apart(self, name: str) -> None:
        problem = problem_of(num_heads=4)
        backend = backend_of(name)
        require_support(backend, problem)
        q, k, v, do = (strided(x) for x in tensors_of(problem))
        expected = expected_of(problem)
        spec = AttentionSpec(causal=True, scale=scale_of(problem))
        with torch.no_grad():
            o, lse = backend.forward(q, k, v, spec)
            gradients = backend.backward(do, q, k, v, strided(o), lse, spec)
        assert_close(o, expected.o, "float32", "o")
        assert_close(lse, expected.lse, "float32", "lse")
        for what, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_close(gradient, getattr(expected, what), "float32", what)

    @pytest.mark.parametrize("name", [n for n in kernels() if backend_of(n).gives_lse])
    def test_partial_results_combine_by_their_lse(self, name: str) -> None:
        """Attention over all keys from attention over two halves, as a ring computes it.

        The backward of a half takes the lse and o of the whole (CS336 text; Ring Attention).
        """
        problem = problem_of(causal=False, q_len=8, kv_len=24)
        backend = backend_of(name)
        require_support(backend, problem)
        q, k, v, do = tensors_of(problem)
        expected = expected_of(problem)
        spec = AttentionSpec(causal=False, scale=scale_of(problem))
        halves = [slice(0, 11), slice(11, 24)]
        with torch.no_grad():
            parts = [backend.forward(q, k[:, :, s], v[:, :, s], spec) for s in halves]
            lse = torch.stack([part for _, part in parts]).logsumexp(dim=0)
            o = sum(part * (own - lse).exp().unsqueeze(-1) for part, own in parts)
            gradients = [
                backend.backward(do, q, k[:, :, s], v[:, :, s], o, lse, spec) for s in halves
            ]
        assert_close(o, expected.o, "float32", "o")
        assert_close(gradients[0][0] + gradients[1][0], expected.dq, "float32", "dq")
        for index, what in ((1, "dk"), (2, "dv")):
            joined = torch.cat([part[index] for part in gradients], dim=2)
            assert_close(joined, getattr(expected, what), "float32", what)

    def test_any_backend_with_an_lse_becomes_differentiable(self) -> None:
        """Attention.attend, which naive replaces by autograd's own."""
        problem = problem_of(num_heads=4)
        q, k, v, do = tensors_of(problem)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        backend = backend_of("naive")
        spec = AttentionSpec(causal=True, scale=scale_of(problem))
        o = Attention.attend(backend, *leaves, spec)
        expected = expected_of(problem)
        assert_close(o, expected.o, "float32", "o")
        for what, gradient in zip(
            ("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True
        ):
            assert_close(gradient, getattr(expected, what), "float32", what)


class TestAccounting:
    @pytest.mark.parametrize(
        ("q_len", "kv_len"), [(1, 1), (5, 5), (64, 64), (3, 10), (10, 3), (512, 512)]
    )
    def test_pairs_are_those_of_the_mask(self, q_len: int, kv_len: int) -> None:
        """The formula halves the square: short of the diagonal's other half by S / 2."""
        counted = sum(max(0, i + kv_len - q_len + 1) for i in range(q_len))
        formula = accounting.attended_pairs(q_len, kv_len, causal=True)
        assert counted - formula == min(q_len, kv_len) / 2
        assert accounting.attended_pairs(q_len, kv_len, causal=False) == q_len * kv_len

    def test_flops_of_the_course_leaderboard_shape(self) -> None:
        """4 B H S^2 D / 2 = 4 * 16 * 16384^2 * 64 / 2, and 2.5 times that backward."""
        shape = {"q_len": 16384, "kv_len": 16384, "num_heads": 16, "num_kv_heads": 16}
        problem = problem_of(batch_size=1, head_dim=64, **shape)
        assert accounting.forward_flops(problem) == 549_755_813_888
        assert accounting.backward_flops(problem) == 2.5 * 549_755_813_888
        full = replace(problem, causal=False)
        assert accounting.forward_flops(full) == 2 * 549_755_813_888

    def test_bytes(self) -> None:
        """Hand-counted: q and o of 2*4*8*16 values, k and v of 2*2*8*16, lse of 2*4*8."""
        problem = problem_of(num_heads=4, q_len=8, kv_len=8, dtype="bfloat16")
        assert accounting.forward_bytes(problem) == 2 * (2 * 1024 + 2 * 512) + 4 * 64
        assert accounting.backward_bytes(problem) == 2 * (4 * 1024 + 4 * 512) + 4 * 64

    @pytest.mark.parametrize("name", ["naive", "sdpa_flash"])
    @pytest.mark.parametrize("causal", [True, False])
    def test_predicted_memory_is_what_autograd_keeps(self, name: str, causal: bool) -> None:
        """Bytes of every storage that is saved for backward, each counted once."""
        problem = problem_of(num_heads=4, num_kv_heads=4, q_len=128, kv_len=128, causal=causal)
        backend = backend_of(name)
        q, k, v, _ = (x.clone().requires_grad_() for x in tensors_of(problem))
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (q, k, v)}

        def pack(x: Tensor) -> Tensor:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            o = backend.attend(q, k, v, AttentionSpec(causal=causal, scale=scale_of(problem)))
        kept[o.untyped_storage().data_ptr()] = o.untyped_storage()
        predicted = accounting.memory(problem, keeps_scores=backend.keeps_scores(problem))
        counted = sum(storage.nbytes() for storage in kept.values())
        # PyTorch's CPU flash attention keeps a few numbers of its random generator as well.
        assert counted == pytest.approx(sum(predicted.values()), rel=1e-3)


REAL = {
    "leaderboard": {"num_heads": 16, "num_kv_heads": 16, "q_len": 16384, "head_dim": 64},
    "llama3_8b": {"num_heads": 32, "num_kv_heads": 8, "q_len": 8192, "head_dim": 128},
    "odd length": {"num_heads": 4, "num_kv_heads": 4, "q_len": 1027, "head_dim": 64},
    "course": {"num_heads": 1, "num_kv_heads": 1, "q_len": 4096, "head_dim": 16},
}


REAL_BY_DEFAULT = [
    # It tries all others, which are tested here, and takes one of them.
    pytest.param(name, marks=pytest.mark.exhaustive) if name == "auto" else name
    for name in kernels()
]


@pytest.mark.gpu
@needs_cuda
class TestOnCuda:
    @pytest.fixture(autouse=True)
    def forget_compiled(self) -> None:
        """torch.compile gives up on a function that it has compiled for eight other cases."""
        torch.compiler.reset()

    @pytest.mark.parametrize("name", REAL_BY_DEFAULT)
    @pytest.mark.parametrize(
        ("dtype", "causal", "shape"),
        covering(["float32", "bfloat16", "float16"], [True, False], REAL),
    )
    def test_real_sizes(self, name: str, dtype: str, causal: bool, shape: str) -> None:
        """A slice of the real problem against float64; both as the harness measures it."""
        sizes = {"batch_size": 1, **REAL[shape], "kv_len": REAL[shape]["q_len"]}
        problem = problem_of(**sizes, dtype=dtype, causal=causal, device="cuda")
        backend = backend_of(name)
        if backend.keeps_scores(problem) and problem.q_len > 8192:
            pytest.skip(f"{name}: 16 heads of 16,384 x 16,384 scores are for a sweep, not a test")
        if backend.keeps_scores(problem) and problem.num_heads > 16:
            # Their scores would fill a GPU that several processes share.
            problem = replace(problem, num_heads=8, num_kv_heads=2)
        require_support(backend, problem)
        torch.set_float32_matmul_precision("highest")
        q, k, v, do = tensors_of(problem)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = backend.attend(*leaves, AttentionSpec(causal=causal, scale=scale_of(problem)))
        dq, dk, dv = torch.autograd.grad(o, leaves, do)
        tensors = {"q": q, "k": k, "v": v, "do": do, "o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
        assert broken(problem, tensors, name) == {}

    @pytest.mark.parametrize("name", kernels())
    @pytest.mark.parametrize("shape", ["grouped queries", "more keys", "head_dim 40", "two blocks"])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_small_shapes_against_the_definition(self, name: str, shape: str, dtype: str) -> None:
        torch.set_float32_matmul_precision("highest")
        compare(name, problem_of(**SHAPES[shape], dtype=dtype, device="cuda"))
