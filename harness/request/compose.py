"""From a command line to typed cases: Hydra's grammar and groups, composed once per choice.

Every command is a sweep. Hydra would compose each point anew, at about 50 ms a point; here
each choice of each group is composed once, values are set on the typed result, and points are
combined from those parts, so that a thousand points take a second. Nothing starts before every
point has been validated; what is wrong is a ValueError in one line that names the key.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cases.case import Case, require_at_least, require_choice
from harness.cases.sweep import AD_HOC, Sweep, load_sweep
from harness.paths import CONF
from harness.request.config import (
    CASE_VALUES,
    GROUPS,
    OPTIONAL_GROUPS,
    RUN_KEYS,
    Config,
    choices,
    registered_choices,
)
from harness.request.config_store import fill_config_store
from harness.run.launcher import Launcher
from harness.run.options import RunOptions
from parallel.strategies.strategy import AXES_BY_NAME

Axes = dict[str, list[Any]]
"""The values of each key that a grid combines."""


@dataclass(kw_only=True, slots=True)
class Request:
    """What a command asks for, complete and valid."""

    cases: list[Case]
    options: RunOptions
    launcher: Launcher
    sweep: Sweep
    scale: str
    label: str
    """Folder of this command's tables: the sweep's name, and a hash if keys were changed."""
    command: str
    plan: bool


def compose_request(arguments: Sequence[str]) -> Request:
    """Parse, compose and validate a command line (without flags)."""
    typed = _parse(arguments)
    names = typed.pop("sweeps", [None])
    if len(names) != 1:
        raise ValueError("sweeps: name one sweep at a time")
    sweep = AD_HOC if names[0] is None else load_sweep(str(names[0]))
    run = _run_values({key: typed.pop(key) for key in list(typed) if key in RUN_KEYS})
    launcher = _launcher({key: typed.pop(key) for key in list(typed) if _group(key) == "launcher"})
    for key in typed:
        _require_key(key)

    device = launcher.resolve_device(run["device"])
    scale = run["scale"]
    require_choice("scale", scale, ["auto", *sweep.scales])
    if scale == "auto":
        scale = "full" if device == "cuda" or "tiny" not in sweep.scales else "tiny"
    cases = _expand(sweep.scales[scale], typed, device)
    launcher.validate(cases)
    _require_rendering(sweep)
    options = RunOptions(
        results=Path(run["results"]),
        timeout_s=run["timeout_s"],
        isolate=run["isolate"] or sweep.isolate,
        retry=run["retry"],
        interleave=_rounds(cases, run["interleave"], sweep.interleave),
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
        label=_label(sweep, typed, cases),
        command=shlex.join(["attnbench", *arguments]),
        plan=run["plan"],
    )


def _rounds(cases: list[Case], wanted: int, of_sweep: int) -> int:
    """How many rounds to measure in: the sweep's or more, and no more than cases have passes."""
    passes = [case.task.measure_steps for case in cases if hasattr(case.task, "measure_steps")]
    fewest = min(passes, default=wanted)
    if wanted > fewest:
        raise ValueError(
            f"interleave={wanted}: splits the measured passes of a case into as many rounds, and "
            f"task.measure_steps={fewest}; must be at most that"
        )
    return max(wanted, min(of_sweep, fewest))


def _require_rendering(sweep: Sweep) -> None:
    """Raise ValueError for a table or figure that nobody makes, before hours of measuring."""
    from harness.render.figure import FIGURES
    from harness.render.table import TABLES

    for registry, names in ((TABLES, sweep.tables), (FIGURES, sweep.figures)):
        for name in names:
            if name not in registry:
                raise ValueError(
                    f"sweeps={sweep.name}: {registry.group}s: {name}: no such {registry.group}, "
                    f"one of {', '.join(registry.names())}"
                )


