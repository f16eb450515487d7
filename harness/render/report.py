"""The report of a sweep: its tables and figures, how they were measured, and what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from harness import escapes
from harness.analysis.case_columns import GIB
from harness.analysis.predictions import has_baseline
from harness.cases import format as fmt
from harness.cases.hardware import find_hardware
from harness.cases.source import changed_folders, is_measured, is_of_other_code
from harness.cases.task import TASKS
from harness.escapes import printable
from harness.render.predicted_memory import summarise
from harness.render.table import Table
from harness.statuses import STATUSES
from harness.store.attempts import Records
from harness.store.record import Record
from harness.store.sweep_plan import SweepPlan

ROWS_IN_REPORT = 100
"""Longer tables are cut in the report and complete in their own files."""

_ENVIRONMENT = {
    "host": "host",
    "device_name": "device",
    "gpu_uuid": "GPU",
    "device_memory_bytes": "device memory (GiB)",
    "cpu_model": "CPU",
    "num_cpus": "CPUs",
    "num_threads": "threads of torch",
    "host_memory_bytes": "host memory (GiB)",
    "platform": "platform",
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "driver": "driver",
    "attnbench": "attnbench",
    "git_revision": "git revision",
}


@dataclass(kw_only=True, slots=True, frozen=True)
class DrawnFigure:
    """A figure that was written beside the report."""

    name: str
    caption: str


def write_report(
    *,
    plan: SweepPlan,
    records: Sequence[Record],
    tables: Sequence[tuple[Table, Callable[[Table, int], str]]],
    figures: Sequence[DrawnFigure],
    missing: Sequence[str],
    problems: Sequence[str],
    attempts: Records,
) -> str:
    """The report as Markdown; links are relative to the sweep's folder."""
    return template("report.md.j2").render(
        plan=plan,
        counts=counts_of(records, missing),
        started=_started(records),
        provenance=provenance_of(records),
        tables=[
            {
                "name": table.name,
                "markdown": to_markdown(table, ROWS_IN_REPORT),
                "more": max(0, len(table.rows) - ROWS_IN_REPORT),
            }
            for table, to_markdown in tables
        ],
        figures=figures,
        failures=failures_of(records),
        attempts=attempts_of(records, attempts),
        missing=missing,
        problems=problems,
        predictions=summarise(records),
        environment=environment_of(records),
        **measurement_facts(records),
    )


def template(name: str, *, package: str = "harness.render", autoescape: bool = False) -> Template:
    """A template of a package; a name that it uses and is not given is an error."""
    environment = Environment(
        loader=PackageLoader(package),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=autoescape,
    )
    environment.filters |= {
        "md": escapes.markdown,
        "code": escapes.code,
        "safe_lines": lambda text: "\n".join(map(escapes.markdown, text.split("\n"))),
    }
    return environment.get_template(name)


def measurement_facts(records: Sequence[Record]) -> dict[str, set[Any]]:
    """Facts that the description of the method depends on."""
    names = {record.case["task"]["name"] for record in records}
    counted = {name for name in names if name in TASKS and not TASKS[name].target.measures}
    return {
        "counted": counted,
        "measured": names - counted,
        "clocks": {phase.clock for record in records for phase in record.phases.values()},
        "memory_sources": {rank.get("source") for record in records for rank in record.memory},
        "in_a_row": {
            bool(record.notes.get("in_a_row"))
            for record in records
            if "step" in record.phases and len(record.phases["step"].samples_ms) > 1
        },
        "checked_whole": {"limits" in record.check for record in records if record.check},
        "baselines": {
            has_baseline(record)
            for record in records
            if any(rank.get("source") == "cuda" for rank in record.memory)
        },
    }


def counts_of(records: Sequence[Record], missing: Sequence[str]) -> str:
    found = Counter(record.status for record in records)
    words = [
        f"{found[status]} {fmt.STATUS_WORDS.get(status, status)}"
        for status in STATUSES
        if found[status]
    ]
    words += [f"{len(missing)} not measured"] if missing else []
    total = len(records) + len(missing)
    return f"{total} {'case' if total == 1 else 'cases'}: {', '.join(words)}."


