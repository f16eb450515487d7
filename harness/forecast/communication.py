"""Communication of a training step over several ranks, and how much of it computing hides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from harness.cases.case import Case
from harness.cases.precision import DTYPE_BYTES
from harness.cases.transport import transport_on_hosts
from harness.forecast.balance import head_ranks, in_turns
from harness.forecast.calibration import Exposure
from harness.forecast.schedule import Exchange
from harness.predictions import training
from harness.predictions.capacity import ranks_on_each_host
from parallel.collectives import bus_factor

if TYPE_CHECKING:
    from harness.forecast.machines import Machine

MESSAGE_BYTES = 25 * 2**20
"""Size of one message of gradients, where a strategy does not say."""

USUAL = 0.8
"""What communication adds under an unmeasured strategy, in the middle of those that were."""

NONE = "none"
"""The strategy without replicas."""

SMALL_BYTES = 1e4
"""Of a message whose time is that of a call."""

CUDA_CORES = "float32"
"""The format whose products run as many small blocks on CUDA cores, a few to a multiprocessor, so
that they lose to communication the multiprocessors that it takes and no more. Kernels for tensor
cores fill all of them at once, and wait where some are taken."""

CHANNELS = 32
"""Most multiprocessors that NCCL takes (NCCL_MAX_CTAS, NCCL's guide on environment variables)."""

VISIBLE_ERROR = 0.35
"""Standard error of that share, relative, measured or not."""

UNMEASURED_RANKS_ERROR = 0.2
"""Log error of a collective among numbers of ranks that were not measured."""

CONTEXT_VISIBLE = 0.3
"""Share of the visiting keys' transfer that attention to the keys at hand does not hide, with
the rank's wait for others."""


HANDS_ON = "send_recv"
"""The transport by which ranks hand keys on, named as its collective operation."""

ALL_TO_ALL = "all_to_all"
"""The collective operation that exchanges heads."""

SENDS_SUMS = ("send_recv", "all_gather")
"""Transports that send gradients of keys in float32. Where ranks read other ranks' memory, as by
``auto`` on a host with NVLink, and where heads are exchanged, these are in the keys' dtype."""

UNMEASURED_LAUNCHES = {"forward": 27.0, "backward": 48.0}
"""Of a layer for each part of the keys, where no split call was measured: in the middle of what
those of two H200s take."""

HIDING = 0.9
"""Share of the passes behind which communication can hide: it begins with the second unit."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DataTraffic:
    """Gradients and parameters of a case, however long its passes take."""

    exposure: Exposure
    operations: list[tuple[str, float, str | None]]
    """Name, milliseconds, and a note if they are extrapolated."""
    inside_ms: float
    """What all of them take inside a host."""
    num_tensors: int

    @property
    def whole_ms(self) -> float:
        return sum(ms for _, ms, _ in self.operations)


@dataclass(kw_only=True, slots=True)
class Known:
    """What has been computed of a machine's communication: cases share most of it."""

    collectives: dict[tuple[str, int, float, int], tuple[float, str | None]] = field(
        default_factory=dict
    )
    traffic: dict[tuple[object, ...], DataTraffic] = field(default_factory=dict)
    of_mesh: dict[tuple[object, ...], tuple[Exchange, ...]] = field(default_factory=dict)
    kept: list[object] = field(default_factory=list)
    """What keys name by identity, kept alive so that none is reused."""


def of_case(machine: Machine, case: Case, compute_ms: float) -> tuple[Exchange, ...]:
    """Exchanges of gradients and parameters, of activations (tp) and of keys (cp).

    Args:
        compute_ms: the device's time in the passes, behind which communication hides.
    """
    several = case.parallel.data_ranks > 1
    found = _of_data(machine, case, compute_ms) if several else ()
    return (*found, *_of_mesh(machine, case))


def _of_mesh(machine: Machine, case: Case) -> tuple[Exchange, ...]:
    """What ranks of one replica exchange, whatever the strategy is among replicas."""
    parts, mesh = (case.attention, case.model, case.precision), case.parallel
    near = case.has_sequences_on_one_host(_ranks_on_host(machine, case))
    key = (*map(id, parts), case.batch_size, case.seq_len, mesh.cp, mesh.tp, near, _trains(case))
    if key not in machine.exchanges.of_mesh:
        found = list(_of_tensors(machine, case)) if mesh.tp > 1 else []
        if mesh.cp > 1:
            found += _of_sequence(machine, case)
        machine.exchanges.of_mesh[key] = tuple(found)
        machine.exchanges.kept += parts
    return machine.exchanges.of_mesh[key]


def num_tensors(case: Case) -> int:
    """Parameters of the model that are tensors of their own."""
    return training.num_gradients(case)


def gradient_traffic(machine: Machine, case: Case) -> Iterator[tuple[str, float, str | None]]:
    """Collective operations on gradients and parameters: name, milliseconds, and a note."""
    for name, size in training.traffic_bytes(case).items():
        messages = num_messages(case, size)
        ranks, stride = case.parallel.predicted_ranks(name)
        apart = stride * case.parallel.tp
        ms, note = collective_ms(machine, name, ranks, size / messages, stride=apart)
        yield name, messages * ms, note


def num_messages(case: Case, size: float) -> float:
    """Messages that move ``size`` bytes: blocks of gathered weights, or buckets of gradients."""
    assert case.model is not None, "training steps have a model"
    if case.parallel.parameter_share < 1:
        return case.model.num_layers + 1.0
    return max(1.0, size / MESSAGE_BYTES)


def _traffic(machine: Machine, case: Case) -> DataTraffic:
    """The traffic of a case's gradients and parameters, computed once for all that share it."""
    parts = case.parallel, case.model, case.precision
    key = (*map(id, parts), case.attention_variant, _trains(case))
    if key not in machine.exchanges.traffic:
        operations = list(gradient_traffic(machine, case))
        whole = sum(ms for _, ms, _ in operations)
        machine.exchanges.traffic[key] = DataTraffic(
            exposure=_exposure(machine, case),
            operations=operations,
            inside_ms=max(0.0, whole - machine.between_hosts_ms(case)),
            num_tensors=num_tensors(case),
        )
        machine.exchanges.kept += parts
    return machine.exchanges.traffic[key]


def _of_data(machine: Machine, case: Case, compute_ms: float) -> Iterator[Exchange]:
    traffic = _traffic(machine, case)
    exposure = traffic.exposure
    visible, launches = exposure.visible, exposure.launches
    assert visible is not None, "exposures are complete"
    assert launches is not None, "exposures are complete"
    whole = traffic.whole_ms
    hosts = case.world_size > machine.network.gpus_per_host
    if hosts and whole:
        # What contends on one device is the part inside the host; the rest hides while it can.
        waits = max(0.0, whole - HIDING * compute_ms) if visible < 1 else whole
        visible = max(visible * traffic.inside_ms, waits) / whole
    if exposure.forward_launches and traffic.operations:
        yield Exchange(
            name=f"communication ({traffic.operations[0][0]})",
            phase="forward",
            visible_ms=0.0,
            hidden_ms=0.0,
            error_ms=0.0,
            launches=exposure.forward_launches * traffic.num_tensors,
        )
    for name, total, note in traffic.operations:
        if not exposure.strategy:
            note = f"{case.parallel.name} was not measured"
        yield Exchange(
            name=f"communication ({name})",
            phase="backward",
            visible_ms=visible * total,
            hidden_ms=max(0.0, 1 - visible) * total,
            error_ms=VISIBLE_ERROR * visible * total,
            launches=launches * traffic.num_tensors / len(traffic.operations),
            follows=exposure.follows is not None,
            note=note,
        )


def _exposure(machine: Machine, case: Case) -> Exposure:
    """What a strategy's communication adds to a step, each part as far as any step tells it."""
    peak = case.precision.peak
    if case.parallel.name == NONE:
        # Ranks that share sequences add up their gradients when all of them are there.
        host = _launches(machine, case)
        return Exposure(strategy=NONE, matmul=peak, visible=1.0, launches=host, follows=1.0)
    alike = [item for item in machine.calibration.exposures if item.strategy == case.parallel.name]
    # Of the same number format first.
    alike.sort(key=lambda item: item.matmul != peak)
    follows = next((item.follows for item in alike if item.follows is not None), None)
    known = [item for item in alike if item.visible is not None]
    visible = known[0].visible if known else USUAL
    if follows is not None:
        visible = follows
    elif peak == CUDA_CORES and not any(item.matmul == peak for item in known):
        visible = usual_visible(machine, peak)
    bound = next((item for item in alike if item.launches is not None), None)
    return Exposure(
        strategy=case.parallel.name if alike else "",
        matmul=peak,
        visible=visible,
        launches=_launches(machine, case) if bound is None else bound.launches,
        forward_launches=None if bound is None else bound.forward_launches,
        follows=follows,
    )


def usual_visible(machine: Machine, matmul: str) -> float:
    """What communication adds under an unmeasured strategy, as a share of its own time."""
    if matmul == CUDA_CORES:
        return min(1.0, CHANNELS / machine.calibration.num_sms)
    return USUAL


def _launches(machine: Machine, case: Case) -> float:
    """The host's time of a strategy that no step tells, in launches for each tensor.

    One for each tensor's hook or copy by each time that tensors move, and calls of collective
    operations as long as the smallest takes by itself.
    """
    host_us = machine.host_us()["backward"]
    calls_ms = 0.0
    for name, size in training.traffic_bytes(case).items():
        ranks, _ = case.parallel.predicted_ranks(name)
        one, _ = collective_ms(machine, name, min(2, ranks), SMALL_BYTES)
        calls_ms += one * num_messages(case, size)
    copies = sum(case.parallel.traffic.values())
    return copies + calls_ms * 1e3 / max(host_us, 1.0) / num_tensors(case)


def _of_tensors(machine: Machine, case: Case) -> Iterator[Exchange]:
    """All-gathers and reduce-scatters of activations, two of each a block and pass, none hidden."""
    assert case.model is not None, "training steps have a model"
    tokens = case.batch_size * -(-case.seq_len // case.parallel.cp)
    size = tokens * case.model.d_model * DTYPE_BYTES[case.precision.compute]
    passes = ("forward", "backward") if _trains(case) else ("forward",)
    for phase in passes:
        for name in ("all_gather", "reduce_scatter"):
            one, note = collective_ms(machine, name, case.parallel.tp, size)
            total = (2 * case.model.num_layers + 1) * one
            yield Exchange(
                name=f"tensor parallelism ({name})",
                phase=phase,
                visible_ms=total,
                hidden_ms=0.0,
                error_ms=UNMEASURED_RANKS_ERROR * total,
                launches=2.0 * 4 * case.model.num_layers,
                note=note or "tensor parallelism is by formula",
            )


def _of_sequence(machine: Machine, case: Case) -> Iterator[Exchange]:
    """Heads among neighbours, keys among the groups of these, or one of both.

    The host's work is that of the whole scheme.
    """
    assert case.model is not None, "training steps have a model"
    neighbours = head_ranks(case.attention, case.attention_problem)
    passes = ("forward", "backward") if _trains(case) else ("forward",)
    for phase in passes:
        launches = case.model.num_layers * _launches_of_keys(machine, case, phase)
        if neighbours > 1:
            yield _of_heads(machine, case, phase, neighbours, launches)
            launches = 0.0
        if neighbours < case.parallel.cp:
            yield from _of_keys(machine, case, phase, neighbours, launches)


def _of_heads(machine: Machine, case: Case, phase: str, ranks: int, launches: float) -> Exchange:
    """Queries, keys, values and outputs of a rank's tokens, of all heads for those of its own.

    Back again in the backward pass as gradients: attention begins when they have come, and they
    leave when it has ended, so that nothing hides them. More ranks than key heads have copies.
    """
    assert case.model is not None, "training steps have a model"
    model, mesh = case.model, case.parallel
    heads = 2 * model.num_heads // mesh.tp + 2 * max(model.kv_heads // mesh.tp, ranks)
    tokens = case.batch_size * -(-case.seq_len // mesh.cp)
    size = tokens * heads * model.head_dim * DTYPE_BYTES[case.precision.compute]
    one, note = collective_ms(machine, ALL_TO_ALL, ranks, size, stride=mesh.tp)
    total = model.num_layers * one
    return Exchange(
        name="context parallelism (heads)",
        phase=phase,
        visible_ms=total,
        hidden_ms=0.0,
        error_ms=0.5 * total,
        launches=launches,
        note=note or _by_formula(case),
    )


def _of_keys(
    machine: Machine, case: Case, phase: str, in_group: int, launches: float
) -> Iterator[Exchange]:
    """Keys and values of other ranks, and after the backward pass their gradients.

    Attention to the keys at hand hides those that come; the last gradients leave when it has ended.

    Args:
        in_group: neighbours that have exchanged heads, and hold each other's tokens in theirs.
    """
    assert case.model is not None, "training steps have a model"
    model, mesh = case.model, case.parallel
    heads = max(model.kv_heads // mesh.tp, in_group) / in_group
    element = DTYPE_BYTES[case.precision.compute]
    keys = 2 * case.batch_size * case.seq_len * heads * model.head_dim * element
    one, note = _keys_ms(machine, case, keys, mesh.cp // in_group, stride=in_group * mesh.tp)
    note = note or _by_formula(case)
    total = model.num_layers * one
    yield Exchange(
        name="context parallelism (keys)",
        phase=phase,
        visible_ms=CONTEXT_VISIBLE * total,
        hidden_ms=(1 - CONTEXT_VISIBLE) * total,
        error_ms=0.5 * total,
        launches=launches,
        note=note,
    )
    if phase == "backward":
        sent = transport_on_hosts(case, _ranks_on_host(machine, case)) in SENDS_SUMS
        # Behind a window keys come from neighbours alone, and their gradients go in their dtype.
        total *= 4 / element if sent and case.attention_variant.window is None else 1.0
        yield Exchange(
            name="context parallelism (gradients of keys)",
            phase="backward",
            visible_ms=total,
            hidden_ms=0.0,
            error_ms=0.5 * total,
            note=note,
        )


def split_host_law(case: Case, phase: str) -> str:
    """Under which name a calibration has the host's time for a pass of split attention."""
    transport = getattr(case.attention, "transport", "")
    return f"split_host/{case.attention.name}/{transport}/{phase}"


def _launches_of_keys(machine: Machine, case: Case, phase: str) -> float:
    """The host's time of one layer's split attention, in launches.

    By calls of the same scheme, or else of all, among the closest number of ranks. Where keys come
    one part after another, it grows with the parts, of which each rank has one.
    """
    cp = case.parallel.cp
    observed = machine.split_host_ms(case, phase)
    if not observed:
        # Of what comes at once, as between two.
        return UNMEASURED_LAUNCHES[phase] * (cp if in_turns(case.attention) else 2)
    closest = min(observed, key=lambda ranks: abs(math.log(ranks / cp)))
    in_parts = cp / closest if in_turns(case.attention) else 1.0
    us = median(observed[closest]) * in_parts * 1e3
    return us / max(machine.host_us()[phase], 1.0)


def _by_formula(case: Case) -> str:
    if case.attention_variant.window is None:
        return "context parallelism is by formula"
    return "context parallelism is by formula, and keys that a window hides travel too"


def _keys_ms(
    machine: Machine, case: Case, size: float, ranks: int, *, stride: int
) -> tuple[float, str | None]:
    """Milliseconds in which keys reach ``ranks``: handed on one part at a time, or gathered."""
    if transport_on_hosts(case, _ranks_on_host(machine, case)) == HANDS_ON:
        one, note = collective_ms(machine, HANDS_ON, ranks, size / ranks, stride=stride)
        return (ranks - 1) * one, note
    return collective_ms(machine, "all_gather", ranks, size, stride=stride)


def _ranks_on_host(machine: Machine, case: Case) -> int:
    return ranks_on_each_host(case.world_size, machine.network.gpus_per_host) or 1


def _trains(case: Case) -> bool:
    return getattr(case.task, "mode", "train_step") != "forward"


def collective_ms(
    machine: Machine, name: str, ranks: int, size: float, *, stride: int = 1
) -> tuple[float, str | None]:
    """Milliseconds of one collective operation on ``size`` bytes, and a note if extrapolated.

    Args:
        stride: every so many ranks belong to one group; the groups of the ranks in between run
            the operation at the same time, over the same links between hosts.
    """
    key = name, ranks, size, stride
    known = machine.exchanges.collectives
    if key not in known:
        known[key] = _collective_ms(machine, name, ranks, size, stride)
    return known[key]


def _collective_ms(
    machine: Machine, name: str, ranks: int, size: float, stride: int
) -> tuple[float, str | None]:
    inside, note = 0.0, f"{name} was not measured"
    groups = min(stride, machine.network.gpus_per_host)
    local = min(ranks, machine.network.gpus_per_host // groups)
    sent = size * bus_factor(name, local)
    for measured in machine.measured_ranks(name, local)[:1]:
        law = machine.law(f"collective/{name}/{measured}")
        assert law is not None, "measured ranks have a law"
        # A switch carries all ranks at the rate of two: bytes on each link decide.
        inside = law((sent,)).ms if sent else 0.0
        note = "" if measured == ranks else f"{name} was measured on {measured} ranks"
    factor = bus_factor(name, 1024)
    # Size S of an all-to-all is what one rank holds, of others what all do together.
    entering = groups * size * (local if name == ALL_TO_ALL else 1)
    hosts = math.ceil(groups * ranks / machine.network.gpus_per_host)
    if name == HANDS_ON and hosts > 1:
        # Of others' parts a host has its own share already; what is handed on comes whole.
        entering *= hosts / (hosts - 1)
    between = machine.network.between_hosts_ms(entering, groups * ranks, factor)
    return max(inside, between), note or None
