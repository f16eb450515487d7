"""attention=cudnn_frontend: the graphs that cuDNN's package is given, when, and what they get.

The package needs a GPU, so a stand-in takes its calls and computes in float64 what the graph asks
for, in the memory that the graph describes. On a GPU the package itself is held to float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_by_definition import assert_close, attention_by_definition, problem_of, tensors_of
from test_masks import check_mask
from torch import Tensor

from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec
from kernels.backends import cudnn_frontend
from kernels.libraries import cudnn_graphs
from tests.support import masked_libraries

PROBLEM = problem_of(dtype="bfloat16", num_heads=4, num_kv_heads=2, q_len=9, kv_len=17)
ON_CUDA = replace(PROBLEM, device="cuda")
STREAM = 77


def backend_of(**options: Any) -> Attention:
    return BACKENDS["cudnn_frontend"].target(name="cudnn_frontend", **options).role(Attention)


class Node:
    """A tensor of a graph."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def __getattr__(self, name: str) -> Any:
        def setter(value: Any) -> Node:
            self.given[name.removeprefix("set_")] = value
            return self

        return setter

    def holds(self, x: Tensor) -> Tensor:
        """The tensor that was given for it, which must have its sizes, strides and dtype."""
        assert (list(x.shape), list(x.stride())) == (self.given["dim"], self.given["stride"])
        assert str(x.dtype) == f"torch.{self.given['data_type']}"
        assert x.data_ptr() % 16 == 0
        return x


@dataclass
class Call:
    arguments: dict[str, Any]
    outputs: tuple[Node, ...]