def _parse(arguments: Sequence[str]) -> Axes:
    """Values of each key, in Hydra's grammar: lists, ranges, quotes and globs included."""
    parser = OverridesParser.create()
    axes: Axes = {}
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            raise ValueError(f"{argument}: write KEY=VALUE or KEY=VALUE,VALUE") from error
        if override.type != OverrideType.CHANGE:
            raise ValueError(f"{argument}: keys can be set, not added or removed; write KEY=VALUE")
        key = override.key_or_group
        if _group(key) == "hydra":
            raise ValueError(f"{key}: Hydra only composes here; its own settings have no effect")
        if key in axes:
            raise ValueError(f"{key}: given twice; separate several values by commas")
        axes[key] = list(_values(override, parser))
    return axes


def _values(override: Override, parser: OverridesParser) -> Iterator[Any]:
    key = override.key_or_group
    if not override.is_sweep_override():
        yield override.value()
        return
    if override.is_interval_sweep():
        raise ValueError(f"{key}: an interval has no list of values; give values or a range(...)")
    value = override.value()
    if isinstance(value, Glob):
        if key not in GROUPS:
            raise ValueError(f"{key}: glob(...) matches choices, and {key} is a value")
        matches = value.filter(choices(key))
        if not matches:
            raise ValueError(f"{key}: the glob matches none of {', '.join(choices(key))}")
        yield from matches
        return
    for text in override.sweep_string_iterator():
        yield parser.parse_override(f"{key}={text}").value()


def _run_values(axes: Axes) -> dict[str, Any]:
    """The keys that say how to run, typed, with defaults filled in."""
    config = _defaults().copy()
    for key, values in axes.items():
        if len(values) != 1:
            raise ValueError(f"{key}: takes one value, it says how to run and not what to measure")
        _set(config, key, values[0], key)
    run = {key: config[key] for key in RUN_KEYS}
    if run["timeout_s"] <= 0:
        raise ValueError(f"timeout_s={run['timeout_s']:g}: must be positive")
    require_at_least("interleave", run["interleave"], 1)
    require_choice("device", run["device"], ("auto", "cpu", "cuda"))
    return run


def _launcher(axes: Axes) -> Launcher:
    point = {"launcher": "local"} | {key: values[0] for key, values in axes.items()}
    for key, values in axes.items():
        if len(values) != 1:
            raise ValueError(f"{key}: takes one value, it says how to run and not what to measure")
    return cast(Launcher, _Parts().choice("launcher", point))


def _expand(grids: list[dict[str, Any]], typed: Axes, device: str) -> list[Case]:
    """Every case of every grid, once, with the keys that the user typed in place of the grid's."""
    parts = _Parts()
    cases: dict[str, Case] = {}
    unused = set(typed)
    for grid in grids:
        axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
        for key in axes:
            _require_key(key)
        axes |= _applicable(typed, axes)
        unused -= set(axes)
        for combination in itertools.product(*axes.values()):
            point = dict(zip(axes, combination, strict=True))
            case = parts.case(point, device)
            cases.setdefault(case.id, case)
    if unused:
        key = sorted(unused)[0]
        raise ValueError(f"{key}: the chosen task has no use for it; leave it out")
    if not cases:
        raise ValueError("no case is left: a key has an empty list of values")
    return list(cases.values())


def _applicable(typed: Axes, axes: Axes) -> Axes:
    """The typed keys that mean something to a grid: one of attention has no model to change."""
    tasks = typed.get("task") or axes.get("task") or [_default_choice("task")]
    from harness.cases.task import TASKS

    uses = frozenset().union(*(TASKS[str(name)].target.uses for name in tasks))
    return {
        key: values
        for key, values in typed.items()
        if _group(key) not in OPTIONAL_GROUPS or _group(key) in uses
    }


