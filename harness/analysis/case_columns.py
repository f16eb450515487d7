"""The columns that every case has, each beside how it is read from a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from harness.analysis import predictions
from harness.analysis.disturbance import sm_clock_mhz, was_throttled
from harness.analysis.machines import Machine
from harness.analysis.memory import own_peak_bytes
from harness.analysis.names import Names
from harness.analysis.stats import median, slowest_rank
from harness.cases.columns import BATCH_LAYOUTS, NO_MASK
from harness.cases.hardware import Hardware, find_hardware
from harness.cases.source import is_of_other_code
from harness.cases.task import WHOLE_PHASES
from harness.store.record import Record
from kernels.caches import CACHES

GIB = 2**30
MIB = 2**20

SLOW_START = 1.2
"""A round whose first pass took longer than this many medians was not warm yet."""


@dataclass(kw_only=True, frozen=True)
class Reading:
    """A record, with the parts of it that several columns share."""

    record: Record
    names: Names

    @cached_property
    def case(self) -> dict[str, Any]:
        return self.record.case

    @cached_property
    def task(self) -> dict[str, Any]:
        return dict(self.case["task"])

    @cached_property
    def notes(self) -> dict[str, Any]:
        return self.record.notes

    @cached_property
    def compiled(self) -> dict[str, Any]:
        return self.case["compile"] or {}

    @cached_property
    def compute(self) -> str:
        """The dtype of matmuls."""
        precision = self.case["precision"]
        return str(precision["autocast"] or precision["parameters"])

    @cached_property
    def heads(self) -> tuple[int | None, int | None, int | None]:
        """Query heads, key-value heads and head_dim, of the task or else of the model."""
        source = self.task if "head_dim" in self.task else self.case["model"] or {}
        num_heads, head_dim = source.get("num_heads"), source.get("head_dim")
        if head_dim is None and num_heads:
            head_dim = source["d_model"] // num_heads
        return num_heads, source.get("num_kv_heads") or num_heads, head_dim

    def mask(self, option: str, otherwise: Any) -> Any:
        """An option of ``kernels.problem.MASKS``, if the attention has it and it is set."""
        return self.case["attention"].get(option) or otherwise

    @cached_property
    def device_name(self) -> str | None:
        environment = self.record.environment
        name = environment.get("device_name")
        if name is None and self.case["device"] == "cpu":
            name = environment.get("cpu_model")
        return name

    @property
    def device_memory_gib(self) -> float:
        """All memory of the device, as its driver says it; NaN on a CPU."""
        return (self.record.environment.get("device_memory_bytes") or np.nan) / GIB

    @property
    def multiprocessors(self) -> float:
        """As the driver says, or the device's file; NaN on a CPU and where neither does."""
        told = self.record.environment.get("multiprocessors")
        if told is None and self.hardware is not None:
            told = self.hardware.multiprocessors
        return np.nan if told is None else told

    @cached_property
    def hardware(self) -> Hardware | None:
        return find_hardware(self.device_name) if self.case["device"] == "cuda" else None

    @cached_property
    def peak_tflops(self) -> float:
        if self.hardware is None:
            return np.nan
        has_tf32 = self.compute == "float32" and self.case["precision"]["tf32"]
        return self.hardware.peak_tflops.get("tf32" if has_tf32 else self.compute, np.nan)

    @property
    def on_cuda(self) -> bool:
        return bool(self.case["device"] == "cuda")

    def largest(self, key: str, unit: int) -> float:
        """Largest value over ranks, since the fullest device decides what fits."""
        ranks = self.record.memory
        values = [rank[key] for rank in ranks if rank.get(key) is not None]
        return max(values) / unit if values else np.nan

    @cached_property
    def peak_memory_gib(self) -> float:
        """What the case held at most, on the fullest rank."""
        peaks = [own_peak_bytes(rank) for rank in self.record.memory]
        known = [peak for peak in peaks if peak is not None]
        return max(known) / GIB if known else np.nan

    @cached_property
    def predicted_memory_gib(self) -> float:
        """The predicted peak; NaN where it is not predicted."""
        return predictions.peak_bytes(self.record) / GIB

    @cached_property
    def predicted_over_measured(self) -> float:
        """Of the peak on CUDA; NaN unless both are known."""
        ratio = predictions.predicted_over_measured(self.record)
        return np.nan if ratio is None else ratio

    @cached_property
    def predicted_before_backward_mib(self) -> float:
        return predictions.before_backward_bytes(self.record) / MIB

    @cached_property
    def check_error(self) -> float:
        errors = (self.record.check or {}).get("errors") or {}
        return max(errors.values()) if errors else np.nan

    @cached_property
    def slow_start(self) -> bool:
        """Whether a round's first pass took far longer than the median: warm-up was too short."""
        phases = self.record.phases
        found = [phases[name] for name in WHOLE_PHASES if name in phases]
        if not found or not found[0].samples_ms:
            return False
        samples = slowest_rank(found[0].samples_ms)
        starts, position = [], 0
        for length in self.record.rounds or [len(samples)]:
            starts += samples[position : position + 1]
            position += length
        return bool(starts) and max(starts) > SLOW_START * median(samples)

    @cached_property
    def stale(self) -> bool:
        """Whether the measured code has changed since; not known, and no, without its hash."""
        return is_of_other_code(self.record.source, self.case, self.notes)

    @cached_property
    def rounds_started_at(self) -> list[str]:
        """When each round began; where cases took no turns, when the case did."""
        started = [self.record.started_at] if self.record.started_at else []
        return self.notes.get("rounds_started_at") or started

    @cached_property
    def scheme(self) -> tuple[str | None, str, str | None]:
        """Scheme, kernel and transport of attention over ranks; on one device only a kernel."""
        attention = self.case["attention"]
        if "transport" not in attention and "rotate" not in attention:
            return None, attention["name"], None
        transport = attention.get("transport", attention.get("rotate"))
        return (
            attention["name"],
            self.notes.get("kernel", attention["kernel"]),
            self.notes.get("transport", transport),
        )

    @cached_property
    def scheme_modes(self) -> str | None:
        """``forward / backward``: in how many kernel calls, where attention has that choice."""
        attention = self.case["attention"]
        modes = [str(attention.get(f"{name}_mode", "")) for name in ("forward", "backward")]
        return " / ".join(modes) if all(modes) else None

    @cached_property
    def cache(self) -> str:
        cache = self.case.get("cache")
        return CACHES[cache["name"]].target(**cache).label if cache else "none"

    @cached_property
    def checkpoint(self) -> str:
        values = self.case.get("checkpoint") or {"scope": "none"}
        return f"every {values['every']}" if values["scope"] == "every_k" else str(values["scope"])


