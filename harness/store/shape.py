"""The types of all that is read from a record, as deep as tables, figures and commands read it.

A record's own fields leave open what tasks, profilers and environments put into them. A file of
which a field has another type than here is set aside as a whole, so that no table meets it. Fields
that are not named here are free, and so are the notes of tasks from outside the project.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from harness.store.note_shapes import Notes
from harness.store.shape_types import (
    LARGE,
    Amount,
    Count,
    Integer,
    Milliseconds,
    Name,
    Scalar,
    Simple,
    Text,
)


class _Shape(msgspec.Struct, gc=False):
    """Decoded for its checks alone and dropped: the garbage collector need not look at it."""


class _Precision(_Shape):
    name: Name
    parameters: Name
    autocast: Name | None
    tf32: bool


class _Model(_Shape):
    name: Name
    d_model: Count
    num_heads: Annotated[int, Meta(ge=1, le=LARGE)]
    num_kv_heads: Count | None = None


class _Compile(_Shape):
    scope: Name = "none"
    mode: Name = "default"


class _Checkpoint(_Shape):
    scope: Name
    every: Count = 2


class _Named(_Shape):
    name: Name


class _Parallel(_Named):
    dp: Count
    cp: Count = 1
    tp: Count = 1


class _Task(_Named):
    mode: Name | None = None
    num_heads: Count | None = None
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    value_dim: Count | None = None
    kv_len: Count | None = None
    causal: bool = True
    packing: Name = "none"
    lengths: Name = "equal"
    rotary: Name = "none"
    cuda_graph: bool = False
    warmup_steps: Count | None = None
    measure_steps: Count | None = None


class _Case(_Shape):
    task: _Task
    attention: _Named
    precision: _Precision
    parallel: _Parallel
    seq_len: Annotated[int, Meta(ge=1, le=LARGE)]
    batch_size: Annotated[int, Meta(ge=1, le=LARGE)]
    seed: Count
    device: Name
    model: _Model | None
    compile: _Compile | None
    checkpoint: _Checkpoint | None = None
    profile: _Named | None = None
    cache: _Named | None = None


class _Error(_Shape):
    message: Text | None = None
    traceback: Text | None = None
    rank: Integer | None = None
    stage: Text | None = None


class _Moment(_Shape):
    """The state of a device before or after a round."""

    sm_clock_mhz: Amount | None = None
    memory_clock_mhz: Amount | None = None
    power_w: Amount | None = None
    temperature_c: float | None = None
    throttle_reasons: list[Text] | None = None


class _AtStart(_Shape):
    device_processes: list[Any] | None = None


class _Load(_AtStart):
    other_cpu_share: float | None = None
    at_start: _AtStart | None = None


class _RankState(_Shape):
    before: _Moment | None = None
    after: _Moment | None = None
    load: _Load | None = None


class _RoundState(_Shape):
    ranks: list[_RankState] = []


class _Memory(_Shape):
    """Bytes of one rank."""

    source: Text | None = None
    predicted: dict[str, Amount] | None = None
    peak_allocated_bytes: Amount | None = None
    peak_reserved_bytes: Amount | None = None
    peak_rss_bytes: Amount | None = None
    baseline_allocated_bytes: Amount = 0
    idle_graph_bytes: Amount = 0
    before_backward_bytes: Amount | None = None
    after_initialisation_bytes: Amount | None = None
    before_optimizer_bytes: Amount | None = None
    after_optimizer_bytes: Amount | None = None
    parameters_bytes: Amount | None = None
    gradients_bytes: Amount | None = None
    optimizer_state_bytes: Amount | None = None
    activations_bytes: Amount | None = None


class _Work(_Shape):
    """By formula, of one phase."""

    flops: Amount
    bytes: Amount | None = None
    tokens: Amount | None = None
    sent_bytes: Amount | None = None


class _Check(_Shape):
    errors: dict[str, float] | None = None
    tolerance: float | None = None


class _Compilation(_Shape):
    first_pass_s: Amount | None = None
    compile_s: Amount | None = None
    autotune_s: Amount | None = None
    recompilations: Count | None = None
    compilations: Count | None = None


class _Host(_Shape):
    """What tells a rank's host from others."""

    host: Name | None = None
    gpu_uuid: Name | None = None


class _Environment(_Host):
    device_name: Name | None = None
    cpu_model: Name | None = None
    num_cpus: Count | None = None
    num_threads: Count | None = None
    host_memory_bytes: Amount | None = None
    device_memory_bytes: Amount | None = None
    multiprocessors: Count | None = None
    boot_id: Name | None = None
    machine_id: Name | None = None
    gpu_uuids: list[Name] | None = None
    git_revision: Text | None = None
    revision_stated: Any = None
    platform: Text | None = None
    python: Text | None = None
    torch: Text | None = None
    triton: Text | None = None
    cuda: Text | None = None
    cudnn: Scalar = None
    nccl: Text | None = None
    driver: Text | None = None
    attnbench: Text | None = None
    libraries: dict[str, Text | None] | None = None
    variables: dict[str, Text] = {}
    plugins: dict[str, Text | None] | None = None
    ranks: list[_Host] = []


class _Clock(_Shape):
    """Of a phase; :class:`harness.store.record.Phase` has the samples' types."""

    clock: Name


class RecordShape(_Shape, kw_only=True):
    """A record's file."""

    case_id: Name
    case: _Case
    status: Name
    error: _Error | None
    phases: dict[str, _Clock]
    rounds: list[Count]
    round_states: list[_RoundState] = []
    memory: list[_Memory]
    work: dict[str, _Work]
    check: _Check | None
    checking_s: list[Amount] = []
    compilation: _Compilation
    notes: Notes
    device_state: list[_RankState]
    environment: _Environment
    started_at: Annotated[str, Meta(max_length=100)]
    wall_s: Amount
    attempt: Count
    schema: int


class _Limit(_Shape):
    error: float
    tolerance: float


class _RoundCheck(_Shape):
    """Of one round; those of several are joined."""

    errors: dict[str, float]
    tolerance: float
    limits: dict[str, _Limit] = {}


class _RoundCompilation(_Compilation):
    recompilations: Count = 0


class _RoundLoad(_AtStart):
    """Around one round, or empty; its processes are told from those of the host's other ranks."""

    root: Integer = 0
    own_cpus: Amount = 0.0
    other_cpus: Amount = 0.0
    other_cpu_share: Amount = 0.0
    at_start: _AtStart | None = None


class _Outcome(_Shape, kw_only=True):
    """One rank's observations in one round."""

    rank: Count
    status: Name
    error: _Error | None
    clocks: dict[str, Name]
    samples_ms: dict[str, list[Milliseconds]]
    host_ms: dict[str, list[Milliseconds]] = {}
    device_ms: dict[str, list[Milliseconds]] = {}
    memory: _Memory
    check: _RoundCheck | None
    checking_s: Amount = 0.0
    compilation: _RoundCompilation
    notes: Notes
    device_state: _RankState
    load: _RoundLoad = msgspec.field(default_factory=_RoundLoad)


class RoundsShape(_Shape, kw_only=True):
    """A file of finished rounds."""

    case_id: Name
    num_rounds: Count
    conditions: dict[str, Any]
    started_at: list[Name]
    turns_at: list[Name] = []
    processes: list[Count] = []
    wall_s: Amount
    outcomes: list[list[_Outcome]]
    schema: int


class CaseOptions(_Shape):
    """A record's case, of which every option is simple."""

    # In a struct, whose type msgspec works out once and not in each call.
    case: dict[str, Scalar | dict[str, Simple]]
