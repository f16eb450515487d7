"""Published training on several hosts beside forecasts of it; ``conf/published/scale_out.yaml``."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median, stdev
from typing import Any

from omegaconf import OmegaConf

from harness.cases.case import Case
from harness.forecast.calibration import FOLDER, Calibration, read
from harness.forecast.machines import Machine
from harness.forecast.network import network
from harness.forecast.prediction import StepPrediction
from harness.forecast.schedule import Z90
from harness.paths import CONF

FIGURES = CONF / "published" / "scale_out.yaml"

LEAST_SPREAD = 0.06
"""Standard log error of a source's factor at least."""

Choices = dict[str, Any]
FindMachine = Callable[[str, str], Machine]

ROTARY = "rotary embedding"


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """One published figure and its forecast, in tokens a second on each GPU."""

    name: str
    gpus: int
    seq_len: int
    source: str
    published: float
    unaided: float
    """Predicted without anything of the source's."""
    predicted: float
    """With its software's factor, from its own figures on one host."""
    low: float
    high: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published

    @property
    def covered(self) -> bool:
        return self.low <= self.published <= self.high


def comparisons(choices: Choices, calibration: str = "h200") -> list[Comparison]:
    """Every published figure with its forecast from a calibration of one host.

    Args:
        choices: ``attention``, and ``parallel`` but ``dp``: fully sharded, as all of them are.
    """
    values: Any = OmegaConf.to_container(OmegaConf.load(FIGURES))
    measured = read(FOLDER / f"{calibration}.json")
    machines = _machines(values["hardware"], measured)
    software = _software(values, machines, choices)
    found = []
    for item in values["figures"]:
        plain, one = _forecast(item, machines, choices)
        factor, spread = software[item["source"]]
        error = math.hypot(math.log(one.high_ms / one.low_ms) / 2, Z90 * spread)
        found.append(
            Comparison(
                name=item["name"],
                gpus=item["gpus"],
                seq_len=item["seq_len"],
                source=item["source"],
                published=item["tokens_per_s_per_gpu"],
                unaided=plain,
                predicted=factor * plain,
                low=factor * plain * math.exp(-error),
                high=factor * plain * math.exp(error),
            )
        )
    return found


def _machines(likes: dict[str, Any], measured: Calibration) -> FindMachine:
    """Machines by hardware and network, each with its laws fitted once."""

    @cache
    def find(hardware: str, between: str) -> Machine:
        like = likes[hardware]
        rates = {"compute": like["compute"], "bandwidth": like["bandwidth"]}
        return Machine(measured, network(between), **rates)

    return find


def _software(
    values: dict[str, Any], machines: FindMachine, choices: Choices
) -> dict[str, tuple[float, float]]:
    """Published over predicted rate on one host of each source, and its standard log error.

    One factor for all of a source's models: its library versions, its kernels between products.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for item in values["one_host"]:
        plain, _ = _forecast(item, machines, choices)
        ratios[item["source"]].append(math.log(item["tokens_per_s_per_gpu"] / plain))
    return {
        source: (
            math.exp(median(logs)),
            max(LEAST_SPREAD, stdev(logs) if len(logs) > 2 else 0.0),
        )
        for source, logs in ratios.items()
    }


def _forecast(
    item: dict[str, Any], machines: FindMachine, choices: Choices
) -> tuple[float, StepPrediction]:
    """Tokens a second on each GPU, and the micro-batch's step."""
    machine = machines(item["hardware"], item["network"])
    one = machine.step(_case(item, choices))
    tokens = item["micro_batch"] * item["accumulation"] * item["seq_len"]
    return tokens / _times(item, one, one.median_ms) * 1e3, one


def _case(item: dict[str, Any], choices: Choices) -> Case:
    checkpoint = None if item["checkpoint"] == "none" else {"scope": item["checkpoint"]}
    return Case.from_dict(
        {
            "task": {"name": "train_step"},
            "attention": choices["attention"],
            "precision": {"name": "bf16", "autocast": "bfloat16"},
            "parallel": {**choices["parallel"], "dp": item["gpus"]},
            "compile": {},
            "checkpoint": checkpoint,
            "model": {"name": item["name"], **item["model"]},
            "seq_len": item["seq_len"],
            "batch_size": item["micro_batch"],
            "seed": 0,
            "device": "cuda",
        }
    )


def _times(item: dict[str, Any], one: StepPrediction, step_ms: float) -> float:
    """A whole step: every micro-batch's passes, and the optimizer once."""
    update = sum(part.ms for part in one.parts if part.name == "optimizer")
    absent = 0.0 if item["rotary"] else sum(p.ms for p in one.parts if p.name == ROTARY)
    return item["accumulation"] * (step_ms - update - absent) + update


def scaled_case(choices: Choices, gpus: int) -> Case:
    """Llama 3 8B with one sequence of 8,192 tokens on each GPU."""
    model: Any = OmegaConf.to_container(OmegaConf.load(CONF / "model" / "llama3_8b.yaml"))
    name = model.pop("name")
    item = {"name": name, "model": model, "gpus": gpus, "checkpoint": "none"}
    return _case({**item, "seq_len": 8192, "micro_batch": 1}, choices)
