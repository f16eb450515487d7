"""The columns of a plan: keys of the command line whose values differ between its cases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.cases import format as fmt
from harness.cases.case import Case, options_of
from harness.request.config import CASE_VALUES, GROUPS, OPTIONAL_GROUPS
from harness.request.grid import Parts, default_config

_RANKS = ("parallel.dp", "parallel.cp", "parallel.tp")
"""Keys of the mesh axes, whose ranks are said even if a strategy has them by itself."""


def keys_of(cases: Sequence[Case]) -> tuple[dict[str, list[str]], str]:
    """Split the keys that ask for these cases into columns and one line.

    Returns the values of each key in which the cases differ, one a case, and the other keys as a
    command line has them. An option that a choice has by itself is left out.
    """
    usual = _UsualValues()
    options = [_options(case) for case in cases]
    asked = [_asked(found, usual) for found in options]
    columns: dict[str, list[str]] = {}
    same: list[str] = []
    for key in sorted(dict.fromkeys(key for keys in asked for key in keys), key=_place):
        nothing = "none" if key in OPTIONAL_GROUPS else None
        given = {_text(found[key]) for found in options if key in found}
        if len(given) > 1 or (nothing and any(key not in found for found in options)):
            columns[key] = [_text(found.get(key, nothing)) for found in options]
        else:
            same += [f"{key}={value}" for value in given]
    return columns, " ".join(same)


def in_blocks(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases of each task and number of passes, in the order of their first ones."""
    found: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        steps = [getattr(case.task, key, None) for key in ("warmup_steps", "measure_steps")]
        found.setdefault((case.task.name, *steps), []).append(case)
    return list(found.values())


def in_one_column(cases: Sequence[Case], columns: Iterable[str]) -> dict[str, list[str]]:
    """The columns as words of one, ``key=value`` for what each case was asked, if they are many."""
    usual = _UsualValues()
    rows = []
    for case in cases:
        options = _options(case)
        of_case = set(_asked(options, usual))
        asked = [key for key in columns if key in of_case]
        words = zip(headers_of(asked), asked, strict=True)
        rows.append(" ".join(f"{header}={_text(options[key])}" for header, key in words))
    return {"case": rows}


def numeric(values: Sequence[str]) -> bool:
    """Whether a column has numbers alone."""
    return all(value == fmt.ABSENT or value.replace(".", "", 1).isdigit() for value in values)


def headers_of(keys: Sequence[str]) -> list[str]:
    """Each key without its group, where no other one is called the same."""
    short = [key.rpartition(".")[2] for key in keys]
    return [name if short.count(name) == 1 else key for key, name in zip(keys, short, strict=True)]


def _options(case: Case) -> dict[str, Any]:
    """Every key that defines a case, and its value."""
    found: dict[str, Any] = {}
    for group in GROUPS:
        chosen = getattr(case, group, None)
        if chosen is None or (group == "attention" and not case.task.attends):
            continue
        values = options_of(chosen)
        # What has files without a name is called as its scope is.
        found[group] = values.pop("name", None) or values["scope"]
        found |= {f"{group}.{key}": value for key, value in values.items() if key != "scope"}
    return found | {key: getattr(case, key) for key in CASE_VALUES}


class _UsualValues:
    """The values that keys have by themselves, for the choices of the cases of one plan."""

    def __init__(self) -> None:
        self._parts = Parts()
        self._of_choices: dict[tuple[str, str], dict[str, Any]] = {}
        self.of_cases = {key: default_config()[key] for key in CASE_VALUES}

    def of_choice(self, group: str, name: str) -> dict[str, Any]:
        """The keys of a group and what its choice presets, made once for all cases that have it."""
        if (group, name) not in self._of_choices:
            made = options_of(self._parts.choice(group, {group: name}))
            self._of_choices[group, name] = {f"{group}.{key}": value for key, value in made.items()}
        return self._of_choices[group, name]


def _asked(options: dict[str, Any], usual_values: _UsualValues) -> list[str]:
    """The keys of a case that a command line has to name: choices, and what differs from them."""
    groups = [group for group in GROUPS if group in options]
    # Where there is attention, its length and batch are said even if they are the usual ones.
    said = ("seq_len", "batch_size") if "attention" in options else ()
    usual = {key: value for key, value in usual_values.of_cases.items() if key not in said}
    for group in groups:
        usual |= usual_values.of_choice(group, options[group])
    usual |= dict.fromkeys(_RANKS, 1)
    nothing = [group for group in groups if options[group] == "none"]
    return [key for key, value in options.items() if key not in nothing and value != usual.get(key)]


def _place(key: str) -> tuple[int, str]:
    """In the order of the groups, and the values of a case behind them."""
    group, _, option = key.partition(".")
    return (GROUPS.index(group) if group in GROUPS else len(GROUPS)), option


def _text(value: Any) -> str:
    if value is None:
        return fmt.ABSENT
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
