"""Questions from a command line: the keys of ``attnbench recommend`` and ``attnbench fits``.

Both take keys with values in the grammar of every other command. Keys of a case pin an axis of what
is enumerated: ``parallel=fsdp,zero_1 parallel.tp=1 checkpoint=none``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.cases.requirements import require_at_least, require_choice
from harness.did_you_mean import did_you_mean
from harness.predictions.capacity import Machine, machine_named, ranks_on_each_host
from harness.recommend.question import (
    CAPTURE_KEY,
    GOALS,
    LEAST_SEQUENCES,
    MASK_KEYS,
    MESH_KEYS,
    Question,
)
from harness.recommend.space import usual_attentions
from harness.request.choices import require_choice_of_group
from harness.request.command_line import Axes, parse
from harness.request.config import group_of
from harness.request.grid import Parts
from harness.run.here import machine_here
from kernels import Attention

HERE = "here"

PINNED = ("attention", "parallel", "checkpoint", "compile", "task", "model", "precision")
"""Groups whose own keys may be given as well."""

OWN = (
    *("model", "seq_len", "gpus", "batch_tokens", "precision", "goal", "machine", "device"),
    *("measure", "results", "budget_s", "timeout_s", "attention", "parallel", "checkpoint"),
    *("compile", "batch_size"),
)
"""All keys, for the hint in an error."""


@dataclass(kw_only=True, slots=True)
class Asked:
    """A question, and how to answer it."""

    question: Question
    measure: bool
    results: str
    budget_s: float | None
    timeout_s: float


def asked(command: str, arguments: Sequence[str], *, needs: Sequence[str] = ("model",)) -> Asked:
    """Parse and check a command's arguments. ValueError in one line for what is wrong."""
    typed = parse(arguments)
    for key in typed:
        _require_known(command, key)
    for key in needs:
        if key not in typed:
            raise ValueError(f"{key}: missing; {_USUAL[key]}")
    name = str(_one(typed, "machine", HERE))
    device = str(_one(typed, "device", "auto"))
    machine = _machine(name, device, typed)
    if machine.is_here and machine.device == "cpu" and "gpus" in typed and device == "auto":
        raise ValueError(
            f"gpus={typed['gpus'][0]}: this host has no GPU; add machine=h200 to predict for "
            "another, or device=cpu for ranks on this one"
        )
    gpus = _number(typed, "gpus", None) or _default_gpus(machine)
    if gpus > MOST_GPUS:
        raise ValueError(f"gpus={gpus}: must be at most {MOST_GPUS:,}")
    parts = Parts()
    seq_len = _number(typed, "seq_len", 1024) or 1024
    measure = _flag(typed, "measure", machine.is_here)
    if measure and not machine.is_here:
        raise ValueError(f"measure=true: machine={name} is not here; leave one of them out")
    if gpus > machine.num_devices:
        noun = "GPUs" if machine.device == "cuda" else "ranks"
        raise ValueError(
            f"gpus={gpus}: this host has {machine.num_devices:,} {noun}; name a machine to "
            "predict for, such as machine=h200"
        )
    if ranks_on_each_host(gpus, machine.gpus_per_host) is None:
        raise ValueError(
            f"gpus={gpus}: do not divide over hosts of {machine.gpus_per_host} GPUs; use a "
            f"multiple of {machine.gpus_per_host}"
        )
    model = str(_one(typed, "model", ""))
    require_choice_of_group("model", model)
    goal = str(_one(typed, "goal", GOALS[0]))
    if goal not in GOALS:
        raise ValueError(
            f"goal={goal}: must be one of {', '.join(GOALS)}{did_you_mean(goal, GOALS)}"
        )
    precision = str(_one(typed, "precision", "bf16" if machine.device == "cuda" else "fp32"))
    require_choice_of_group("precision", precision)
    pinned = {
        key: values
        for key, values in typed.items()
        if (group_of(key) in PINNED and key not in ("model", "precision")) or key == "batch_size"
    }
    _require_choices(pinned)
    config = parts.choice("model", {"model": model, **_of_group(typed, "model")})
    if config.full_attention_every is not None and "attention.window" not in typed:
        raise ValueError(
            f"model.full_attention_every={config.full_attention_every}: leaves the window out of "
            "some layers; set attention.window too, or leave it out"
        )
    question = Question(
        model=config,
        seq_len=seq_len,
        gpus=gpus,
        sequences=_sequences(typed, seq_len, gpus),
        precision=precision,
        goal=goal,
        machine=machine,
        choose=parts.choice,
        typed={key: values for key, values in pinned.items() if group_of(key) != "model"},
        asked=shlex.join(["attnbench", command, *arguments]),
    )
    if question.masks:
        _require_sensible_masks(question)
    return Asked(
        question=question,
        measure=measure,
        results=str(_one(typed, "results", "results/local")),
        budget_s=_seconds(typed, "budget_s"),
        timeout_s=_seconds(typed, "timeout_s") or 600.0,
    )