def provenance_of(records: Sequence[Record]) -> list[str]:
    """Sentences on the code that measured: where it is not known, is stated, or is not of now."""
    found = []
    if unhashed := sum(not record.source for record in records):
        found.append(
            f"{unhashed} of {len(records)} were recorded before the source that runs was hashed: "
            "nothing here says whether it has changed since."
        )
    measuring = sum(
        any(not is_measured(folder) for folder in changed)
        for record in records
        if record.source and (changed := changed_folders(record.source, record.case, record.notes))
    )
    if measuring:
        found.append(
            f"{measuring} of {len(records)} were measured by other measuring code than now."
        )
    dirty = [
        record
        for record in records
        if str(record.environment.get("git_revision") or "").endswith("+")
    ]
    if dirty:
        alike = sum(_runs_code_of_now(record) for record in dirty)
        found.append(
            f"{len(dirty)} of {len(records)} were measured in a tree with changes to the commit "
            f"that is named (+), such as a copy without the later history; by the hashes of its "
            f"source, what {alike} of them measured is the code of now."
        )
    stated = {
        str(record.environment.get("git_revision"))
        for record in records
        if record.environment.get("revision_stated")
    }
    if stated:
        words = ", ".join(sorted(stated))
        found.append(f"Revisions that were stated for a copy without history: {words}.")
    return found


def failures_of(records: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Case, status and reason of what has no number; unsupported cases of one reason together.

    These may be hundreds, and their logs say no more than the reason.
    """
    alike: dict[str, list[Record]] = {}
    for record in records:
        if record.status != "ok":
            reason = reason_of(record)
            key = reason if record.status == "unsupported" else record.case_id
            alike.setdefault(key, []).append(record)
    return [
        (_case_or_cases(found), fmt.STATUS_WORDS[found[0].status], reason_of(found[0]))
        for found in alike.values()
    ]


def _case_or_cases(records: Sequence[Record]) -> str:
    if len(records) == 1:
        return records[0].case_id
    # A case that calls no attention has a choice of it all the same.
    attending = [record for record in records if _attends(record.case["task"]["name"])]
    backends = sorted({record.case["attention"]["name"] for record in attending})
    return ": ".join(filter(None, (f"{len(records)} cases", ", ".join(backends))))


def _attends(task: str) -> bool:
    return task in TASKS and TASKS[task].target.attends


def attempts_of(records: Sequence[Record], attempts: Records) -> list[tuple[str, str, str]]:
    """Case, the attempt that counts, and one that does not: where that is not the older of two."""
    found = []
    for record in records:
        counts = (record.case_id, _attempt(record))
        if later := attempts.later.get(record.case_id):
            found.append((*counts, f"{_attempt(later)}: {reason_of(later)}"))
        if before := attempts.withdrawn.get(record.case_id):
            found.append((*counts, f"{_attempt(before)}: its times are withdrawn"))
    return found


def _attempt(record: Record) -> str:
    """``2, failed, by 0123abc on gpu7``: its number, how it ended, by which code and where."""
    words = f"{record.attempt}, {fmt.STATUS_WORDS.get(record.status, record.status)}"
    if revision := record.environment.get("git_revision"):
        words += f", by {revision}"
    if host := record.environment.get("host"):
        words += f" on {host}"
    return words


def _runs_code_of_now(record: Record) -> bool:
    is_other = is_of_other_code(record.source, record.case, record.notes)
    return bool(record.source) and not is_other


def _started(records: Sequence[Record]) -> str:
    moments = sorted(record.started_at for record in records if record.started_at)
    if not moments:
        return ""
    first, last = (moment[:16].replace("T", " ") for moment in (moments[0], moments[-1]))
    return first if first == last else f"from {first} to {last}"


def reason_of(record: Record) -> str:
    message = printable((record.error or {}).get("message") or "")
    return " ".join(message.split()) or fmt.ABSENT


def environment_of(records: Sequence[Record]) -> list[tuple[str, str]]:
    rows = []
    for key, name in _ENVIRONMENT.items():
        values = {record.environment[key] for record in records if record.environment.get(key)}
        if values:
            words = [
                f"{value / GIB:.1f}" if key.endswith("_bytes") else str(value) for value in values
            ]
            rows.append((name, "; ".join(sorted(set(words)))))
    devices = sorted({str(record.environment.get("device_name")) for record in records})
    for hardware in filter(None, map(find_hardware, devices)):
        peaks = ", ".join(f"{name} {peak:g}" for name, peak in hardware.peak_tflops.items())
        rows.append(
            (f"dense peak of {hardware.name} (TFLOP/s)", f"{peaks}; from {hardware.source}")
        )
    return rows
