"""From records to a tidy frame: one row per case and phase, every derived number computed here.

Records keep samples and byte counts; medians, rates and utilisation exist only in this frame
and in what is built from it. A case that did not finish well keeps its rows, with the reason
and without any timing, so that no table can show a wrong result as a speed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from harness.analysis.stats import median, slowest_rank, summarise
from harness.cases.case import label
from harness.cases.columns import BATCH_LAYOUTS
from harness.cases.hardware import find_hardware
from harness.store.record import Record
from kernels import BACKENDS
from kernels.caches import CACHES
from parallel import STRATEGIES

GIB = 2**30
MIB = 2**20

THROTTLE_REASONS = frozenset(
    {
        "hw_slowdown",
        "hw_thermal_slowdown",
        "sw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sw_power_cap",
    }
)

_FALLBACK_PHASE = {"train_step": "step"}

_WHOLE_PHASES = ("step", "forward_backward", "forward")

SLOW_START = 1.2
"""A round whose first pass took longer than this many medians was not warm yet."""

_PHASE_ORDER = ("forward", "backward", "optimizer", "forward_backward", "step")


def build_frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row per case and phase, in the order of the records; units are in the column names."""
    records = list(records)
    names = _Names(records)
    cases = pd.DataFrame([_case_row(record, names) for record in records], columns=CASE_COLUMNS)
    _place_strays(cases)
    phases = pd.DataFrame(
        [row for index, record in enumerate(records) for row in _phase_rows(index, record)],
        columns=[
            *("case_index", "phase", "clock", "samples_ms"),
            *("work_flops", "work_bytes", "work_tokens"),
        ],
    )
    frame = cases.take(phases.pop("case_index").to_numpy(dtype=int)).reset_index(drop=True)
    frame = pd.concat([frame, phases], axis=1)
    frame["num_samples"] = frame["samples_ms"].map(len).astype(int)
    statistics = pd.DataFrame(summarise(frame["samples_ms"].tolist()))
    frame = pd.concat([frame, statistics], axis=1)
    seconds = frame["median_ms"] / 1e3
    frame["tokens_per_s"] = frame["work_tokens"].astype(float) * frame["world_size"] / seconds
    flops = frame["work_flops"].astype(float)
    # An optimizer step is bound by memory and has no FLOPs worth counting: no rate, not zero.
    frame["tflops"] = flops.where(flops > 0) / seconds / 1e12
    frame["mfu"] = frame["tflops"] / frame["peak_tflops"]
    frame["flops_per_byte"] = flops.where(flops > 0) / frame["work_bytes"].astype(float)
    return frame


def _place_strays(cases: pd.DataFrame) -> None:
    """Name the device of cases that died before they could, where there is only one it can be."""
    for device, names in cases.groupby("device")["device_name"]:
        if names.nunique() == 1:
            cases.loc[cases["device"] == device, "device_name"] = names.dropna().iloc[0]


CASE_COLUMNS = [
    *("case_id", "task", "mode", "model", "attention", "precision", "compute", "tf32"),
    *("compile_scope", "compile_mode", "strategy", "world_size", "seq_len", "batch_size"),
    *("num_heads", "num_kv_heads", "head_dim", "causal", "kv_len", "layout", "call_compiled"),
    *("warmup_steps", "measure_steps"),
    *("seed", "device", "device_name", "status", "reason", "memory_source"),
    *("peak_memory_gib", "peak_allocated_gib", "peak_reserved_gib", "peak_rss_gib"),
    *("before_backward_mib", "predicted_memory_gib"),
    *(
        "compile_s",
        "autotune_s",
        "first_pass_s",
        "recompilations",
        "throttled",
        "slow_start",
        "loss",
        "attention_choice",
        "check_error",
    ),
    *("peak_tflops", "memory_bandwidth_gb_s", "wall_s", "attempt", "rounds_started_at"),
    *("cp", "scheme", "scheme_kernel", "scheme_transport", "scheme_modes"),
    *("timeline", "padding_tokens"),
    *("balance", "balance_layout", "balance_ranks"),
    *("collective", "size_mib", "size_bytes", "wrong_elements"),
    *("audit", "accumulation", "case", "rank_memory", "traffic", "communication_accounting"),
    *("checkpoint", "profile", "kernel_profile", "memory_profile"),
    *("cache", "new_tokens", "lengths", "layers", "prompts", "rotary", "cuda_graph"),
    *("decode", "kv_memory", "generate"),
]


