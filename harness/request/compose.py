"""From a command line to a request: the cases to measure, and how to run them.

Every command is a sweep, and one point a sweep of one. Nothing starts before every point has
been validated; what is wrong is a ValueError in one line that names the key.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig

from harness.cases.case import Case
from harness.cases.requirements import require_at_least, require_choice
from harness.cases.sweep import UNTIL, Sweep, ad_hoc_sweep, load_sweep
from harness.did_you_mean import did_you_mean
from harness.predictions.capacity import Machine, machine_named
from harness.render.registries import FIGURES, TABLES, made_by_default
from harness.request.command_line import Axes, parse
from harness.request.config import RUN_KEYS, group_of
from harness.request.grid import Parts, default_config, expand, require_key, set_value
from harness.run.here import machine_here
from harness.run.launcher import Launcher
from harness.run.rounds.interleaving import comparison_groups
from harness.run.rounds.options import RunOptions

REMEASURE = ("none", "stale", "all")

FIRST_ROUNDS = 5
"""Rounds of cases that are compared; the first after which a verdict may be reached."""

_FRESH = {"auto": None, "true": True, "false": False}


@dataclass(kw_only=True, slots=True)
class Request:
    """A validated command: its cases, and how to run them."""

    cases: list[Case]
    options: RunOptions
    launcher: Launcher
    sweep: Sweep
    scale: str
    label: str
    """Folder of this command's tables: the sweep's name, and a hash if keys were changed."""
    command: str
    plan: bool
    machine: Machine | None = None
    """The machine that a plan is made for, if one was named."""


def compose_request(arguments: Sequence[str], flags: Sequence[str] = ()) -> Request:
    """Parse, compose and validate a command line.

    Args:
        arguments: keys with values.
        flags: those that were typed and have been followed, for :attr:`Request.command`.
    """
    typed = parse(arguments)
    names = typed.pop("sweeps", [None])
    if len(names) != 1:
        raise ValueError("sweeps: name one sweep at a time")
    run = _run_values({key: typed.pop(key) for key in list(typed) if key in RUN_KEYS})
    if names[0] is not None:
        sweep = load_sweep(str(names[0]))
    elif run["plan"]:
        # Nothing is rendered, and finding what would be takes a tenth of a plan's time.
        sweep = ad_hoc_sweep([], [])
    else:
        sweep = ad_hoc_sweep(made_by_default(TABLES), made_by_default(FIGURES))
    launcher = _launcher(
        {key: typed.pop(key) for key in list(typed) if group_of(key) == "launcher"}
    )
    for key in typed:
        require_key(key)

    machine = _machine(run, launcher)
    device = machine.device if machine is not None else launcher.resolve_device(run["device"])
    require_choice("remeasure", run["remeasure"], REMEASURE)
    scale = _scale(sweep, run["scale"], device, named=names[0] is not None)
    by_id = expand(sweep.scales[scale], typed, device)
    cases = list(by_id.values())
    # What a launcher here lacks says nothing of another machine.
    if machine is None or not launcher.measures_here:
        launcher.validate(cases)
    _require_rendering(sweep)
    options = RunOptions(
        results=Path(run["results"]).expanduser(),
        timeout_s=run["timeout_s"],
        isolate=run["isolate"] or sweep.isolate,
        retry=run["retry"],
        remeasure=run["remeasure"],
        **_rounds(cases, run, sweep, named=names[0] is not None),
        wait=run["wait"],
        vote_timeout_s=getattr(
            launcher, "vote_timeout_s", RunOptions(results=Path()).vote_timeout_s
        ),
    )
    return Request(
        cases=cases,
        options=options,
        launcher=launcher,
        sweep=sweep,
        scale=scale,
        label=_label(sweep, typed, by_id),
        command=_command([*flags, *arguments], launcher),
        plan=run["plan"],
        machine=machine,
    )


def _machine(run: dict[str, Any], launcher: Launcher) -> Machine | None:
    """The machine that a plan was asked for. ValueError where cases are to be measured."""
    name = run["machine"]
    if name is None:
        return None
    if not run["plan"]:
        raise ValueError(f"machine={name}: says what a plan is made for; add plan=true")
    found = machine_here(run["device"]) if name == HERE else machine_named(name)
    return launcher.reaches(found)


HERE = "here"


def scale_of(sweep: Sweep, config: DictConfig) -> str:
    """The scale of a sweep that a configuration chooses. ValueError if it has no such scale."""
    chosen = str(config["launcher"]["name"])
    launcher = _launcher({"launcher": [chosen]})
    return _scale(sweep, config["scale"], launcher.resolve_device(config["device"]))


def _scale(sweep: Sweep, scale: str, device: str, *, named: bool = True) -> str:
    if not named and scale not in ("auto", *sweep.scales):
        raise ValueError(f"scale={scale}: is a size of a sweep; add sweeps=NAME, or leave it out")
    require_choice("scale", scale, ["auto", *sweep.scales])
    if scale == "auto":
        return "full" if device == "cuda" or "tiny" not in sweep.scales else "tiny"
    return scale


def _command(arguments: Sequence[str], launcher: Launcher) -> str:
    """The command as plans and runs keep it: without keys that nobody else may know."""
    private = {f"launcher.{key}" for key in launcher.private_keys}
    kept = [argument for argument in arguments if argument.partition("=")[0] not in private]
    return shlex.join(["attnbench", *kept])


def _rounds(cases: list[Case], run: dict[str, Any], sweep: Sweep, *, named: bool) -> dict[str, Any]:
    """The options of rounds: the user's, else the sweep's, else those that a comparison needs.

    Never more rounds at first than a case has passes.
    """
    passes = [case.task.measure_steps for case in cases if hasattr(case.task, "measure_steps")]
    wanted = run["interleave"] or 1
    fewest = min(passes, default=wanted)
    if wanted > fewest:
        raise ValueError(
            f"interleave={wanted}: splits the measured passes of a case into as many rounds, and "
            f"task.measure_steps={fewest}; must be at most that"
        )
    # Who asks for fewer passes than that asks for a look, and not for a verdict.
    compares = run["interleave"] is None and fewest >= FIRST_ROUNDS
    compares = compares and any(len(group) > 1 for group in comparison_groups(cases))
    until = run["until"]
    if until == "auto":
        until = sweep.until if named else "decided" if compares else "rounds"
    rounds = run["interleave"] or min(sweep.interleave, fewest)
    if until == "decided" and run["interleave"] is None and sweep.interleave == 1:
        rounds = min(FIRST_ROUNDS, fewest)
    budget_s = sweep.budget_s if run["budget_s"] is None else run["budget_s"]
    return {
        "interleave": rounds,
        "until_decided": until == "decided",
        "budget_s": budget_s,
        "max_rounds": run["max_rounds"],
        "fresh_rounds": _FRESH[run["fresh_rounds"].lower()],
    }


def _require_rendering(sweep: Sweep) -> None:
    """Raise ValueError for a table or figure that does not exist, before hours of measuring."""
    for registry, names in ((TABLES, sweep.tables), (FIGURES, sweep.figures)):
        for name in names:
            if name not in registry:
                known = registry.names()
                raise ValueError(
                    f"sweeps={sweep.name}: {registry.group}s: {name}: no such {registry.group}"
                    f"{did_you_mean(name, known)}; there are {', '.join(known)}"
                )


def _run_values(axes: Axes) -> dict[str, Any]:
    """The keys that say how to run, typed, with defaults filled in."""
    config = default_config().copy()
    for key, values in axes.items():
        set_value(config, key, _one_value(key, values), key)
    run = {key: config[key] for key in RUN_KEYS}
    if not run["timeout_s"] > 0:
        raise ValueError(f"timeout_s={run['timeout_s']:g}: must be positive")
    require_at_least("interleave", 1 if run["interleave"] is None else run["interleave"], 1)
    require_at_least("max_rounds", run["max_rounds"], 1)
    if not str(run["results"] or "").strip():
        raise ValueError("results=: must name a folder")
    require_choice("until", run["until"], ("auto", *UNTIL))
    if run["budget_s"] is not None and run["budget_s"] < 0:
        raise ValueError(f"budget_s={run['budget_s']:g}: must not be negative")
    require_choice("device", run["device"], ("auto", "cpu", "cuda"))
    require_choice("fresh_rounds", run["fresh_rounds"].lower(), tuple(_FRESH))
    return run


def _launcher(axes: Axes) -> Launcher:
    point = {key: _one_value(key, values) for key, values in axes.items()}
    return cast(Launcher, Parts().choice("launcher", point))


def _one_value(key: str, values: list[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"{key}: takes one value, it says how to run and not what to measure")
    return values[0]


def _label(sweep: Sweep, typed: Axes, case_ids: Iterable[str]) -> str:
    if not typed:
        return sweep.name
    digest = hashlib.sha256("\n".join(case_ids).encode()).hexdigest()[:6]
    return f"{sweep.name}-{digest}"
