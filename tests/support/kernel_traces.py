"""A trace of ``torch.profiler`` written by hand: launches, kernels and the links between them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur} | (
        {"args": args} if args else {}
    )


def launched(number: int, moment: float, name: str, start: float, dur: float, tid: int = 1) -> Rows:
    """A launch on the host and its kernel on the device."""
    return [
        span("cuda_runtime", "cudaLaunchKernel", moment, 2, tid, correlation=number),
        span("kernel", name, start, dur, 7, correlation=number, stream=7),
    ]


def link(number: int, forward: float, backward: float) -> Rows:
    ends = [("s", forward, 1), ("f", backward, 2)]
    return [
        {"ph": ph, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 9, "tid": tid, "ts": ts}
        for ph, ts, tid in ends
    ]


GEMM, SOFTMAX, NCCL = "sm90_xmma_gemm_f32f32", "softmax_warp_forward", "ncclDevKernel_AllReduce"

PHASES = ("forward", "backward", "optimizer")

MM = {"Input Dims": [[8, 16], [16, 4]], "Input type": ["float", "float"]}

BY_HAND = [
    span("user_annotation", "warm-up", 0, 90),
    *launched(1, 10, GEMM, 20, 50),
    span("user_annotation", "step", 100, 500),
    span("user_annotation", "ProfilerStep#1", 100, 500),
    span("user_annotation", "forward", 110, 100),
    span("user_annotation", "block 0", 112, 40),
    span("user_annotation", "attention", 113, 30),
    span("cpu_op", "aten::linear", 114, 12),
    span("cpu_op", "aten::mm", 115, 10, **MM),
    # Runs when the host is in the backward phase: what counts is when it was launched.
    *launched(2, 117, GEMM, 230, 30),
    span("user_annotation", "softmax", 130, 10),
    span("cpu_op", "aten::_softmax", 131, 8),
    *launched(3, 133, SOFTMAX, 260, 10),
    span("user_annotation", "block 11", 155, 40),
    span("user_annotation", "attention", 156, 30),
    span("cpu_op", "aten::mm", 160, 10, **MM),
    *launched(4, 162, GEMM, 270, 40),
    span("user_annotation", "backward", 220, 200),
    # Autograd's own thread, where no range is open.
    span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 230, 60, 2),
    span("cpu_op", "MmBackward0", 232, 50, 2),
    span("cpu_op", "aten::mm", 234, 10, 2, **MM),
    *launched(5, 236, GEMM, 310, 80, 2),
    *link(1, 115, 232),
    # A block computed again: inside a backward operator, and in ranges of its own.
    span("user_annotation", "checkpointed", 250, 20, 2),
    span("user_annotation", "attention", 252, 10, 2),
    span("cpu_op", "aten::mm", 254, 6, 2, **MM),
    *launched(6, 255, GEMM, 390, 20, 2),
    # Two streams at once.
    span("cpu_op", "c10d::allreduce_", 300, 10, 2),
    *launched(7, 302, NCCL, 380, 40, 2),
    span("user_annotation", "optimizer", 430, 50),
    span("cpu_op", "aten::_fused_adamw_", 440, 10),
    *launched(8, 441, "multi_tensor_apply_kernel", 450, 50),
    *launched(9, 1000, GEMM, 1000, 1000),
]


def write_trace(path: Path, events: Rows = BY_HAND, *, end: str = "]}") -> Path:
    """As torch.profiler writes it: an object with more in it than events."""
    head = '{"schemaVersion": 1, "deviceProperties": [{"id": 0}],\n "traceEvents": [\n'
    text = head + ",\n".join(json.dumps(event, indent=1) for event in events) + end
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(text)
    return path
