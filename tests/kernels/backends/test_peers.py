"""FlashAttention 2, 3 and 4 as backends: what the adapters give to the libraries, and take back.

The libraries need a GPU, so stand-ins take the parameters of their private functions and compute
nothing. On a GPU test_kernels compares the libraries' results with float64.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import BACKENDS, Attention, AttentionProblem, Packing
from kernels.libraries import flash_attention as library
from kernels.problem import AttentionSpec

NAMES = ("flash_attn_2", "flash_attn_3", "flash_attn_4")
DISTRIBUTIONS = dict(zip(NAMES, ("flash-attn", "flash-attn-3", "flash-attn-4"), strict=True))
MODULES = {
    "flash_attn_2": "flash_attn.flash_attn_interface",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute.interface",
}


def backend_of(name: str) -> Attention:
    return BACKENDS[name].target(name=name).role(Attention)


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


DENSE_OR_PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
UNUSED = "dropout_p window_size_left window_size_right softcap alibi_slopes"

PARAMETERS = {
    "flash_attn_2": {
        "_flash_attn_forward": f"q k v softmax_scale causal return_softmax {UNUSED}",
        "_flash_attn_backward": "dout q k v out softmax_lse dq dk dv softmax_scale causal "
        f"deterministic {UNUSED}",
        "_flash_attn_varlen_forward": f"q k v {DENSE_OR_PACKED} softmax_scale causal "
        f"return_softmax block_table {UNUSED}",
        "_flash_attn_varlen_backward": f"dout q k v out softmax_lse dq dk dv {DENSE_OR_PACKED} "
        f"softmax_scale causal deterministic {UNUSED}",
    },
    "flash_attn_3": {
        "_flash_attn_forward": f"q k v k_new out_ {DENSE_OR_PACKED} softmax_scale causal",
        "_flash_attn_backward": f"dout q k v out softmax_lse {DENSE_OR_PACKED} dq dk dv "
        "softmax_scale is_causal deterministic",
    },
    "flash_attn_4": {
        "_flash_attn_fwd": f"q k v qv {DENSE_OR_PACKED} softmax_scale causal return_lse",
        "_flash_attn_bwd": f"q k v out dout lse softmax_scale causal {DENSE_OR_PACKED} "
        "deterministic dlse",
    },
}
"""Parameters of the libraries' private functions, as read in their public sources."""


class Library:
    """Functions that take the parameters of a library's, keep them, and return random tensors."""

    def __init__(self, name: str) -> None:
        self.given: dict[str, Any] = {}
        self.results: tuple[Tensor, ...] = ()
        self.lse_without_keys = torch.inf if name == "flash_attn_2" else -torch.inf
        self.functions = {
            function: self.stand_in(parameters, backward="dout" in parameters)
            for function, parameters in PARAMETERS[name].items()
        }

    def stand_in(self, parameters: str, *, backward: bool) -> Callable[..., Any]:
        def function(**given: Any) -> Any:
            self.given = given
            return self._backward(**given) if backward else self._forward(given["q"])

        kind = inspect.Parameter.KEYWORD_ONLY
        items = [inspect.Parameter(name, kind) for name in parameters.split()]
        function.__signature__ = inspect.Signature(items)  # type: ignore[attr-defined]
        return function

    def _forward(self, q: Tensor) -> tuple[Any, ...]:
        heads = q.shape[-2]
        lse = torch.randn((heads, len(q)) if q.ndim == 3 else (len(q), heads, q.shape[1]))
        # As if the first query of each head saw no key.
        lse[..., 0] = self.lse_without_keys
        self.results = (torch.randn_like(q), lse)
        return *self.results, None, None

    def _backward(self, **given: Any) -> Any:
        self.results = tuple(torch.randn_like(given[name]) for name in "qkv")
        if "dq" not in given:
            return self.results
        for name, gradient in zip("qkv", self.results, strict=True):
            given[f"d{name}"].copy_(gradient)
        return None


