"""Names of models, backends, precisions and strategies, as short as tells them apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from harness.cases.case import label
from harness.cases.task import task_type
from harness.store.record import Record
from kernels import BACKENDS
from kernels.problem import MASKS
from parallel import STRATEGIES

ALWAYS = ("tp", "shard_group")
"""Options of a strategy that its name shows even where all records agree, if they are set: nothing
else in a row tells that weights are split, or held in several copies."""


class Names:
    """Names of models, backends, precisions and strategies in tables.

    The configured name alone where it is unambiguous among the records; where one name covers
    several configurations, the fields that differ are appended.
    """

    def __init__(self, records: Sequence[Record]) -> None:
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
        """The name without options of a mask, which have columns of their own."""
        values = {key: value for key, value in values.items() if key not in MASKS}
        key = _key(values)
        if key not in self._attention:
            self._attention[key] = _attention_label(values)
        return self._attention[key]

    def world_size(self, record: Record) -> int:
        values, task = record.case["parallel"], record.case["task"]
        if (option := task_type(task["name"]).ranks_option) is not None:
            return int(task[option])
        key = _key(values)
        if key not in self._world_size:
            try:
                self._world_size[key] = STRATEGIES[values["name"]].target(**values).world_size
            except (ValueError, TypeError):
                # This version no longer has the strategy: its record says how many ranks it had.
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
    """A strategy without its ranks, which have their own column, unless they are on two axes.

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
            if field in ALWAYS or any(peer.get(field) != values[field] for peer in peers)
        ]
        # An option that is not set is left out, beside those where it is.
        given = [field for field in differing if values.get(field) is not None]
        options = ", ".join(f"{field}={values[field]}" for field in given)
        names[key] = f"{values['name']}({options})" if options else values["name"]
    return names