def _case_row(record: Record, names: _Names) -> tuple[Any, ...]:
    case, environment = record.case, record.environment
    task, compiled, notes = case["task"], case["compile"] or {}, record.notes
    precision = case["precision"]
    compute = precision["autocast"] or precision["parameters"]
    num_heads, num_kv_heads, head_dim = _heads(task, case["model"])
    device_name = environment.get("device_name")
    if device_name is None and case["device"] == "cpu":
        device_name = environment.get("cpu_model")
    hardware = find_hardware(device_name) if case["device"] == "cuda" else None
    peak = "tf32" if compute == "float32" and precision["tf32"] else compute
    allocated, reserved, resident = (
        _largest(record.memory, f"peak_{kind}_bytes", GIB)
        for kind in ("allocated", "reserved", "rss")
    )
    predicted = notes.get("predicted_memory") or (
        record.memory[0].get("predicted") if record.memory else None
    )
    errors = (record.check or {}).get("errors") or {}
    return (
        *(record.case_id, task["name"], task.get("mode")),
        *(names.model(case["model"]), names.attention(case["attention"])),
        *(names.precision(precision), compute, bool(precision["tf32"])),
        *(compiled.get("scope", "none"), compiled.get("mode", "default")),
        *(names.strategy(case["parallel"]), names.world_size(record)),
        *(case["seq_len"], case["batch_size"], num_heads, num_kv_heads, head_dim),
        *(task.get("causal", True), task.get("kv_len") or case["seq_len"]),
        *(BATCH_LAYOUTS[task.get("packing", "none")], task.get("compile", False)),
        *(task.get("warmup_steps"), task.get("measure_steps")),
        *(case["seed"], case["device"], device_name, record.status),
        (record.error or {}).get("message"),
        record.memory[0].get("source") if record.memory else None,
        *(resident if np.isnan(allocated) else allocated, allocated, reserved, resident),
        _largest(record.memory, "before_backward_bytes", MIB),
        sum(predicted.values()) / GIB if predicted else np.nan,
        record.compilation.get("compile_s"),
        record.compilation.get("autotune_s"),
        record.compilation.get("first_pass_s"),
        record.compilation.get("recompilations"),
        _throttled(record.device_state),
        _slow_start(record),
        notes.get("loss"),
        notes.get("attention_choice"),
        max(errors.values()) if errors else np.nan,
        hardware.peak_tflops.get(peak, np.nan) if hardware else np.nan,
        hardware.memory_bandwidth_gb_s if hardware else np.nan,
        *(record.wall_s, record.attempt, _rounds_started_at(record)),
        *(case["parallel"].get("cp", 1), *_scheme(case["attention"], notes)),
        _modes(case["attention"]),
        *(notes.get("timeline"), notes.get("padding_tokens", 0)),
        *(notes.get("balance"), task.get("layout"), task.get("ranks")),
        *(task.get("collective"), task.get("size_mib")),
        *(notes.get("size_bytes"), notes.get("wrong_elements")),
        notes.get("audit"),
        {**task, **notes["accumulation"]} if "accumulation" in notes else None,
        *(case, record.memory, notes.get("traffic"), notes.get("communication_accounting")),
        *(_checkpoint(case), (case.get("profile") or {}).get("name", "none")),
        *(notes.get("kernel_profile"), notes.get("memory_profile")),
        *_decoding(case),
        *(notes.get("decode"), notes.get("kv_memory"), notes.get("generate")),
    )


def _rounds_started_at(record: Record) -> list[str]:
    """When each round began; of a case that took no turns, and of older ones, when it did."""
    started = [record.started_at] if record.started_at else []
    return record.notes.get("rounds_started_at") or started


def _decoding(case: dict[str, Any]) -> tuple[Any, ...]:
    """What tells steps from a cache apart; of other tasks the value that goes without saying."""
    task, cache = case["task"], case.get("cache")
    prompts = task.get("prompts", 0)
    return (
        CACHES[cache["name"]].target(**cache).label if cache else "none",
        *(task.get("new_tokens", 1), task.get("lengths", "equal")),
        task.get("num_layers", 1),
        f"{prompts} x {task['prompt_len']:,}" if prompts else "none",
        *(task.get("rotary", "none"), bool(task.get("cuda_graph", False))),
    )


def _checkpoint(case: dict[str, Any]) -> str:
    values = case.get("checkpoint") or {"scope": "none"}
    return f"every {values['every']}" if values["scope"] == "every_k" else str(values["scope"])


def _phase_rows(index: int, record: Record) -> list[tuple[Any, ...]]:
    found = dict.fromkeys([*record.work, *record.phases])
    names = [name for name in _PHASE_ORDER if name in found]
    names += [name for name in found if name not in _PHASE_ORDER]
    if not names:
        names = [_FALLBACK_PHASE.get(record.case["task"]["name"], "forward")]
    rows = []
    for name in names:
        phase = record.phases.get(name) if record.status == "ok" else None
        work = record.work.get(name) or {}
        samples = slowest_rank(phase.samples_ms) if phase and phase.samples_ms else []
        clock = phase.clock if phase else None
        formulas = (work.get("flops"), work.get("bytes"), work.get("tokens"))
        rows.append((index, name, clock, samples, *formulas))
    return rows


def _scheme(attention: dict[str, Any], notes: dict[str, Any]) -> tuple[str | None, str, str | None]:
    """Attention over several ranks in three words; on one device it is its own kernel."""
    if "transport" not in attention and "rotate" not in attention:
        return None, attention["name"], None
    transport = attention.get("transport", attention.get("rotate"))
    return (
        attention["name"],
        notes.get("kernel", attention["kernel"]),
        notes.get("transport", transport),
    )