Install = Callable[..., Library]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a stand-in where the library would be imported from, on a GPU of some capability."""

    def put(
        name: str,
        *,
        version: str = "9.9",
        capability: tuple[int, int] = (9, 0),
        **functions: Callable[..., Any],
    ) -> Library:
        stand_in = Library(name)
        path = MODULES[name].split(".")
        for depth in range(1, len(path) + 1):
            module = ModuleType(".".join(path[:depth]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for key, function in (stand_in.functions | functions).items():
            setattr(module, key, function)

        def version_of(distribution: str) -> str:
            if distribution == DISTRIBUTIONS[name]:
                return version
            raise metadata.PackageNotFoundError(distribution)

        monkeypatch.setattr(library.metadata, "version", version_of)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
        return stand_in

    return put


def tensors(q_len: int, kv_len: int) -> list[Tensor]:
    """q, k, v, do in bfloat16, grouped queries."""
    generator = torch.Generator().manual_seed(9)
    return [
        torch.randn(2, heads, length, 8, generator=generator).bfloat16()
        for heads, length in ((4, q_len), (2, kv_len), (2, kv_len), (4, q_len))
    ]


def assert_asked(given: dict[str, Any], spec: AttentionSpec) -> None:
    """Mask and scale are the call's; what is not used has the value that turns it off."""
    assert given["softmax_scale"] == spec.scale
    assert given.get("causal", given.get("is_causal")) == spec.causal
    off = {"dropout_p": 0.0, "softcap": 0.0, "window_size_left": -1, "window_size_right": -1}
    off |= dict.fromkeys(("alibi_slopes", "k_new", "out_", "qv", "block_table", "dlse"))
    off |= {"return_softmax": False, "return_lse": True}
    assert {name: given[name] for name in off.keys() & given} == {
        name: off[name] for name in off.keys() & given
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
class TestCalls:
    def test_dense(self, install: Install, name: str, causal: bool) -> None:
        """[B, H, S, D] is handed over as a view [B, S, H, D], and results come back likewise."""
        peer, backend = install(name), backend_of(name)
        spec = AttentionSpec(causal=causal, scale=0.3)
        q, k, v, do = tensors(9, 3 if causal else 0)
        o, lse = backend.forward(q, k, v, spec)
        assert_asked(peer.given, spec)
        for letter, x in zip("qkv", (q, k, v), strict=True):
            assert torch.equal(peer.given[letter], x.transpose(1, 2))
        assert peer.given["q"].data_ptr() == q.data_ptr(), "handed over without a copy"
        assert torch.equal(o, peer.results[0].transpose(1, 2))
        assert (lse[..., 0] == -torch.inf).all()
        assert torch.equal(lse[..., 1:], peer.results[1][..., 1:])
        strided = torch.stack([lse, lse], dim=-1)[..., 0]
        # A ring keeps o in float32.
        gradients = backend.backward(do, q, k, v, o.float(), strided, spec)
        assert_asked(peer.given, spec)
        assert peer.given["out"].dtype == peer.given["dout"].dtype == q.dtype
        assert torch.equal(peer.given["out"], o.transpose(1, 2))
        given_lse = peer.given.get("softmax_lse", peer.given.get("lse"))
        assert given_lse.is_contiguous()
        assert (given_lse[..., 0] == peer.lse_without_keys).all()
        assert torch.equal(given_lse[..., 1:], lse[..., 1:])
        for got, wanted in zip(gradients, peer.results, strict=True):
            assert torch.equal(got, wanted.transpose(1, 2))

    def test_packed(self, install: Install, name: str, causal: bool) -> None:
        peer, backend = install(name), backend_of(name)
        q, k, v, do = (x[0].transpose(0, 1).contiguous() for x in tensors(12, 11))
        cu = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 6, 12], [0, 5, 9, 11])]
        packing = Packing(cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], max_q_len=6, max_kv_len=5)
        spec = AttentionSpec(causal=causal, scale=0.3, packing=packing)
        o, lse = backend.forward(q, k, v, spec)
        calls = [peer.given]
        assert torch.equal(o, peer.results[0])
        assert lse.shape == (4, 12)
        gradients = backend.backward(do, q, k, v, o.float(), lse, spec)
        for got, wanted in zip(gradients, peer.results, strict=True):
            assert torch.equal(got, wanted)
        for given in (*calls, peer.given):
            assert_asked(given, spec)
            assert given["q"] is q
            assert given["cu_seqlens_q"] is cu[0]
            assert given["cu_seqlens_k"] is cu[1]
            assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (6, 5)


@pytest.mark.parametrize("name", NAMES)
class TestDeterministic:
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("deterministic", [True, False])
    def test_the_library_is_asked(
        self, install: Install, name: str, packed: bool, deterministic: bool
    ) -> None:
        peer = install(name)
        backend = BACKENDS[name].target(name=name, deterministic=deterministic).role(Attention)
        q, k, v, do = tensors(4, 4)
        packing = None
        if packed:
            q, k, v, do = (x[0].transpose(0, 1) for x in (q, k, v, do))
            cu = torch.tensor([0, 4], dtype=torch.int32)
            packing = Packing(cu_seqlens_q=cu, cu_seqlens_k=cu, max_q_len=4, max_kv_len=4)
        spec = AttentionSpec(causal=True, scale=0.3, packing=packing)
        o, lse = backend.forward(q, k, v, spec)
        backend.backward(do, q, k, v, o, lse, spec)
        assert peer.given["deterministic"] is deterministic

    def test_a_version_without_it(self, install: Install, name: str) -> None:
        """It is refused, where a call by name would leave the wish out."""
        function = next(key for key in PARAMETERS[name] if key.endswith(("_bwd", "_backward")))
        without = Library(name).stand_in(
            PARAMETERS[name][function].replace("deterministic", ""), backward=True
        )
        install(name, **{function: without})
        assert backend_of(name).supports(problem_of()) is None
        backend = BACKENDS[name].target(name=name, deterministic=True)
        reason = str(backend.supports(problem_of()))
        assert f"its {function} takes no deterministic" in reason


def test_where_libraries_have_no_deterministic_gradients(install: Install) -> None:
    third = BACKENDS["flash_attn_3"].target(name="flash_attn_3", deterministic=True)
    install("flash_attn_3")
    assert third.supports(problem_of(head_dim=192)) is None
    assert "at most 192, not 256" in str(third.supports(problem_of(head_dim=256)))
    assert third.supports(problem_of(head_dim=256, needs_grad=False)) is None
    fourth = BACKENDS["flash_attn_4"].target(name="flash_attn_4", deterministic=True)
    install("flash_attn_4", capability=(12, 0))
    assert "no deterministic gradients" in str(fourth.supports(problem_of()))
    assert fourth.supports(problem_of(needs_grad=False)) is None


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

        function = next(iter(PARAMETERS[name]))
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
