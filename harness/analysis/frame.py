"""From records to a tidy frame: one row per case and phase, every derived number computed here.

Records keep samples and byte counts; medians, rates and utilisation exist only in this frame
and in what is built from it. A case that did not finish well keeps its rows, with the reason
and without any timing, so that no table can show a wrong result as a speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from harness.analysis.case_columns import CASE_COLUMNS, Reading
from harness.analysis.disturbance import in_order, of_record, of_samples
from harness.analysis.evidence import add_evidence
from harness.analysis.host_time import HOST_COLUMNS, host_time
from harness.analysis.machines import host_labels
from harness.analysis.names import Names
from harness.analysis.overtaken import overtaken_by
from harness.analysis.physics import RATES, WHOLES, impossible, roof_records, roofs_of
from harness.analysis.row_verdicts import add_run_levels
from harness.analysis.stats import by_round, latest_rank, round_ends, slowest_rank, summarise
from harness.cases.column import CaseColumn
from harness.cases.columns import POINTS
from harness.cases.plugins import MissingPlugin, choices_of, loaded_of, why_missing
from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS, task_type
from harness.store.record import Record
from kernels import BACKENDS
from kernels.caches import CACHES
from kernels.registry import Registry
from parallel import STRATEGIES


def build_frame(
    records: Iterable[Record],
    roofs: Iterable[Record] = (),
    *,
    later: Mapping[str, Record] | None = None,
) -> pd.DataFrame:
    """One row per case and phase, in the order of the records; units are in the column names.

    Args:
        roofs: further records, among which may be some that measured the device's roof.
        later: by case id, a newer attempt that gave no result; see
            :class:`harness.store.attempts.Records`.

    Raises MissingPlugin in one line where a plugin is missing that a case needs.
    """
    records = list(records)
    plugins = loaded_of(record.environment for record in records)
    if reason := why_missing(choices_of(record.case for record in records), plugins):
        raise MissingPlugin(reason)
    measured = roof_records(roofs)
    frame = _rows(records)
    roof = roofs_of(_rows(measured) if measured else frame)
    frame["impossible"] = impossible(frame, roof)
    frame.loc[frame["impossible"].map(bool).astype(bool), list(RATES)] = float("nan")
    frame["overtaken"] = [overtaken_by((later or {}).get(name)) for name in frame["case_id"]]
    return add_evidence(frame)


def _rows(records: Sequence[Record]) -> pd.DataFrame:
    """The frame with all rates."""
    cases = _cases(records)
    _place_strays(cases)
    cases["host"] = pd.Series(host_labels(cases["machine"].tolist()), dtype=object)
    phases = pd.DataFrame(
        [row for index, record in enumerate(records) for row in _phase_rows(index, record)],
        columns=[
            *("case_index", "phase", "clock", "samples_ms"),
            *("work_flops", "work_bytes", "work_tokens"),
            *HOST_COLUMNS,
        ],
    )
    case_index = phases.pop("case_index").to_numpy(dtype=int)
    frame = cases.take(case_index).reset_index(drop=True)
    frame = pd.concat([frame, phases], axis=1)
    frame["num_samples"] = frame["samples_ms"].map(len).astype(int)
    statistics = pd.DataFrame(summarise(frame["samples_ms"].tolist()))
    frame = pd.concat([frame, statistics], axis=1)
    frame = _add_rounds(frame, records, case_index)
    frame["disturbed"] = _disturbances(records, case_index, frame["samples_ms"].tolist())
    seconds = frame["median_ms"] / 1e3
    frame["tokens_per_s"] = frame["work_tokens"].astype(float) * frame["world_size"] / seconds
    flops = frame["work_flops"].astype(float)
    # An optimizer step is bound by memory and has no FLOPs worth counting: no rate, not zero.
    frame["tflops"] = flops.where(flops > 0) / seconds / 1e12
    frame["mfu"] = frame["tflops"] / frame["peak_tflops"]
    frame["flops_per_byte"] = flops.where(flops > 0) / frame["work_bytes"].astype(float)
    return frame


def _add_rounds(
    frame: pd.DataFrame, records: Sequence[Record], case_index: Iterable[int]
) -> pd.DataFrame:
    """The frame with the samples of each round, their processes, and the machine's level."""
    of_rows = [records[index] for index in case_index]
    rounds_ms = [
        by_round(samples, record.rounds)
        for samples, record in zip(frame["samples_ms"], of_rows, strict=True)
    ]
    processes = [
        [state.process for state in record.round_states]
        if len(record.round_states) == len(rounds)
        else []
        for record, rounds in zip(of_rows, rounds_ms, strict=True)
    ]
    columns = {"rounds_ms": rounds_ms, "round_processes": processes}
    series = {name: pd.Series(values, dtype=object) for name, values in columns.items()}
    ends = pd.DataFrame(map(round_ends, rounds_ms), columns=["low_ms", "high_ms"], dtype=float)
    series["low_ms"] = ends["low_ms"].fillna(frame["q1_ms"])
    series["high_ms"] = ends["high_ms"].fillna(frame["q3_ms"])
    return add_run_levels(frame.assign(**series))


