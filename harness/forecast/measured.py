"""Measured training steps, as calibrations and their benchmarks read them from records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pandas as pd

from harness.cases.case import Case
from models.variants import PLAIN

UNSTEADY = {"spread", "bimodal", "busy", "drift"}
"""Marks of steps whose time is not one number."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MeasuredStep:
    """A recorded case of task=train_step."""

    case_id: str
    case: Case
    phases_ms: dict[str, float]
    """Medians; ``step`` is the whole."""
    device_ms: dict[str, float]
    """What the device took of each phase, where that was measured by itself."""
    host: str
    """What tells hosts apart: processors, and the boot or the revision that they measured."""
    profile: dict[str, Any] | None
    row: dict[str, Any]

    @property
    def ms(self) -> float:
        return self.phases_ms["step"]


def of_frame(frame: pd.DataFrame) -> list[MeasuredStep]:
    """Every measured training step with causal attention and nothing besides."""
    rows = frame[(frame["task"] == "train_step") & (frame["status"] == "ok")]
    found = []
    for case_id, group in rows.groupby("case_id", sort=False):
        row = cast("dict[str, Any]", group[group["phase"] == "step"].iloc[0].to_dict())
        case = Case.from_dict(row["case"])
        if case.attention_variant != PLAIN:
            continue
        profile = row["kernel_profile"]
        found.append(
            MeasuredStep(
                case_id=str(case_id),
                case=case,
                phases_ms=dict(zip(group["phase"], group["median_ms"], strict=True)),
                device_ms=dict(group.dropna(subset=["device_ms"])[["phase", "device_ms"]].values),
                host=_host(row),
                profile=profile if isinstance(profile, dict) else None,
                row=row,
            )
        )
    return found


def _host(row: dict[str, Any]) -> str:
    machine = row["machine"]
    if machine is None or not hasattr(machine, "num_cpus"):
        return "unknown"
    # Where no boot is recorded, a revision was measured in one go.
    when = f"boot {machine.boot}" if machine.boot else f"revision {row['revision']}"
    return f"{machine.cpu_model}, {machine.num_cpus} processors, {when}"


def is_plain(step: MeasuredStep) -> bool:
    """Whether it is a whole step of one GPU that PyTorch runs operator by operator."""
    case = step.case
    plain = case.world_size == 1 and not case.compiles and case.checkpoint is None
    return plain and case.device != "cpu" and "optimizer" in step.phases_ms


def is_one_number(step: MeasuredStep) -> bool:
    """Whether a step's time is one number, by the marks of its record."""
    return not UNSTEADY & set(step.row["disturbed"] or ())


def problem_of(case: Case) -> tuple[object, ...]:
    """What one rank computes."""
    assert case.model is not None, "training steps have a model"
    named = case.model.name, case.attention.name, case.precision.name
    return *named, case.batch_size, case.seq_len
