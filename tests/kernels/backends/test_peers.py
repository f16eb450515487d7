"""FlashAttention 2, 3 and 4 as backends, against stand-ins for libraries that need a GPU.

Each stand-in has the signature of the real private functions, as read in the libraries' public
sources, checks layouts as they do, and computes in plain torch. What this cannot tell is
whether the libraries themselves compute the right thing; on a GPU test_kernels does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from test_kernels import attention_by_definition
from torch import Tensor

from kernels import BACKENDS, AttentionBackend, AttentionProblem, Packing
from kernels.libraries import flash_attention as library
from kernels.problem import AttentionSpec

NAMES = ("flash_attn_2", "flash_attn_3", "flash_attn_4")
DISTRIBUTIONS = dict(zip(NAMES, ("flash-attn", "flash-attn-3", "flash-attn-4"), strict=True))
MODULES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
}


def backend_of(name: str) -> AttentionBackend:
    return BACKENDS[name].target(name=name)


def problem_of(**changes: Any) -> AttentionProblem:
    values: dict[str, Any] = {
        "batch_size": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "q_len": 16,
        "kv_len": 16,
        "head_dim": 64,
        "dtype": "bfloat16",
        "device": "cuda",
        "causal": True,
        "needs_grad": True,
    }
    return AttentionProblem(**(values | changes))


class Computed:
    """What every stand-in computes with, and how it was called last."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        """o, lse, and given do the gradients; the library's layout in and out."""
        for x in (q, k, v):
            assert x.stride(-1) == 1
        assert q.shape[2] % k.shape[2] == 0
        assert k.shape == v.shape
        tensors = [x.transpose(1, 2) for x in (q, k, v, q if do is None else do)]
        right = attention_by_definition(*tensors, causal=causal, scale=scale)
        o, dq, dk, dv = (
            x.transpose(1, 2).to(q.dtype) for x in (right.o, right.dq, right.dk, right.dv)
        )
        return o, right.lse.float(), dq, dk, dv

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float,
        do: Tensor | None = None,
        cu: tuple[Tensor, Tensor] | None = None,
        longest: tuple[int, int] | None = None,
    ) -> tuple[Tensor, ...]:
        self.calls.append({"shape": q.shape, "pointer": q.data_ptr(), "causal": causal})
        if cu is None:
            assert q.ndim == 4
            return self.dense(q, k, v, do, causal, scale)
        assert q.ndim == 3
        assert longest is not None
        parts = []
        for n in range(len(cu[0]) - 1):
            s, t = (slice(int(ends[n]), int(ends[n + 1])) for ends in cu)
            assert s.stop - s.start <= longest[0]
            assert t.stop - t.start <= longest[1]
            own = (x[span].unsqueeze(0) for x, span in ((q, s), (k, t), (v, t)))
            parts.append(self.dense(*own, None if do is None else do[None, s], causal, scale))
        joined = [torch.cat([part[i].squeeze(0) for part in parts]) for i in (0, 2, 3, 4)]
        return joined[0], torch.cat([part[1].squeeze(0) for part in parts], dim=1), *joined[1:]


def plus_infinity(lse: Tensor) -> Tensor:
    """FlashAttention-2 marks a row without keys by plus infinity."""
    return torch.where(lse == -torch.inf, torch.inf, lse)