def _modes(attention: dict[str, Any]) -> str | None:
    """``forward / backward``: in how many kernel calls, where attention has that choice."""
    modes = [str(attention.get(f"{name}_mode", "")) for name in ("forward", "backward")]
    return " / ".join(modes) if all(modes) else None


def _heads(
    task: dict[str, Any], model: dict[str, Any] | None
) -> tuple[int | None, int | None, int | None]:
    """Query heads, key-value heads and head_dim, of the task or else of the model."""
    source = task if "head_dim" in task else model or {}
    num_heads = source.get("num_heads")
    head_dim = source.get("head_dim")
    if head_dim is None and num_heads:
        head_dim = source["d_model"] // num_heads
    return num_heads, source.get("num_kv_heads") or num_heads, head_dim


def _largest(ranks: list[dict[str, Any]], key: str, unit: int) -> float:
    """Largest value over ranks, since the fullest device decides what fits."""
    values = [rank[key] for rank in ranks if rank.get(key) is not None]
    return max(values) / unit if values else np.nan


def _throttled(device_state: list[dict[str, Any]]) -> bool:
    for rank in device_state:
        for moment in ("before", "after"):
            reasons = (rank.get(moment) or {}).get("throttle_reasons") or ()
            if not THROTTLE_REASONS.isdisjoint(reasons):
                return True
    return False


def _slow_start(record: Record) -> bool:
    """Whether a round's first pass took far longer than the median: warm-up was too short."""
    found = [record.phases[name] for name in _WHOLE_PHASES if name in record.phases]
    if not found or not found[0].samples_ms:
        return False
    samples = slowest_rank(found[0].samples_ms)
    starts, position = [], 0
    for length in record.rounds or [len(samples)]:
        starts += samples[position : position + 1]
        position += length
    return bool(starts) and max(starts) > SLOW_START * median(samples)


class _Names:
    """What the tables call a model, a backend, a precision, a strategy.

    The configured name alone where it is unambiguous among the records; where one name covers
    several configurations, the fields that differ are appended.
    """

    def __init__(self, records: list[Record]) -> None:
        self._attention: dict[str, str] = {}
        self._world_size: dict[str, int] = {}
        self._model = _distinct_names(record.case["model"] for record in records)
        self._precision = _distinct_names(record.case["precision"] for record in records)
        self._strategy = _distinct_names(
            _without_ranks(record.case["parallel"]) for record in records
        )

    def model(self, values: dict[str, Any] | None) -> str | None:
        return self._model[_key(values)] if values else None

    def precision(self, values: dict[str, Any]) -> str:
        return self._precision[_key(values)]

    def strategy(self, values: dict[str, Any]) -> str:
        return self._strategy[_key(_without_ranks(values))]

    def attention(self, values: dict[str, Any]) -> str:
        key = _key(values)
        if key not in self._attention:
            self._attention[key] = _attention_label(values)
        return self._attention[key]

    def world_size(self, record: Record) -> int:
        values, task = record.case["parallel"], record.case["task"]
        if "collective" in task:
            return int(task["ranks"])
        key = _key(values)
        if key not in self._world_size:
            try:
                self._world_size[key] = STRATEGIES[values["name"]].target(**values).world_size
            except (ValueError, TypeError):
                # A strategy that this version no longer has: its ranks are in what it wrote.
                self._world_size[key] = max(len(record.memory), values.get("dp", 1))
        return self._world_size[key]


def _attention_label(values: dict[str, Any]) -> str:
    try:
        return label(BACKENDS[values["name"]].target(**values))
    except (ValueError, TypeError):
        options = [f"{key}={value}" for key, value in values.items() if key != "name"]
        return f"{values['name']}({', '.join(options)})" if options else values["name"]


def _key(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _without_ranks(values: dict[str, Any]) -> dict[str, Any]:
    """A strategy but for its ranks, which have a column, unless they are on two axes.

    Tensor-parallel ones stay: nothing else in a row tells them from data-parallel ones.
    """
    implied = {"dp"} if values["dp"] > 1 and values.get("cp", 1) > 1 else {"dp", "cp"}
    if values.get("tp", 1) == 1:
        implied |= {"tp"}
    return {key: value for key, value in values.items() if key not in implied}


def _distinct_names(choices: Iterable[dict[str, Any] | None]) -> dict[str, str]:
    distinct = {_key(values): values for values in choices if values}
    by_name: dict[str, list[dict[str, Any]]] = {}
    for values in distinct.values():
        by_name.setdefault(values["name"], []).append(values)
    names = {}
    for key, values in distinct.items():
        peers = by_name[values["name"]]
        differing = [
            field
            for field in sorted(values)
            if field == "tp" or any(peer.get(field) != values[field] for peer in peers)
        ]
        # An option that is not set goes without saying, beside those where it is.
        given = [field for field in differing if values.get(field) is not None]
        options = ", ".join(f"{field}={values[field]}" for field in given)
        names[key] = f"{values['name']}({options})" if options else values["name"]
    return names
