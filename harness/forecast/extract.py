"""Observations from records: what of a results folder calibrates which law."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, cast

import pandas as pd

from harness.cases.case import Case
from harness.forecast.communication import split_host_law
from harness.forecast.law import Observation, Shape
from harness.forecast.masks import attention_shape, computes_all
from harness.forecast.operations import Sizes, backward, forward, optimizer, sizes_of
from models.variants import PLAIN
from parallel.collectives import bus_factor

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "w1", "w3", "w2")
"""In the order of :attr:`harness.forecast.operations.Sizes.projections`."""

MIB = 2**20

LEAST_ROWS = 8192
"""Rows of queries below which calls of attention alone take their host longer than the device, and
which no training step has."""

WAITED = 0.9
"""Time on the device over that of a whole pass below which the pass waited for its host."""

Found = Iterator[tuple[str, Observation]]


def from_frame(frame: pd.DataFrame, sources: dict[str, int]) -> dict[str, list[Observation]]:
    """Observations of every record that a law is calibrated by, by the name of the law.

    Args:
        sources: receives the index of each record that is used, by its id.
    """
    found: dict[str, list[Observation]] = defaultdict(list)
    measured = frame[(frame["status"] == "ok") & frame["median_ms"].notna()]
    readers = {
        "roofline": _roofline,
        "product_rate": _product,
        "attention": _attention,
        "collectives": _collective,
        "train_step": _train_step,
    }
    for row in measured.to_dict("records"):
        reader = readers.get(str(row["task"]))
        if reader is None:
            continue
        # A source is counted when something is read from it.
        index = sources.get(row["case_id"], len(sources))
        for law, item in reader(cast("dict[str, Any]", row), index):
            sources.setdefault(row["case_id"], index)
            found[law].append(item)
    return dict(found)


def _observed(law: str, ms: float, source: int, *shapes: Shape) -> Found:
    yield law, Observation(shapes=shapes, ms=float(f"{ms:.6g}"), source=source)


def _roofline(row: dict[str, Any], source: int) -> Found:
    case = Case.from_dict(row["case"])
    if row["phase"] == "matmul":
        size = float(cast(Any, case.task).matmul_size)
        law = f"matmul/{case.precision.peak}"
        yield from _observed(law, row["median_ms"], source, (size, size, size))
    if row["phase"] == "copy":
        size = 2.0 * cast(Any, case.task).copy_mib * MIB
        yield from _observed("copy", row["median_ms"], source, (1.0, size))


def _product(row: dict[str, Any], source: int) -> Found:
    case = Case.from_dict(row["case"])
    task = cast(Any, case.task)
    shape = float(task.m), float(task.n), float(task.k)
    yield from _observed(f"matmul/{case.precision.peak}", row["median_ms"], source, shape)


def _attention(row: dict[str, Any], source: int) -> Found:
    plain = row["layout"] == "dense" and row["rotary"] == "none" and bool(row["causal"])
    if not plain or row["phase"] not in ("forward", "backward") or bool(row["cuda_graph"]):
        return
    if pd.notna(row["kv_len"]) and row["kv_len"] != row["seq_len"]:
        return
    case = Case.from_dict(row["case"])
    if row["cp"] > 1:
        if pd.notna(row["host_ms"]) and case.attention_variant == PLAIN:
            law = split_host_law(case, row["phase"])
            yield from _observed(law, row["host_ms"], source, (float(row["cp"]),))
        return
    if case.attention_variant.sinks:
        # What they add is a term of its own, and no law of a kernel.
        return
    ms, device_ms = row["median_ms"], row.get("device_ms")
    problem = case.attention_problem
    if problem.value_dim is not None:
        # Laws are over one width of a head.
        return
    rows = case.batch_size * problem.num_heads * case.seq_len
    if case.device == "cuda" and rows < LEAST_ROWS:
        return
    if pd.notna(device_ms):
        # A pass that waited for its host: in a step, others fill the device meanwhile.
        ms = device_ms if device_ms < WAITED * ms else ms
    elif {"spread", "busy"} & set(row["disturbed"] or ()) and ms < 1:
        # Another, whose time on the device is not known; long ones are the device's anyway.
        return
    name = case.attention.name
    if computes_all(name) and cast(Any, case.task).compile:
        # What a compiler makes of it is other kernels.
        return
    shape = attention_shape(problem, whole=computes_all(name))
    law = attention_law(name, problem.dtype, row["phase"], autocast=problem.autocast)
    yield from _observed(law, ms, source, shape)


def attention_law(backend: str, dtype: str, phase: str, *, autocast: bool = False) -> str:
    """The law of a backend's passes on one device.

    Args:
        autocast: whether calls run under torch.autocast, which takes the softmax of scores in
            memory in float32: twice the bytes.
    """
    kind = f"{dtype}{AUTOCAST}" if autocast and dtype != "float32" else dtype
    return f"attention/{backend}/{kind if computes_all(backend) else dtype}/{phase}"


AUTOCAST = "_autocast"


def _collective(row: dict[str, Any], source: int) -> Found:
    name, ranks = str(row["collective"]), int(row["world_size"])
    sent = float(row["size_bytes"]) * bus_factor(name, ranks)
    yield from _observed(f"collective/{name}/{ranks}", row["median_ms"], source, (sent,))


def _train_step(row: dict[str, Any], source: int) -> Found:
    yield from _update(row, source) if row["phase"] == "optimizer" else _profile(row, source)


def _update(row: dict[str, Any], source: int) -> Found:
    """The optimizer of 16-bit parameters, on the device; profiles tell of those in float32.

    A byte of these takes longer: without them the law would take half of float32's time, or all.
    """
    case = Case.from_dict(row["case"])
    low = case.precision.parameters.endswith("16") and not case.precision.grad_scaler
    # Gradients are clipped in the same phase.
    other = any(bool(getattr(case.task, name, None)) for name in ("cuda_graph", "clip_grad_norm"))
    if not low or other or case.world_size > 1 or pd.isna(row.get("device_ms")):
        return
    update = optimizer(sizes_of(case), 2, 1.0, scaled=False)
    yield from _observed(update.law, row["device_ms"], source, update.shape)


def _profile(row: dict[str, Any], source: int) -> Found:
    """Kernels of a profiled step of one rank, forward, backward and optimizer."""
    profile = row["kernel_profile"]
    case = Case.from_dict(row["case"])
    whole = getattr(case.task, "mode", None) == "train_step"
    if row["phase"] != "step" or not isinstance(profile, dict) or not whole or case.compiles:
        return
    if case.world_size > 1 or case.checkpoint is not None or case.attention_variant != PLAIN:
        return
    totals = _totals(profile)
    sizes = sizes_of(case)
    for phase, operations in (("forward", forward(sizes)), ("backward", backward(sizes))):
        yield from _products(sizes, phase, totals, source)
        yield from _attention_kernels(case, phase, totals, source)
        for item in operations:
            name = item.law.rsplit("/", 1)[-1].removesuffix(f"_{phase}")
            if item.law.startswith("elementwise/"):
                ms = sum(totals.get((phase, *place), 0.0) for place in PLACES[phase][name])
                if ms:
                    yield from _observed(item.law, ms / item.count, source, item.shape)
    update = optimizer(sizes, 4, 1.0, scaled=False)
    ms = totals.get(("optimizer", "", "optimizer"), 0.0)
    if case.precision.parameters == "float32" and ms:
        yield from _observed(update.law, ms, source, update.shape)


def _totals(profile: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Milliseconds of a step by phase, range and category."""
    totals: dict[tuple[str, str, str], float] = defaultdict(float)
    for item in profile["rows"]:
        place = (item["phase"], item["range"] or "", item["category"])
        totals[place] += float(item["total_ms"]) / profile["steps"]
    return totals


