"""The types of the notes in a record that tables, figures and commands read.

Notes that are not named here, of tasks from outside the project too, are free.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from harness.store.shape_types import LARGE, Amount, Count, Integer, Scalar, Text


class _Shape(msgspec.Struct, gc=False):
    """Decoded for its checks alone and dropped: the garbage collector need not look at it."""


class _KernelPhase(_Shape):
    busy_ms: Amount
    kernel_ms: Amount
    launches: Amount
    wall_ms: Amount


class _KernelRow(_Shape):
    kernel: Text
    category: Text
    phase: Text
    range: Text
    calls: Amount
    total_ms: Amount
    recomputed: bool = False
    bytes: Amount | None = None
    flops: Amount | None = None


class _KernelProfile(_Shape):
    phases: dict[str, _KernelPhase]
    rows: list[_KernelRow]
    steps: Annotated[int, Meta(ge=1, le=LARGE)]
    ranks: Annotated[int, Meta(ge=1, le=LARGE)]
    tool: Text
    unit: Text = ""


class _Allocation(_Shape):
    bytes: Amount
    category: Text
    where: list[Text]
    count: Count = 1


class _MemoryProfile(_Shape):
    at_peak: dict[str, Amount]
    largest: list[_Allocation]
    peak_bytes: Annotated[float, Meta(gt=0, le=1e30)]
    peak_ms: Amount
    phases: list[tuple[Text, float, float]]
    saved_bytes: Amount | None
    series: dict[str, list[Amount]]
    tensor_bytes: dict[str, Amount]
    times_ms: list[float]
    source: Text
    predicted: dict[str, Amount] = {}
    residual_stream_bytes: Amount = 0
    """Like ``predicted`` of a task that has a formula, and absent otherwise."""
    peak_bytes_by_rank: list[Amount] = []


class _Span(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    phase: Text
    kind: Text
    step: Integer
    start_ms: float
    end_ms: float


class _TimelineRank(_Shape):
    spans: list[_Span]
    sent_bytes: dict[str, Amount] = {}


class _Traffic(_Shape):
    bytes: Amount
    calls: Amount
    collective: Text
    ranks: Count


class _AuditedTensor(_Shape):
    name: Text
    kind: Text
    dtype: Text
    elements: Count = 0
    overflowed: Count = 0
    underflowed: Count = 0
    subnormal: Count = 0
    error_norm: float | None = None
    reference_norm: float | None = None


class _Audit(_Shape):
    tensors: list[_AuditedTensor]
    loss: float
    loss_float64: float
    loss_scale: float
    skipped_steps: Count


class _Decode(_Shape):
    unit: Text = ""
    kernels: Amount | None = None
    launches: Amount | None = None
    copy_bandwidth_gb_s: Amount | None = None
    matmul_tflops: Amount | None = None


class _Balance(_Shape, forbid_unknown_fields=True):
    chunk: list[list[Amount]]
    pair: list[list[Amount]]
    tile: list[list[Amount]]


class _KvMemory(_Shape):
    allocated_bytes: Amount | None = None
    bytes_per_token: Amount | None = None
    index_bytes: Amount | None = None
    total_bytes: Amount | None = None
    largest_batch: Count | None = None
    longest_len: Count | None = None
    fits: bool | None = None


class Notes(_Shape):
    """The notes that tables and commands of this project read."""

    loss: float | None = None
    gradient_norm: float | None = None
    attention_choice: Text | None = None
    autograd: Text | None = None
    float32_precision: Text | None = None
    kernel: Text = ""
    libraries: dict[str, Text | None] | None = None
    transport: Text | None = None
    in_a_row: Scalar = None
    padding_tokens: Count = 0
    size_bytes: Amount | None = None
    wrong_elements: Count | None = None
    resumed_rounds: Count | None = None
    interleaved_rounds: Count | None = None
    rounds_started_at: list[Text] | None = None
    stages_s: dict[str, float] | None = None
    predicted_memory: dict[str, Amount] | None = None
    predicted_before_backward: dict[str, Amount] | None = None
    accumulation: dict[str, float] | None = None
    audit: _Audit | None = None
    balance: _Balance | None = None
    communication_accounting: dict[str, float | None] | None = None
    decode: _Decode | None = None
    generate: _Decode | None = None
    kernel_profile: _KernelProfile | None = None
    kv_memory: _KvMemory | None = None
    memory_profile: _MemoryProfile | None = None
    timeline: list[list[_TimelineRank]] | None = None
    traffic: list[list[_Traffic]] | None = None
