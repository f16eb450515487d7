"""cuDNN's graphs of attention through Python package ``cudnn``: built, kept and executed.

A graph is made for the sizes, strides, dtype and mask of its tensors, which takes from
milliseconds to seconds; cuDNN's heuristics choose its kernels then. The last :data:`MOST_GRAPHS`
are kept. A call sets cuDNN's handle to torch's current stream and takes its workspace from
torch's allocator. Shapes are those of :mod:`kernels.problem`; cuDNN's softmax statistics are the
natural-log lse with a further dimension of size 1. Names and arguments:
``python/pygraph/sdpa.cpp`` of github.com/NVIDIA/cudnn-frontend.
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.problem import AttentionSpec, Mask

MOST_GRAPHS = 128
"""Graphs that are kept; the one that was used longest ago is dropped."""

_ALIGNED_BYTES = 16
"""Kernels read so many bytes of a row at a time."""

FORWARD: tuple[str, ...] = ("q", "k", "v", "o", "lse")
BACKWARD: tuple[str, ...] = ("do", "q", "k", "v", "o", "lse", "dq", "dk", "dv")
"""A graph's tensors in the order of their identifiers, which count from 1."""

_OUTPUTS = {FORWARD: ("o", "lse"), BACKWARD: ("dq", "dk", "dv")}

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a tensor."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GraphKey:
    """What a graph is built for."""

    names: tuple[str, ...]
    layouts: tuple[Layout, ...]
    dtype: torch.dtype
    device: int
    mask: Mask
    scale: float
    deterministic: bool


@dataclass(kw_only=True, slots=True)
class KeptGraph:
    graph: Any
    workspace_bytes: int


_graphs: OrderedDict[GraphKey, KeptGraph] = OrderedDict()
_lock = Lock()
"""Autograd calls from threads of its own, and a handle has one stream at a time."""


def load() -> ModuleType:
    """The library's module; raises what importing raises."""
    return importlib.import_module("cudnn")


@torch.compiler.disable
def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(o, lse); o has the layout of q."""
    q, k, v = (_readable(x) for x in (q, k, v))
    o = torch.empty_like(q)
    lse = torch.empty((*q.shape[:3], 1), dtype=torch.float32, device=q.device)
    _call(FORWARD, (q, k, v, o, lse), spec, deterministic=False)
    return o, lse.squeeze(-1)


@torch.compiler.disable
def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) from any lse of the same rows, such as that of all keys of a ring."""
    do, q, k, v, o = (_readable(x) for x in (do, q, k, v, o))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    lse = lse.contiguous().unsqueeze(-1)
    _call(BACKWARD, (do, q, k, v, o, lse, dq, dk, dv), spec, deterministic=deterministic)
    return dq, dk, dv


def check(key: GraphKey) -> None:
    """Raise what cuDNN raises of a graph that it has no kernel for; compiles nothing."""
    with _lock, torch.cuda.device(key.device):
        _supported(key)


def layout(x: Tensor) -> Layout:
    return tuple(x.shape), tuple(x.stride())


def _call(
    names: tuple[str, ...],
    tensors: Sequence[Tensor],
    spec: AttentionSpec,
    *,
    deterministic: bool,
) -> None:
    device = tensors[0].device
    key = GraphKey(
        names=names,
        layouts=tuple(layout(x) for x in tensors),
        dtype=tensors[0].dtype,
        device=device.index or 0,
        mask=spec.mask,
        scale=spec.scale,
        deterministic=deterministic,
    )
    with _lock, torch.cuda.device(key.device):
        kept = _kept(key)
        workspace = torch.empty(kept.workspace_bytes, dtype=torch.uint8, device=device)
        handle = _handle(key.device)
        load().set_stream(handle, torch.cuda.current_stream().cuda_stream)
        given = dict(enumerate(tensors, start=1))
        kept.graph.execute(given, workspace, handle=handle)


def _kept(key: GraphKey) -> KeptGraph:
    found = _graphs.get(key)
    if found is None:
        graph = _supported(key)
        graph.build_plans()
        # cuDNN wants an address, and an empty tensor has none.
        found = KeptGraph(graph=graph, workspace_bytes=max(1, graph.get_workspace_size()))
        _graphs[key] = found
        while len(_graphs) > MOST_GRAPHS:
            _graphs.popitem(last=False)
    else:
        _graphs.move_to_end(key)
    return found


@cache
def _handle(device: int) -> Any:
    """cuDNN's handle on a device, which is the current one."""
    return load().create_handle()


def _supported(key: GraphKey) -> Any:
    """The graph of a call, with plans that cuDNN says it can build."""
    cudnn = load()
    dtypes = {torch.float16: cudnn.data_type.HALF, torch.bfloat16: cudnn.data_type.BFLOAT16}
    graph = cudnn.pygraph(
        io_data_type=dtypes[key.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(key.device),
    )
    layouts = dict(zip(key.names, key.layouts, strict=True))
    outputs = _OUTPUTS[key.names]

    def data_type(name: str) -> Any:
        return cudnn.data_type.FLOAT if name == "lse" else dtypes[key.dtype]

    inputs = {
        name: graph.tensor(
            name=name,
            dim=list(layouts[name][0]),
            stride=list(layouts[name][1]),
            data_type=data_type(name),
            uid=identifier,
        )
        for identifier, name in enumerate(key.names, start=1)
        if name not in outputs
    }
    band = _band(key.mask)
    if band:
        band["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    qkv = {name: inputs[name] for name in "qkv"}
    if key.names == FORWARD:
        results = graph.sdpa(**qkv, generate_stats=True, attn_scale=key.scale, **band)
    else:
        results = graph.sdpa_backward(
            **qkv,
            o=inputs["o"],
            dO=inputs["do"],
            stats=inputs["lse"],
            attn_scale=key.scale,
            use_deterministic_algorithm=key.deterministic,
            **band,
        )
    for name, result in zip(outputs, results, strict=True):
        sizes, strides = layouts[name]
        result.set_output(True).set_uid(key.names.index(name) + 1)
        result.set_dim(list(sizes)).set_stride(list(strides)).set_data_type(data_type(name))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    return graph


def _band(mask: Mask) -> dict[str, Any]:
    """The bounds of the keys that a row sees, those of ``utils/attn_score_modifiers.h``.

    The right one is inclusive, a column at most so many after the diagonal; the left one is
    exclusive, column + bound > row.
    """
    left, right = mask.sides
    band: dict[str, Any] = {}
    if left is not None:
        band["diagonal_band_left_bound"] = left + 1
    if right is not None:
        band["diagonal_band_right_bound"] = right
    return band


def _readable(x: Tensor) -> Tensor:
    """x, or a copy where its rows are not adjacent entries that begin at aligned addresses."""
    step = _ALIGNED_BYTES // x.element_size()
    *outer, last = x.stride()
    rows_aligned = all(
        stride and stride % step == 0
        for stride, size in zip(outer, x.shape, strict=False)
        if size > 1
    )
    if last == 1 and rows_aligned and x.data_ptr() % _ALIGNED_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
