"""Records that another code, or another environment, measured than a run would use now."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.bench import environment as environments
from harness.cases import format as fmt
from harness.cases.source import changed_folders, source_files
from harness.source.history import differing_since
from harness.store.record import Record

CODE = {
    "kernels": "kernels",
    "models": "model code",
    "parallel": "schemes or strategies",
    "outside": "plugins",
    "harness": "measuring code",
}
"""Words for folders of the source, those that change a result most first."""

UNKNOWN = "unknown"
"""For records that do not say which code measured them, in a way that can be looked up here."""


@dataclass(kw_only=True, slots=True)
class Staleness:
    """The records of a request that differ from what a run would measure now."""

    reasons: dict[str, str] = field(default_factory=dict)
    """By case id, ``other kernels``, ``another driver``, ..., the gravest one; or unknown."""
    revisions: dict[str, str] = field(default_factory=dict)
    """By case id, the revision that measured it, as it is recorded."""
    lacking: set[str] = field(default_factory=set)
    """The cases that were measured with a library which this host does not have."""

    @property
    def stale(self) -> set[str]:
        """The cases that ``remeasure=stale`` measures again, whatever takes turns with them."""
        return {case_id for case_id, reason in self.reasons.items() if reason != UNKNOWN}

    @property
    def measurable(self) -> set[str]:
        """The stale cases whose libraries this host has."""
        return self.stale - self.lacking


def staleness_of(records: Iterable[Record], here: Mapping[str, Any] | None) -> Staleness:
    """Compare records with the code of this checkout, and with an environment.

    Args:
        here: from :func:`environment_here`; None where the cases run on other hosts.
    """
    found = Staleness()
    for record in records:
        reason = _other_code(record) or (_other_environment(record, here) if here else None)
        if reason is not None:
            found.reasons[record.case_id] = reason
            found.revisions[record.case_id] = str(record.environment.get("git_revision") or "")
        if here and _lacks_a_library(record):
            found.lacking.add(record.case_id)
    return found


def environment_here(device_name: str) -> dict[str, Any]:
    """What can be known of a worker's environment without starting one, or loading torch.

    Args:
        device_name: of the GPU that cases on CUDA run on; empty if there are none.
    """
    cpu_model = environments.cpu_model()
    return {
        "python": environments.python_version(),
        "torch": environments.version_of("torch"),
        "triton": environments.version_of("triton"),
        "cpu_model": cpu_model,
        "num_cpus": os.cpu_count(),
        "device_name": {"cpu": cpu_model, "cuda": device_name or None},
        "driver": environments.driver_version() if device_name else None,
        "variables": environments.variables(os.environ),
    }


def in_a_line(found: Staleness, num_peers: int = 0) -> str:
    """How many records differ and in what; empty if none does.

    Args:
        num_peers: the other cases that ``remeasure=stale`` measures in turns with them.
    """
    reasons = Counter(reason for reason in found.reasons.values() if reason != UNKNOWN)
    unknown = len(found.reasons) - sum(reasons.values())
    parts = [
        f"{number} with {reason}{_since(found, reason)}" for reason, number in reasons.most_common()
    ]
    if unknown:
        parts.append(f"{unknown} by code that is not known here")
    if not parts:
        return ""
    number, _, rest = parts[0].partition(" ")
    parts[0] = f"{number} recorded {rest}"
    if not reasons:
        return f"{parts[0]}; remeasure=all measures everything again"
    others = f", in turns with {fmt.counted(num_peers, 'other')}" if num_peers else ""
    return f"{', '.join(parts)}; remeasure=stale measures {_those(found)} again{others}"


def _those(found: Staleness) -> str:
    return "it" if len(found.stale) == 1 else f"those {len(found.stale)}"


def _since(found: Staleness, reason: str) -> str:
    """The revisions that measured records of other code: `` since 570eca7``."""
    if reason.removeprefix("other ") not in CODE.values():
        return ""
    revisions = Counter(
        found.revisions[case_id] for case_id, why in found.reasons.items() if why == reason
    )
    known = [revision for revision, _ in revisions.most_common() if revision]
    if not known:
        return ""
    more = f" and {fmt.counted(len(known) - 1, 'other revision')}" if len(known) > 1 else ""
    return f" since {known[0]}{more}"


def _other_code(record: Record) -> str | None:
    """``other kernels`` or its like if the code of a case has changed since its record."""
    if record.source:
        folders = changed_folders(record.source, record.case, record.notes)
    else:
        revision = str(record.environment.get("git_revision") or "")
        files = None
        if revision:
            files = differing_since(revision, source_files(record.case, record.notes))
        if files is None:
            return UNKNOWN
        if not files and revision.endswith("+"):
            return UNKNOWN
        folders = {file.rpartition("/")[0] for file in files}
    tops = {folder.partition("/")[0] for folder in folders}
    return next((f"other {words}" for top, words in CODE.items() if top in tops), None)


def _other_environment(record: Record, here: Mapping[str, Any]) -> str | None:
    """``another driver`` or its like if the environment differs, where both are known."""
    before = record.environment
    device = str(record.case.get("device"))
    wanted = {**here, "device_name": here["device_name"].get(device)}
    names = {
        "device_name": "device",
        "cpu_model": "CPU",
        "num_cpus": "number of CPUs",
        "driver": "driver",
        "torch": "torch",
        "triton": "Triton",
        "python": "Python",
    }
    for key, name in names.items():
        old, new = before.get(key), wanted.get(key)
        if old is not None and new is not None and not _same(old, new):
            return f"another {name} ({old}, now {new})"
    for library, old in (before.get("libraries") or {}).items():
        new = environments.version_of(library)
        if not _same(old, new):
            return f"another {library} ({old}, now {new or 'not installed'})"
    if "variables" in before and _threads(before["variables"]) != _threads(here["variables"]):
        return "other numbers of threads"
    return None


def _lacks_a_library(record: Record) -> bool:
    libraries = record.environment.get("libraries") or {}
    return any(environments.version_of(library) is None for library in libraries)


def _same(old: object, new: object) -> bool:
    """Whether a version is the same; 2.11.0+cu130 is 2.11.0 where one of them has no local part.

    A package's metadata may lack what the module itself says, as torch's from PyPI do.
    """
    if old == new or not (isinstance(old, str) and isinstance(new, str)):
        return old == new
    (old_public, _, old_local), (new_public, _, new_local) = old.partition("+"), new.partition("+")
    return old_public == new_public and not (old_local and new_local)


def _threads(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name.endswith("_NUM_THREADS")}