class _Parts:
    """Typed objects of group choices, each made once and shared by the cases that use it."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def case(self, point: dict[str, Any], device: str) -> Case:
        """One case. Raises ValueError that names the key for anything that cannot be."""
        values = dict(self._case_values({key: point[key] for key in CASE_VALUES if key in point}))
        groups = [group for group in GROUPS if group != "launcher"]
        return Case(
            **{group: self.choice(group, point) for group in groups}, **values, device=device
        )

    def choice(self, group: str, point: dict[str, Any]) -> Any:
        """The object of one group: its choice, with the point's values of its keys."""
        name = str(point.get(group, _default_choice(group)))
        changes = {key: value for key, value in point.items() if key.startswith(f"{group}.")}
        made = (group, name, *sorted((key, repr(value)) for key, value in changes.items()))
        if made not in self._made:
            node = _group_node(group, name).copy()
            for key, value in changes.items():
                if key == f"{group}.name" and group in registered_choices():
                    raise ValueError(f"{key}: chosen with {group}={value}")
                _set(node, key.removeprefix(f"{group}."), value, key)
            self._made[made] = _to_object(node, f"{group}={name}")
        return self._made[made]

    def _case_values(self, changes: dict[str, Any]) -> dict[str, Any]:
        made = ("values", *((key, repr(value)) for key, value in changes.items()))
        if made not in self._made:
            config = _defaults().copy()
            for key, value in changes.items():
                _set(config, key, value, key)
            self._made[made] = {key: config[key] for key in CASE_VALUES}
        return cast(dict[str, Any], self._made[made])


@cache
def _defaults() -> DictConfig:
    return _compose([])


@cache
def _default_choice(group: str) -> str:
    entries = cast(DictConfig, OmegaConf.load(CONF / "config.yaml"))["defaults"]
    return next(str(entry[group]) for entry in entries if group in entry)


@cache
def _group_node(group: str, name: str) -> DictConfig:
    """A choice as Hydra composes it, which Hydra is asked for only where it reads a file."""
    require_choice_of_group(group, name)
    if name == _default_choice(group):
        return cast(DictConfig, _defaults()[group])
    registered = registered_choices().get(group, {})
    if name in registered and not (CONF / group / f"{name}.yaml").exists():
        return cast(DictConfig, OmegaConf.structured(registered[name]))
    return cast(DictConfig, _compose([f"{group}={name}"])[group])


def require_choice_of_group(group: str, name: str) -> None:
    """Raise ValueError that lists a group's choices unless ``name`` is one."""
    known = choices(group)
    if group == "parallel" and name in AXES_BY_NAME and name not in known:
        axis = AXES_BY_NAME[name]
        raise ValueError(f"parallel={name}: a mesh axis of every choice; write parallel.{axis}=2")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{group}={name}: no such choice, one of {', '.join(known)}{hint}")


def _compose(overrides: list[str]) -> DictConfig:
    fill_config_store()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name="config", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        where = overrides[0] if overrides else "config.yaml"
        raise ValueError(f"conf: {where}: {_first_line(error)}") from error


def _set(config: DictConfig, key: str, value: Any, full_key: str) -> None:
    """Set a typed value; ValueError names the full key, and the closest one for a typo."""
    if key not in config:
        known = [str(name) for name in config]
        raise ValueError(_no_such_key(full_key, known))
    try:
        OmegaConf.update(config, key, value, merge=False)
    except OmegaConfBaseException as error:
        raise ValueError(f"{full_key}={value}: {_first_line(error)}") from error


def _require_key(key: str) -> None:
    """Raise ValueError unless the key is one that a case has (a group's own keys come later)."""
    if _group(key) in GROUPS or key in CASE_VALUES:
        return
    known = [item.name for item in fields(Config)] + ["sweeps"]
    if key in RUN_KEYS:
        raise ValueError(f"{key}: says how to run; give it on the command line, not in a grid")
    raise ValueError(_no_such_key(key, known))


def _no_such_key(key: str, known: list[str]) -> str:
    prefix, _, last = key.rpartition(".")
    close = difflib.get_close_matches(last, known, n=1)
    if close:
        suggestion = f"did you mean {prefix + '.' if prefix else ''}{close[0]}?"
    else:
        suggestion = f"known are {', '.join(name for name in known if name != 'name')}"
    return f"{key}: no such key; {suggestion}"


def _to_object(node: DictConfig, where: str) -> Any:
    try:
        return OmegaConf.to_object(node)
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {_first_line(error)}") from error


def _group(key: str) -> str:
    return key.split(".", 1)[0]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _label(sweep: Sweep, typed: Axes, cases: list[Case]) -> str:
    if not typed:
        return sweep.name
    digest = hashlib.sha256("\n".join(case.id for case in cases).encode()).hexdigest()[:6]
    return f"{sweep.name}-{digest}"