class Graph:
    def __init__(self, library: Library, **given: Any) -> None:
        self.library, self.done = library, list[str]()
        assert given["handle"] == "a handle"
        self.call: Call

    def tensor(self, **given: Any) -> Node:
        return Node(**given)

    def sdpa(self, **arguments: Any) -> tuple[Node, ...]:
        assert arguments["generate_stats"] is True
        self.call = Call(arguments, (Node(), Node()))
        return self.call.outputs

    def sdpa_backward(self, **arguments: Any) -> tuple[Node, ...]:
        self.call = Call(arguments, (Node(), Node(), Node()))
        return self.call.outputs

    def __getattr__(self, name: str) -> Any:
        """The stages of building."""

        def stage(*heuristics: Any) -> None:
            self.done.append(name)
            if name == self.library.fails_at:
                raise RuntimeError("No valid\nengine configs")

        return stage

    def get_workspace_size(self) -> int:
        return self.library.workspace_bytes

    def execute(self, given: dict[int, Tensor], workspace: Tensor, *, handle: Any) -> None:
        stages = "validate build_operation_graph create_execution_plans check_support build_plans"
        assert self.done == stages.split()
        assert handle == "a handle"
        assert self.library.stream == STREAM
        assert workspace.numel() == max(1, self.library.workspace_bytes)
        arguments = self.call.arguments
        self.library.executed.append(self)
        nodes = {name: x for name, x in arguments.items() if isinstance(x, Node)}
        assert len(given) == len(nodes) + len(self.call.outputs)
        x = {name: node.holds(given[node.given["uid"]]) for name, node in nodes.items()}
        if any(name.startswith("diagonal_band") for name in arguments):
            assert arguments["diagonal_alignment"] == "bottom right"
        if self.library.is_masked:
            for node, value in zip(self.call.outputs, self._masked(x), strict=True):
                node.holds(given[node.given["uid"]]).copy_(value)
            return
        causal = "diagonal_band_right_bound" in arguments
        if causal:
            assert arguments["diagonal_band_right_bound"] == 0
        results = attention_by_definition(
            x["q"],
            x["k"],
            x["v"],
            x.get("dO", torch.zeros_like(x["q"])),
            causal=causal,
            scale=arguments["attn_scale"],
        )
        values = (results.o, results.lse.unsqueeze(-1))
        if "dO" in x:
            values = (results.dq, results.dk, results.dv)
            assert torch.allclose(x["stats"].squeeze(-1).double(), results.lse, atol=1e-4)
            assert torch.allclose(x["o"].double(), results.o, atol=2e-2)
        for node, value in zip(self.call.outputs, values, strict=True):
            assert node.given["output"] is True
            node.holds(given[node.given["uid"]]).copy_(value)

    def _masked(self, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Within the bounds, of which the left one is exclusive (utils/attn_score_modifiers.h)."""
        arguments = self.call.arguments
        left = arguments.get("diagonal_band_left_bound")
        right = arguments.get("diagonal_band_right_bound")
        assert left is None or (left > 0 and x["q"].shape[2] <= x["k"].shape[2])
        band = masked_libraries.Band(None if left is None else left - 1, right)
        call = {name: x[name].transpose(1, 2) for name in x if name != "stats"}
        call |= {"dout": call.get("dO"), "softmax_scale": arguments["attn_scale"]}
        if "dO" not in x:
            o, lse = masked_libraries.forward(call, band, 0.0)
            return o.transpose(1, 2), lse[..., None]
        stats = x["stats"].squeeze(-1)
        found = masked_libraries.backward(call, call["o"], stats, band, 0.0)
        return tuple(gradient.transpose(1, 2) for gradient in found)


class Library:
    """What is called of module cudnn."""

    data_type = SimpleNamespace(HALF="float16", BFLOAT16="bfloat16", FLOAT="float32")
    diagonal_alignment = SimpleNamespace(BOTTOM_RIGHT="bottom right")
    heur_mode = SimpleNamespace(A="a", FALLBACK="fallback")

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.executed: list[Graph] = []
        self.stream = 0
        self.is_masked = False
        """Whether calls may have windows and sinks; the statistics are trusted then."""
        self.workspace_bytes = 0
        self.fails_at = ""

    def pygraph(self, **given: Any) -> Graph:
        self.graphs.append(Graph(self, **given))
        return self.graphs[-1]

    def create_handle(self) -> str:
        return "a handle"

    def set_stream(self, handle: str, stream: int) -> None:
        self.stream = stream

    def backend_version(self) -> int:
        return 91900


def forget() -> None:
    cudnn_graphs._graphs.clear()
    cudnn_graphs._handle.cache_clear()
    cudnn_frontend._why_no_graph.cache_clear()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A stand-in for the package, on a machine that seems to have a Hopper GPU."""
    stand_in = Library()
    forget()
    monkeypatch.setattr(cudnn_graphs, "load", lambda: stand_in)
    monkeypatch.setattr(cudnn_frontend.metadata, "version", lambda name: "1.28.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    yield stand_in
    forget()


class TestCalls:
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("transposed", [True, False])
    def test_results_are_those_of_the_definition(
        self, library: Library, causal: bool, dtype: str, transposed: bool
    ) -> None:
        problem = replace(PROBLEM, causal=causal, dtype=dtype)
        q, k, v, do = tensors_of(problem)
        if transposed:
            q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
        expected = attention_by_definition(q, k, v, do, causal=causal, scale=0.3)
        backend, spec = backend_of(), AttentionSpec(causal=causal, scale=0.3)
        library.workspace_bytes = 512
        o, lse = backend.forward(q, k, v, spec)
        assert o.stride() == q.stride()
        assert_close(o, expected.o, dtype, "o")
        assert_close(lse, expected.lse, "float32", "lse")
        # A ring keeps o in float32.
        gradients = backend.backward(do, q, k, v, o.float(), lse, spec)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_close(gradient, getattr(expected, name), dtype, name)

    def test_rows_that_cudnn_cannot_read_are_copied(self, library: Library) -> None:
        q, k, v, _ = tensors_of(PROBLEM)
        expected, _ = backend_of().forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        flat = torch.zeros(q.numel() + 1, dtype=q.dtype)
        flat[1:] = q.flatten()
        odd = torch.zeros((*k.shape[:3], 17), dtype=k.dtype)
        odd[..., :16] = k
        values = v.mT.contiguous().mT
        spec = AttentionSpec(causal=True, scale=0.3)
        o, _ = backend_of().forward(flat[1:].view(q.shape), odd[..., :16], values, spec)
        assert torch.equal(o, expected)
        repeated = k[:1].expand(2, -1, -1, -1)
        backend_of().forward(q, repeated, v, spec)
        for node in library.executed[-1].call.arguments.values():
            if isinstance(node, Node):
                assert all(stride % 8 == 0 and stride for stride in node.given["stride"][:3])

    def test_graphs_are_kept_and_bounded(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        q, k, v, _ = tensors_of(PROBLEM)
        backend = backend_of()
        monkeypatch.setattr(cudnn_graphs, "MOST_GRAPHS", 2)
        for scale in (0.3, 0.3, 0.4, 0.3, 0.5):
            backend.forward(q, k, v, AttentionSpec(causal=True, scale=scale))
        assert len(library.graphs) == 3, "one for each scale"
        assert len(library.executed) == 5
        backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.3))
        assert len(library.graphs) == 3, "the one used longest ago was dropped, and 0.3 was not"
        backend.forward(q, k, v, AttentionSpec(causal=True, scale=0.4))
        assert len(library.graphs) == 4

    @pytest.mark.parametrize("deterministic", [True, False])
    def test_deterministic_gradients(self, library: Library, deterministic: bool) -> None:
        q, k, v, do = tensors_of(PROBLEM)
        backend = backend_of(deterministic=deterministic)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = backend.attend(*leaves, AttentionSpec(causal=True, scale=0.3))
        torch.autograd.grad(o, leaves, do)
        asked = library.executed[-1].call.arguments["use_deterministic_algorithm"]
        assert asked is deterministic


MASKS = {
    "window": {"window": 4},
    "window of one": {"window": 1},
    "window on both sides": {"window": 4, "causal": False},
    "window of all keys": {"window": 40, "causal": False},
    "sinks": {"sinks": True},
    "sinks without a mask": {"sinks": True, "causal": False},
    "later queries": {"window": 6, "shift": 5},
    "later queries, no window": {"shift": 3},
    "earlier queries": {"window": 6, "shift": -5, "causal": False},
    "window and sinks": {"window": 3, "sinks": True},
}


class AsOnGpu(cudnn_frontend.CudnnFrontend):
    """With the refusals of a GPU for tensors of a CPU."""

    def why_unsupported(self, problem: AttentionProblem) -> str | None:
        found = replace(problem, device="cuda")
        return cudnn_frontend.CudnnFrontend.why_unsupported(self, found)


class TestMasks:
    @pytest.mark.parametrize("kind", MASKS)
    def test_results_are_those_of_the_definition(self, library: Library, kind: str) -> None:
        library.is_masked = True
        problem = replace(PROBLEM, **MASKS[kind])
        backend = AsOnGpu(name="cudnn_frontend")
        assert backend.why_unsupported(problem) is None
        check_mask(backend, problem)

    def test_a_window_has_a_graph_of_its_own(self, library: Library) -> None:
        library.is_masked = True
        q, k, v, _ = tensors_of(PROBLEM)
        for window in (3, 4, 3, None):
            backend_of().forward(q, k, v, AttentionSpec(causal=True, scale=0.3, window=window))
        assert len(library.graphs) == 3

    def test_what_it_refuses(self, library: Library) -> None:
        backend = backend_of()
        for changes in ({"softcap": 4.0}, {"prefix_len": 4}, {"shift": -1}):
            (name,) = changes
            reason = backend.why_unsupported(replace(ON_CUDA, **changes))
            assert f"takes no attention.{name}=" in str(reason)
        more = replace(ON_CUDA, q_len=18, causal=False)
        assert backend.why_unsupported(more) is None
        reason = backend.why_unsupported(replace(more, window=4))
        assert reason == "cuDNN's window takes no more queries than keys"

    def test_cudnn_is_asked_about_the_window(self, library: Library) -> None:
        assert backend_of().why_unsupported(replace(ON_CUDA, window=4)) is None
        bounds = [graph.call.arguments["diagonal_band_left_bound"] for graph in library.graphs]
        assert bounds == [4, 4]


class TestSupport:
    def test_where_it_runs(self, library: Library) -> None:
        assert backend_of().supports(ON_CUDA) is None
        assert [graph.done[-1] for graph in library.graphs] == ["check_support"] * 2
        assert backend_of().supports(ON_CUDA) is None
        assert len(library.graphs) == 2, "the verdict is kept"
        assert backend_of().supports(replace(ON_CUDA, needs_grad=False)) is None
        assert len(library.graphs) == 3
        backward = library.graphs[1].call
        stats = backward.arguments["stats"].given
        assert (stats["dim"], stats["data_type"]) == ([2, 4, 9, 1], "float32")
        assert backward.outputs[2].given["dim"] == [2, 2, 17, 16]
        assert backend_of().gives_lse

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"device": "cpu"}, "runs on CUDA devices only"),
            ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
            ({"packed": True}, "takes no packed batch"),
            ({"q_len": 18}, "causal mask takes no more queries than keys"),
            ({"head_dim": 20}, "multiple of 8 and at most 256, not 20"),
            ({"head_dim": 264}, "multiple of 8 and at most 256, not 264"),
        ],
    )
    def test_problems_it_cannot_solve(
        self, library: Library, changes: dict[str, Any], reason: str
    ) -> None:
        assert reason in str(backend_of().supports(replace(ON_CUDA, **changes)))

    def test_what_cudnn_refuses(self, library: Library) -> None:
        library.fails_at = "create_execution_plans"
        reason = backend_of().supports(ON_CUDA)
        assert reason == "cuDNN has no graph for it (RuntimeError: No valid engine configs)"

    def test_other_gpus(self, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (10, 0))
        assert "at most 128, not 256" in str(backend_of().supports(replace(ON_CUDA, head_dim=256)))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
        assert "needs compute capability 8.0" in str(backend_of().supports(ON_CUDA))

    def test_a_version_that_fails_beside_an_older_libcudnn(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cudnn_frontend.metadata, "version", lambda name: "1.24.0")
        reason = str(backend_of().supports(ON_CUDA))
        assert "1.24.0 builds no graph with libcudnn 9.19" in reason
        assert "pip install 'nvidia-cudnn-frontend>=1.27'" in reason
        monkeypatch.setattr(library, "backend_version", lambda: 92200)
        assert backend_of().supports(ON_CUDA) is None

    def test_an_installation_that_will_not_do(
        self, library: Library, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_libcudnn() -> int:
            raise RuntimeError("Unable to find\nsymbol cudnnGetVersion")

        monkeypatch.setattr(library, "backend_version", no_libcudnn)
        reason = str(backend_of().supports(ON_CUDA))
        assert "cannot be used (RuntimeError: Unable to find symbol cudnnGetVersion)" in reason
        monkeypatch.setattr(cudnn_frontend.metadata, "version", lambda name: "1.9.2")
        assert "1.9.2 is too old, 1.18 is needed" in str(backend_of().supports(ON_CUDA))

        def absent(name: str) -> str:
            raise metadata.PackageNotFoundError(name)

        monkeypatch.setattr(cudnn_frontend.metadata, "version", absent)
        reason = str(backend_of().supports(ON_CUDA))
        assert reason.startswith("nvidia-cudnn-frontend is not installed: pip install ")
        assert backend_of().version() is None

    def test_deterministic_gradients_take_memory(self) -> None:
        problem = replace(ON_CUDA, q_len=100, kv_len=130)
        extra = backend_of(deterministic=True).backward_workspace(problem)
        extra -= backend_of().backward_workspace(problem)
        assert extra == 2 * (2 * 4) * 128 * 192, "bytes x heads x S x S_k, rounded up to 64"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("deterministic", [True, False])
    def test_against_the_definition(self, head_dim: int, causal: bool, deterministic: bool) -> None:
        problem = replace(ON_CUDA, q_len=70, kv_len=133, head_dim=head_dim, causal=causal)
        backend = backend_of(deterministic=deterministic)
        if reason := backend.supports(problem):
            pytest.skip(reason)
        q, k, v, do = tensors_of(problem)
        spec = AttentionSpec(causal=causal, scale=0.3)
        expected = attention_by_definition(q, k, v, do, causal=causal, scale=0.3)
        o, lse = backend.forward(q, k, v, spec)
        assert_close(o, expected.o, problem.dtype, "o")
        assert_close(lse, expected.lse, "float32", "lse")
        gradients = backend.backward(do, q, k, v, o, lse, spec)
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            assert_close(gradient, getattr(expected, name), problem.dtype, name)
        if deterministic:
            again = backend.backward(do, q, k, v, o, lse, spec)
            for first, second in zip(gradients, again, strict=True):
                assert torch.equal(first, second)

    @pytest.mark.parametrize("kind", MASKS)
    def test_masks(self, kind: str) -> None:
        check_mask(backend_of(), replace(ON_CUDA, head_dim=64, **MASKS[kind]))