def _disturbances(
    records: Sequence[Record], case_index: Iterable[int], series: Sequence[Sequence[float]]
) -> list[list[str]]:
    """What disturbed the samples of each row; nothing where it has none."""
    recorded = [of_record(record) for record in records]
    return [
        in_order([*recorded[index], *seen]) if samples else []
        for index, samples, seen in zip(case_index, series, of_samples(series), strict=True)
    ]


def _inner_phases(record: Record) -> tuple[set[str], int]:
    """The phases inside a whole one that several ranks were timed in, and whose times count.

    The times of one rank, the same for all phases, add up to the whole; the maximum over ranks of
    each phase does not, since a rank that is early in one phase waits in the next.
    """
    timed = {name: phase for name, phase in record.phases.items() if phase.samples_ms}
    whole = next((name for name in WHOLES if name in timed), None)
    if whole is None or len(timed[whole].samples_ms) == 1:
        return set(), 0
    parts = [timed[name].samples_ms for name in WHOLES[whole] if name in timed]
    ranks = len(timed[whole].samples_ms)
    if not parts or any(len(part) != ranks or not all(part) for part in parts):
        return set(), 0
    inner = {name for name, phase in timed.items() if len(phase.samples_ms) == ranks}
    return inner - {whole}, latest_rank(parts)


def _cases(records: Sequence[Record]) -> pd.DataFrame:
    """One row per record: the columns of every case, and those that its choices declare."""
    names = Names(records)
    readings = [Reading(record=record, names=names) for record in records]
    columns: dict[str, list[Any]] = {
        name: [read(reading) for reading in readings] for name, read in CASE_COLUMNS.items()
    }
    for column in declared_columns([record.case for record in records]):
        columns[column.name] = [column.read(record) for record in records]
    return pd.DataFrame(columns)


def declared_columns(cases: Iterable[dict[str, Any]]) -> list[CaseColumn]:
    """The columns of all tasks and profilers, and of the other choices that the cases made.

    ValueError where two declare the same name in different ways.
    """
    found: dict[str, CaseColumn] = {}
    for target in _declaring(list(cases)):
        for column in getattr(target, "columns", ()):
            if column.name in CASE_COLUMNS or found.setdefault(column.name, column) != column:
                raise ValueError(f"{target.__name__}: column {column.name!r} exists already")
            if column.point is not None:
                POINTS.declare(column.name, column.point)
    return list(found.values())


def _declaring(cases: Sequence[dict[str, Any]]) -> list[type]:
    targets: list[type] = [entry.target for entry in TASKS]
    targets += [entry.target for entry in PROFILERS]
    kinds: dict[str, Registry[Any]] = {
        "attention": BACKENDS,
        "parallel": STRATEGIES,
        "cache": CACHES,
    }
    for part, registry in kinds.items():
        used = {(case.get(part) or {}).get("name") for case in cases}
        targets += [registry[name].target for name in registry.names() if name in used]
    return targets


def _place_strays(cases: pd.DataFrame) -> None:
    """Name the device of cases that died before they could, where there is only one it can be."""
    for device, names in cases.groupby("device")["device_name"]:
        if names.nunique() == 1:
            cases.loc[cases["device"] == device, "device_name"] = names.dropna().iloc[0]


def _phase_rows(index: int, record: Record) -> list[tuple[Any, ...]]:
    task = task_type(record.case["task"]["name"])
    found = dict.fromkeys([*record.work, *record.phases])
    names = [name for name in task.phases if name in found]
    names += [name for name in found if name not in task.phases]
    rows = []
    inner, rank = _inner_phases(record)
    for name in names or [task.expected_phase]:
        phase = record.phases.get(name) if record.status == "ok" else None
        work = record.work.get(name) or {}
        samples = slowest_rank(phase.samples_ms) if phase and phase.samples_ms else []
        if samples and name in inner:
            samples = list(record.phases[name].samples_ms[rank])
        clock = phase.clock if phase else None
        formulas = (work.get("flops"), work.get("bytes"), work.get("tokens"))
        shares = host_time(phase, record.case["device"], record.rounds)
        rows.append(
            (
                index,
                name,
                clock,
                samples,
                *formulas,
                *(getattr(shares, column) for column in HOST_COLUMNS),
            )
        )
    return rows