def flash_attn_2(computed: Computed) -> dict[str, Callable[..., Any]]:
    """Signatures of flash-attn 2.7 and later, without parameters of no interest here."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        assert (window_size_left, window_size_right) == (-1, -1)
        o, lse, *_ = computed.run(q, k, v, causal=causal, scale=softmax_scale)
        return o.contiguous(), plus_infinity(lse), torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:
        assert dq is not None
        assert dk is not None
        assert dv is not None
        o, lse, *gradients = computed.run(q, k, v, causal=causal, scale=softmax_scale, do=dout)
        torch.testing.assert_close(softmax_lse, plus_infinity(lse))
        torch.testing.assert_close(out, o)
        for x, gradient in zip((dq, dk, dv), gradients, strict=True):
            x.copy_(gradient)
        return torch.empty(0)

    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        o, lse, *_ = computed.run(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            cu=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        return o, plus_infinity(lse), torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: Tensor | None,
        deterministic: bool,
    ) -> Tensor:
        assert dq is not None
        assert dk is not None
        assert dv is not None
        o, lse, *gradients = computed.run(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            do=dout,
            cu=(cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q, max_seqlen_k),
        )
        torch.testing.assert_close(softmax_lse, plus_infinity(lse))
        torch.testing.assert_close(out, o)
        for x, gradient in zip((dq, dk, dv), gradients, strict=True):
            x.copy_(gradient)
        return torch.empty(0)

    return {
        "_flash_attn_forward": _flash_attn_forward,
        "_flash_attn_backward": _flash_attn_backward,
        "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
        "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    }


def flash_attn_3(computed: Computed) -> dict[str, Callable[..., Any]]:
    """Custom operators with the signatures of a recent FlashAttention-3, shortened."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_new: Tensor | None = None,
        out_: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size_left: int = -1,
        num_splits: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert softmax_scale is not None
        o, lse, *_ = computed.run(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            cu=None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q or 0, max_seqlen_k or 0),
        )
        return o.contiguous(), lse, torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
        softmax_scale: float | None = None,
        is_causal: bool = False,
        deterministic: bool = False,
    ) -> Tensor:
        assert softmax_scale is not None
        assert dq is not None
        assert dk is not None
        assert dv is not None
        o, lse, *gradients = computed.run(
            q,
            k,
            v,
            causal=is_causal,
            scale=softmax_scale,
            do=dout,
            cu=None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q or 0, max_seqlen_k or 0),
        )
        torch.testing.assert_close(softmax_lse, lse)
        torch.testing.assert_close(out, o)
        for x, gradient in zip((dq, dk, dv), gradients, strict=True):
            x.copy_(gradient)
        return torch.empty(0)

    custom = torch.library.custom_op
    written = ("dq", "dk", "dv")
    return {
        "_flash_attn_forward": custom("attnbench_stand_in::forward", mutates_args=())(
            _flash_attn_forward
        ),
        "_flash_attn_backward": custom("attnbench_stand_in::backward", mutates_args=written)(
            _flash_attn_backward
        ),
    }


def flash_attn_4(computed: Computed) -> dict[str, Callable[..., Any]]:
    """Signatures of flash-attn-4 4.0.0b36, shortened; the forward returns five things."""

    def _flash_attn_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_splits: int = 1,
        return_lse: bool = False,
    ) -> tuple[Any, ...]:
        assert qv is None
        assert softmax_scale is not None
        o, lse, *_ = computed.run(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            cu=None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q or 0, max_seqlen_k or 0),
        )
        return o.contiguous(), lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float = 0.0,
        pack_gqa: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        dq: Tensor | None = None,
        dlse: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert softmax_scale is not None
        assert out.dtype == dout.dtype == q.dtype
        o, right_lse, *gradients = computed.run(
            q,
            k,
            v,
            causal=causal,
            scale=softmax_scale,
            do=dout,
            cu=None if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k),
            longest=(max_seqlen_q or 0, max_seqlen_k or 0),
        )
        torch.testing.assert_close(lse, right_lse)
        torch.testing.assert_close(out, o)
        return tuple(gradients)

    return {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}


STAND_INS = {
    "flash_attn_2": flash_attn_2,
    "flash_attn_3": flash_attn_3,
    "flash_attn_4": flash_attn_4,
}