def _require_sensible_masks(question: Question) -> None:
    for made in usual_attentions(question):
        made.role(Attention).check_mask_options()


MOST_GPUS = 4096
"""What networks and stragglers are described for; the meshes of more take minutes to list."""

_USUAL = {"model": "write model=small, or another of attnbench --help"}


def _require_known(command: str, key: str) -> None:
    if key in OWN or (group_of(key) in PINNED and "." in key):
        return
    raise ValueError(
        f"{key}: no such key of attnbench {command}{did_you_mean(key, OWN)}; there are "
        f"{', '.join(OWN)}"
    )


def _require_choices(pinned: Axes) -> None:
    for key, values in pinned.items():
        if "." not in key and key != "batch_size":
            for value in values:
                require_choice_of_group(key, str(value))
        elif key == CAPTURE_KEY:
            for value in values:
                if not isinstance(value, bool):
                    raise ValueError(f"{key}={value}: must be true or false")
        elif key in MESH_KEYS or key == "batch_size":
            for value in values:
                if not isinstance(value, int) or value < 1:
                    raise ValueError(f"{key}={value}: must be a whole number of at least 1")
        elif group_of(key) not in ("model", "task", "precision", *pinned) and key not in MASK_KEYS:
            raise ValueError(f"{key}: belongs to one choice; name it too, with {group_of(key)}=")
        elif len(values) > 1:
            raise ValueError(f"{key}: takes one value here")


def _machine(name: str, device: str, typed: Axes) -> Machine:
    require_choice("device", device, ("auto", "cpu", "cuda"))
    if name == HERE:
        return machine_here(device)
    return machine_named(name, _number(typed, "gpus", None))


def _default_gpus(machine: Machine) -> int:
    return machine.num_devices if machine.device == "cuda" else 1


def _sequences(typed: Axes, seq_len: int, gpus: int) -> int:
    tokens = _number(typed, "batch_tokens", None)
    if tokens is None:
        return max(LEAST_SEQUENCES, gpus)
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        near = f"{below} or {below + seq_len}" if below else f"{seq_len}"
        raise ValueError(
            f"batch_tokens={tokens}: must be a multiple of seq_len={seq_len}, such as {near}"
        )
    return tokens // seq_len


def _of_group(typed: Axes, group: str) -> dict[str, Any]:
    return {key: values[0] for key, values in typed.items() if key.startswith(f"{group}.")}


def _one(typed: Axes, key: str, default: Any) -> Any:
    values = typed.get(key, [default])
    if len(values) != 1:
        raise ValueError(f"{key}: takes one value")
    return values[0]


def _number(typed: Axes, key: str, default: int | None) -> int | None:
    value = _one(typed, key, default)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key}={value}: must be a whole number")
    require_at_least(key, value, 1)
    return value


def _seconds(typed: Axes, key: str) -> float | None:
    value = _one(typed, key, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{key}={value}: must be a number of seconds")
    return float(value)


def _flag(typed: Axes, key: str, default: bool) -> bool:
    value = _one(typed, key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value}: must be true or false")
    return value
