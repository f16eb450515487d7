"""Sweep plans: ``sweeps/LABEL/plan.json`` lists a sweep's cases, tables, figures and command."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import msgspec

from harness.escapes import printable
from harness.store import atomic
from harness.store.codec import decode, encode
from harness.store.regular import read_regular

SCHEMA = 1


class PlanError(ValueError):
    """A sweep that cannot be rendered; the message is one line that names the file."""


class SweepPlan(msgspec.Struct, kw_only=True):
    """The plan of a sweep: everything needed, beside its records, to make its tables again."""

    schema: int = SCHEMA
    label: str
    """The folder under ``sweeps``."""
    name: str
    title: str
    about: str
    command: str
    scale: str
    tables: list[str]
    figures: list[str]
    case_ids: list[str]
    plugins: dict[str, list[str]] = {}
    """Module and file of each choice, table and figure that a plugin registered."""


def planned_labels(results: Path) -> list[str]:
    """The sweeps of a results folder, sorted: those of which a plan lies there, or its like."""
    try:
        folders = os.listdir(results / "sweeps")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(label for label in folders if os.path.lexists(_path(results, label)))


def write_plan(results: Path, plan: SweepPlan) -> None:
    """Write a plan beside the tables that will be made from it."""
    path = _path(results, plan.label)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(path, encode(plan, indent=1) + b"\n")


def read_plan(results: Path, label: str) -> SweepPlan:
    """The plan of a sweep; PlanError if there is none that can be read."""
    path = _path(results, label)
    try:
        plan = decode(read_regular(path)[0], SweepPlan, schema=SCHEMA)
        _require_names(plan, label)
        # A case that is listed twice is one row all the same.
        plan.case_ids = list(dict.fromkeys(plan.case_ids))
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "empty").splitlines()[0]
        raise PlanError(printable(f"{path}: not a readable plan ({reason})")) from error
    return plan


def _require_names(plan: SweepPlan, label: str) -> None:
    """Raise ValueError where a plan names what is not its own, or no table can be called."""
    if plan.label != label:
        raise ValueError(f"label {plan.label[:100]}: the folder's name is {label}")
    names = [*plan.tables, *plan.figures]
    if bad := next((name for name in names if not _NAME.fullmatch(name)), None):
        raise ValueError(f"{bad[:100]!r} is no table's or figure's name")
    if not all(plan.case_ids):
        raise ValueError("a case id is empty")
    if bad := next((key for key, home in plan.plugins.items() if len(home) != 2), None):
        raise ValueError(f"plugins.{bad[:100]}: a module and a file")
    try:
        shlex.split(plan.command)
    except ValueError as error:
        raise ValueError(f"command: {error}") from error


_NAME = re.compile(r"[\w.-]{1,100}")


def _path(results: Path, label: str) -> Path:
    return results / "sweeps" / label / "plan.json"


_PLAIN = re.compile(r"[\w./%+@:~-]+")
"""A value that Hydra's grammar takes without quotes."""


def command_into(command: str, results: Path, **keys: str) -> str:
    """A plan's command so that it continues in ``results``, with further keys set.

    A command may leave ``results=`` out, or name a folder that was renamed or copied since.
    """
    values = {"results": _quoted(str(results)), **keys}
    words = []
    for word in shlex.split(command):
        key = word.partition("=")[0]
        words.append(f"{key}={values.pop(key)}" if key in values else word)
    return shlex.join([*words, *(f"{key}={value}" for key, value in values.items())])


def _quoted(value: str) -> str:
    if _PLAIN.fullmatch(value):
        return value
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"