Install = Callable[..., Computed]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a stand-in where the library would be imported from, on a GPU of some capability."""

    def put(
        name: str,
        *,
        version: str = "9.9",
        capability: tuple[int, int] = (9, 0),
        **functions: Callable[..., Any],
    ) -> Computed:
        computed = Computed()
        path = MODULES[name].split(".")
        for depth in range(1, len(path) + 1):
            module = ModuleType(".".join(path[:depth]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for key, function in (STAND_INS[name](computed) | functions).items():
            setattr(module, key, function)

        def version_of(distribution: str) -> str:
            if distribution == DISTRIBUTIONS[name]:
                return version
            raise metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(library.metadata, "version", version_of)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        return computed

    return put


def tensors(q_len: int, kv_len: int) -> list[Tensor]:
    """q, k, v, do in bfloat16, grouped queries."""
    generator = torch.Generator().manual_seed(9)
    return [
        torch.randn(2, heads, length, 8, generator=generator).bfloat16()
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len), (4, q_len))
    ]


@pytest.mark.parametrize("name", NAMES)
class TestCalls:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (3, 9), (9, 3)])
    def test_dense(
        self, install: Install, name: str, causal: bool, q_len: int, kv_len: int
    ) -> None:
        computed = install(name)
        backend = backend_of(name)
        q, k, v, do = tensors(q_len, kv_len)
        right = attention_by_definition(q, k, v, do, causal=causal, scale=0.3)
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=causal, scale=0.3))
        assert computed.calls[-1]["shape"] == (2, q_len, 4, 8)
        assert computed.calls[-1]["pointer"] == q.data_ptr(), "handed over without a copy"
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse, right.lse.float())
        torch.testing.assert_close(o, right.o.bfloat16())
        strided = torch.stack([lse, lse], dim=-1)[..., 0]
        gradients = backend.backward(
            do, q, k, v, o.float(), strided, AttentionSpec(causal=causal, scale=0.3)
        )
        assert computed.calls[-1]["causal"] == causal
        for got, wanted in zip(gradients, (right.dq, right.dk, right.dv), strict=True):
            torch.testing.assert_close(got, wanted.bfloat16())

    @pytest.mark.parametrize("causal", [True, False])
    def test_packed(self, install: Install, name: str, causal: bool) -> None:
        computed = install(name)
        backend = backend_of(name)
        lengths = ((5, 5), (1, 4), (6, 2))
        q, k, v, do = (x[0].transpose(0, 1).contiguous() for x in tensors(12, 11))
        cu = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
        packing = Packing(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_q_len=6, max_kv_len=5)
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=causal, scale=0.3, packing=packing))
        assert len(computed.calls) == 1, "one call for all sequences"
        gradients = backend.backward(
            do, q, k, v, o.float(), lse, AttentionSpec(causal=causal, scale=0.3, packing=packing)
        )
        for s, t in packing.slices():
            own = [x[span].transpose(0, 1)[None] for x, span in ((q, s), (k, t), (v, t), (do, s))]
            right = attention_by_definition(*own, causal=causal, scale=0.3)
            torch.testing.assert_close(lse[None, :, s], right.lse.float())
            for got, wanted in (
                (o[s], right.o),
                (gradients[0][s], right.dq),
                (gradients[1][t], right.dk),
                (gradients[2][t], right.dv),
            ):
                torch.testing.assert_close(got.transpose(0, 1)[None], wanted.bfloat16())

    def test_differentiable(self, install: Install, name: str) -> None:
        install(name)
        q, k, v, do = tensors(5, 8)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = backend_of(name).attend(*leaves, AttentionSpec(causal=True, scale=0.3))
        right = attention_by_definition(q, k, v, do, causal=True, scale=0.3)
        for got, wanted in zip(
            torch.autograd.grad(o, leaves, do), (right.dq, right.dk, right.dv), strict=True
        ):
            torch.testing.assert_close(got, wanted.bfloat16())


@pytest.mark.parametrize("name", NAMES)
class TestSupport:
    def test_where_it_runs(self, install: Install, name: str) -> None:
        install(name, version="4.0.0b36" if name == "flash_attn_4" else "2.8.3.post1")
        backend = backend_of(name)
        assert backend.supports(problem_of()) is None
        assert backend.supports(problem_of(packed=True)) is None
        assert backend.supports(problem_of(head_dim=256, dtype="float16")) is None
        assert backend.gives_lse

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"device": "cpu"}, "runs on CUDA devices only"),
            ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
            ({"head_dim": 20}, "multiple of 8 and at most 256, not 20"),
            ({"head_dim": 264}, "multiple of 8 and at most 256, not 264"),
        ],
    )
    def test_problems_it_cannot_solve(
        self, install: Install, name: str, changes: dict[str, Any], reason: str
    ) -> None:
        install(name)
        assert reason in str(backend_of(name).supports(problem_of(**changes)))

    def test_an_older_gpu(self, install: Install, name: str) -> None:
        install(name, capability=(7, 5))
        reason = backend_of(name).supports(problem_of())
        assert reason is not None
        assert "needs compute capability" in reason
        assert "this device has 7.5" in reason

    def test_not_installed(self, name: str) -> None:
        backend = backend_of(name)
        if backend.version() is not None:
            pytest.skip(f"{name} is installed here")
        reason = backend.supports(problem_of())
        assert reason is not None
        assert reason.startswith(f"{DISTRIBUTIONS[name]} is not installed: ")

    @pytest.mark.parametrize(
        "error", [ImportError("libcudart.so.12: no such\nfile"), ModuleNotFoundError(name="einops")]
    )
    def test_an_installation_that_cannot_be_imported(
        self, install: Install, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install(name)

        def broken(module: str) -> ModuleType:
            raise error

        monkeypatch.setattr(library.importlib, "import_module", broken)
        reason = backend_of(name).supports(problem_of())
        assert reason is not None
        assert f"cannot be imported ({type(error).__name__}" in reason
        assert "\n" not in reason

    def test_a_version_with_another_signature(self, install: Install, name: str) -> None:
        def other(q: Tensor, k: Tensor) -> None:
            raise AssertionError("must not be called")

        function = next(iter(STAND_INS[name](Computed())))
        install(name, **{function: other})
        reason = backend_of(name).supports(problem_of())
        assert reason is not None
        assert f"its {function} takes no v" in reason


class TestVersions:
    def test_flash_attn_before_2_7_is_too_old(self, install: Install) -> None:
        install("flash_attn_2", version="2.6.3")
        reason = backend_of("flash_attn_2").supports(problem_of())
        assert reason is not None
        assert reason.startswith("flash-attn 2.6.3 is too old, 2.7 is needed")

    def test_the_version_is_the_distributions(self, install: Install) -> None:
        install("flash_attn_4", version="4.0.0b36")
        assert backend_of("flash_attn_4").version() == "4.0.0b36"
        assert backend_of("flash_attn_2").version() is None

    def test_the_module_inside_flash_attn_2_is_not_flash_attn_4(
        self, install: Install, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install("flash_attn_4")

        def nothing(distribution: str) -> str:
            raise metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(library.metadata, "version", nothing)
        reason = backend_of("flash_attn_4").supports(problem_of())
        assert str(reason).startswith("flash-attn-4 is not installed")

    def test_flash_attn_3_named_its_mask_otherwise(self, install: Install) -> None:
        """Early on the backward took causal, and the forward had parameters without defaults."""
        seen: dict[str, Any] = {}

        def forward(q, k, v, k_new, qv, cu_seqlens_q, softmax_scale, causal, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
            seen.update(causal=causal, k_new=k_new, window=window_size)
            return q, q.new_zeros(q.shape[0], q.shape[2], q.shape[1]).float()

        def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal):  # type: ignore[no-untyped-def]
            seen.update(backward_causal=causal)

        install("flash_attn_3", _flash_attn_forward=forward, _flash_attn_backward=backward)
        backend = backend_of("flash_attn_3")
        q, k, v, do = tensors(4, 4)
        o, lse = backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        backend.backward(do, q, k, v, o, lse, AttentionSpec(causal=True, scale=0.3))
        assert seen == {
            "causal": True,
            "k_new": None,
            "window": (-1, -1),
            "backward_causal": True,
        }

    def test_flash_attn_4_on_other_gpus(self, install: Install) -> None:
        backend = backend_of("flash_attn_4")
        install("flash_attn_4", capability=(8, 0))
        assert backend.supports(problem_of(needs_grad=False)) is None
        assert "8.0 without gradients" in str(backend.supports(problem_of()))
        install("flash_attn_4", capability=(10, 0))
        assert backend.supports(problem_of(head_dim=256)) is None
        assert "at most 128, not 192" in str(backend.supports(problem_of(head_dim=192)))

    def test_flash_attn_4_gradients_at_narrow_multiples(self, install: Install) -> None:
        backend = backend_of("flash_attn_4")
        install("flash_attn_4", capability=(9, 0))
        assert backend.supports(problem_of(head_dim=80, needs_grad=False)) is None
        assert backend.supports(problem_of(head_dim=96)) is None
        assert "multiple of 32, not 80" in str(backend.supports(problem_of(head_dim=80)))