CASE_COLUMNS: Mapping[str, Callable[[Reading], Any]] = {
    "case_id": lambda of: of.record.case_id,
    "task": lambda of: of.task["name"],
    "mode": lambda of: of.task.get("mode"),
    "model": lambda of: of.names.model(of.case["model"]),
    "attention": lambda of: of.names.attention(of.case["attention"]),
    "precision": lambda of: of.names.precision(of.case["precision"]),
    "compute": lambda of: of.compute,
    "tf32": lambda of: bool(of.case["precision"]["tf32"]),
    "compile_scope": lambda of: of.compiled.get("scope", "none"),
    "compile_mode": lambda of: of.compiled.get("mode", "default"),
    "strategy": lambda of: of.names.strategy(of.case["parallel"]),
    "world_size": lambda of: of.names.world_size(of.record),
    "cp": lambda of: of.case["parallel"].get("cp", 1),
    "seq_len": lambda of: of.case["seq_len"],
    "batch_size": lambda of: of.case["batch_size"],
    "num_heads": lambda of: of.heads[0],
    "num_kv_heads": lambda of: of.heads[1],
    "head_dim": lambda of: of.heads[2],
    "value_dim": lambda of: of.task.get("value_dim") or of.heads[2],
    "causal": lambda of: of.task.get("causal", True),
    "window": lambda of: of.mask("window", NO_MASK),
    "prefix_len": lambda of: of.mask("prefix_len", 0),
    "softcap": lambda of: of.mask("softcap", NO_MASK),
    "sinks": lambda of: of.mask("sinks", False),
    "kv_len": lambda of: of.task.get("kv_len") or of.case["seq_len"],
    "layout": lambda of: BATCH_LAYOUTS[of.task.get("packing", "none")],
    "lengths": lambda of: of.task.get("lengths", "equal"),
    "rotary": lambda of: of.task.get("rotary", "none"),
    "cuda_graph": lambda of: bool(of.task.get("cuda_graph", False)),
    "warmup_steps": lambda of: of.task.get("warmup_steps"),
    "measure_steps": lambda of: of.task.get("measure_steps"),
    "checkpoint": lambda of: of.checkpoint,
    "profile": lambda of: (of.case.get("profile") or {}).get("name", "none"),
    "cache": lambda of: of.cache,
    "scheme": lambda of: of.scheme[0],
    "scheme_kernel": lambda of: of.scheme[1],
    "scheme_transport": lambda of: of.scheme[2],
    "scheme_modes": lambda of: of.scheme_modes,
    "scheme_options": lambda of: of.case["attention"],
    "seed": lambda of: of.case["seed"],
    "device": lambda of: of.case["device"],
    "device_name": lambda of: of.device_name,
    "machine": lambda of: Machine.of(of.record.environment),
    "status": lambda of: of.record.status,
    "reason": lambda of: (of.record.error or {}).get("message"),
    "memory_source": lambda of: of.record.memory[0].get("source") if of.record.memory else None,
    "device_memory_gib": lambda of: of.device_memory_gib,
    "multiprocessors": lambda of: of.multiprocessors,
    "peak_memory_gib": lambda of: of.peak_memory_gib,
    "peak_allocated_gib": lambda of: of.peak_memory_gib if of.on_cuda else np.nan,
    "peak_reserved_gib": lambda of: of.largest("peak_reserved_bytes", GIB),
    "peak_rss_gib": lambda of: of.largest("peak_rss_bytes", GIB),
    "before_backward_mib": lambda of: of.largest("before_backward_bytes", MIB),
    "predicted_memory_gib": lambda of: of.predicted_memory_gib,
    "predicted_over_measured": lambda of: of.predicted_over_measured,
    "predicted_before_backward_mib": lambda of: of.predicted_before_backward_mib,
    "compile_s": lambda of: of.record.compilation.get("compile_s"),
    "autotune_s": lambda of: of.record.compilation.get("autotune_s"),
    "first_pass_s": lambda of: of.record.compilation.get("first_pass_s"),
    "recompilations": lambda of: of.record.compilation.get("recompilations"),
    "throttled": lambda of: was_throttled(of.record),
    "sm_clock_mhz": lambda of: sm_clock_mhz(of.record),
    "slow_start": lambda of: of.slow_start,
    "loss": lambda of: of.notes.get("loss"),
    "attention_choice": lambda of: of.notes.get("attention_choice"),
    "float32_precision": lambda of: of.notes.get("float32_precision"),
    "check_error": lambda of: of.check_error,
    "peak_tflops": lambda of: of.peak_tflops,
    "memory_bandwidth_gb_s": lambda of: (
        of.hardware.memory_bandwidth_gb_s if of.hardware else np.nan
    ),
    "wall_s": lambda of: of.record.wall_s,
    "revision": lambda of: of.record.environment.get("git_revision"),
    "source": lambda of: of.record.source,
    "stale": lambda of: of.stale,
    "attempt": lambda of: of.record.attempt,
    "rounds_started_at": lambda of: of.rounds_started_at,
    "until_decided": lambda of: bool(of.record.stopped),
    "timeline": lambda of: of.notes.get("timeline"),
    "case": lambda of: of.case,
    "rank_memory": lambda of: of.record.memory,
}