_CASTS = [(f"block/attention/{name}", "copy") for name in PROJECTIONS[:4]]
_CASTS += [(f"block/feed-forward/{name}", "copy") for name in PROJECTIONS[4:]]

_BOTH: dict[str, list[tuple[str, str]]] = {
    "norm": [("block/norm", "normalisation"), ("norm", "normalisation")],
    "rotary": [("block/attention", "elementwise"), ("block/attention", "copy")],
    "activation": [("block/feed-forward", "elementwise")],
    "loss": [("loss", kind) for kind in ("copy", "softmax", "reduction", "elementwise")],
}
PLACES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "forward": {
        **_BOTH,
        "residual": [("block", "elementwise")],
        "cast": [*_CASTS, ("head", "copy")],
        "embedding": [("embedding", "copy"), ("", "elementwise"), ("", "copy")],
    },
    "backward": {
        **_BOTH,
        "residual": [("", "elementwise")],
        "cast": [*_CASTS, ("head", "copy"), ("", "copy")],
        "embedding": [("embedding", "copy"), ("embedding", "elementwise")],
    },
}
"""Ranges and categories of a kernel profile whose time each elementwise law has."""


def _products(
    sizes: Sizes, phase: str, totals: dict[tuple[str, str, str], float], source: int
) -> Found:
    rooms = ["block/attention"] * 4 + ["block/feed-forward"] * 3
    products = [
        (f"{room}/{name}", shape, sizes.num_layers)
        for room, name, shape in zip(rooms, PROJECTIONS, sizes.projections, strict=True)
    ]
    products.append(("head", (sizes.vocab_size, sizes.d_model), 1))
    for place, (rows, columns), count in products:
        ms = totals.get((phase, place, "matmul"), 0.0) / count
        shapes: list[Shape] = [(sizes.tokens, rows, columns)]
        if phase == "backward":
            shapes = [(sizes.tokens, columns, rows), (rows, columns, sizes.tokens)]
        if ms:
            yield from _observed(f"matmul/{sizes.matmul}", ms, source, *shapes)


def _attention_kernels(
    case: Case, phase: str, totals: dict[tuple[str, str, str], float], source: int
) -> Found:
    """Kernels of attention itself: one range of its own, or those of its steps."""
    assert case.model is not None, "training steps have a model"
    inner = ("scores", "softmax", "final matmul")
    ms = totals.get((phase, "block/attention", "attention"), 0.0)
    ms += sum(
        value
        for (found, place, _), value in totals.items()
        if found == phase and place in [f"block/attention/{name}" for name in inner]
    )
    if not ms:
        return
    shape = attention_shape(case.attention_problem)
    cast_softmax = case.precision.autocast is not None
    law = attention_law(case.attention.name, case.precision.compute, phase, autocast=cast_softmax)
    yield from _observed(law, ms / case.model.num_layers, source, shape)
