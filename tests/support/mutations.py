"""Strange records and plans: committed ones with a field replaced, dropped or added."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.paths import ROOT
from harness.store.record import RecordStore

RESULTS = ROOT / "results"


def nested(depth: int, kind: list[Any] | dict[str, Any]) -> Any:
    """A list or an object inside another, so many deep."""
    value: Any = None
    for _ in range(depth):
        value = [value] if isinstance(kind, list) else {"a": value}
    return value


STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -2.5, 10**25, 2**63, 1e308, float("nan"), float("inf")),
    *("", "x", "NaN", "-Infinity", "\udc80", "=1+1", "<script>", "\x1b[2J", "../../x", "a|b\nc"),
    *([], [0], [None], [[]], [[-1.0]], ["x"], [[1.0], [1.0, 2.0]], [{}], [[[{}]]]),
    *(10**400, "x" * 100_000, "\ud800", nested(200, []), nested(200, {})),
    *({}, {"": None}, {"name": 1}, {"name": "naive"}, {"x": [1, {"y": []}]}),
)
"""Values of every JSON type, among them those that readers are least prepared for."""

Path_ = tuple[str | int, ...]


def paths(value: Any, depth: int = 5, here: Path_ = ()) -> Iterator[Path_]:
    """The places in a JSON value, of lists the first and the last element."""
    if here:
        yield here
    if depth == 0:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from paths(item, depth - 1, (*here, key))
    elif isinstance(value, list) and value:
        for place in sorted({0, len(value) - 1}):
            yield from paths(value[place], depth - 1, (*here, place))


def changed(value: Any, path: Path_, how: str, strange: Any) -> Any:
    """A copy of a JSON value that is ``replaced``, ``dropped`` or ``added`` to at a place."""
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if how == "replaced":
        inner[path[-1]] = copy.deepcopy(strange)
    elif how == "dropped":
        del inner[path[-1]]
    elif isinstance(inner, dict):
        inner[f"{path[-1]}_more"] = copy.deepcopy(strange)
    else:
        inner.append(copy.deepcopy(strange))
    return found


def examples() -> list[dict[str, Any]]:
    """The smallest committed record of each task and of each set of notes."""
    chosen: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
    for name in ("h200", "h200-autograd", "cpu-2core"):
        store = RecordStore(RESULTS / name)
        for file, archived in store.names().items():
            data = archived or (store.folder / file).read_bytes()
            values = json.loads(data)
            kind = (
                values["case"]["task"]["name"],
                values["status"] == "ok",
                bool(values.get("round_states")),
                *sorted(set(values["notes"]) & _TELLING),
            )
            if kind not in chosen or len(data) < chosen[kind][0]:
                chosen[kind] = (len(data), values)
    return [values for _, values in chosen.values()]


_TELLING = {"kernel_profile", "memory_profile", "timeline", "traffic", "audit", "balance"}


def write_folder(
    results: Path,
    records: Sequence[dict[str, Any]],
    *,
    plan: dict[str, Any],
    names: Sequence[str] | None = None,
) -> None:
    """A results folder of these records, under their own ids unless names are given."""
    folder = results / "records"
    folder.mkdir(parents=True, exist_ok=True)
    for place, values in enumerate(records):
        name = names[place] if names else values["case_id"]
        (folder / f"{name}.json").write_text(json.dumps(values), encoding="utf-8")
    sweep = results / "sweeps" / "all"
    sweep.mkdir(parents=True, exist_ok=True)
    (sweep / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def plan_of(
    records: Sequence[dict[str, Any]], tables: Sequence[str], figures: Sequence[str] = ()
) -> dict[str, Any]:
    """A plan of all of these records."""
    return {
        "schema": 1,
        "label": "all",
        "name": "all",
        "title": "All",
        "about": "All of them.",
        "command": "attnbench label=all",
        "scale": "full",
        "tables": list(tables),
        "figures": list(figures),
        "case_ids": [values["case_id"] for values in records],
        "plugins": {},
    }
