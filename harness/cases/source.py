"""The source that a case runs: what it measures, and what measures it.

The measured code is the files of the attention backend, of further backends that an option or a
note of the run names (a scheme's kernel, the choice of ``auto``), of the strategy, the cache and
the model, and all that they import from ``kernels``, ``models`` and ``parallel``. The measuring
code is the files of the task and the profiler, and what they import from the harness's folders
that run in a worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from harness.cases.profiler import PROFILERS
from harness.cases.task import TASKS
from harness.source import unchanged
from harness.source.hashes import files_of, hashes
from kernels.caches import CACHES
from parallel import BACKENDS, STRATEGIES

MEASURED = ("kernels", "models", "parallel")
MEASURING = ("harness/bench", "harness/measure", "harness/tasks", "harness/profilers")
_ON_ONE_DEVICE = ("kernels", "models")
_BY_TASKS = ("parallel/tensor", "parallel/collectives", "parallel/mesh", "parallel/streams")
"""What tasks themselves run of ``parallel``; the rest they leave to the scheme and the strategy."""
_MEASURING_PREFIX = "harness"

_NAMING_NOTES = ("attention_choice", "kernel")
"""Notes of a run that name the backend to which a choice left its calls."""

_FOR_HOPPER = "kernels/flash/hopper"
_FOR_ANY_GPU = "kernels/flash/any_gpu"
"""Kernels of calls that those for Hopper do not take; whoever imports one family imports both."""


def source_of(case: Mapping[str, Any], notes: Mapping[str, Any]) -> dict[str, str]:
    """A hash for each folder of the source that a case runs; see ``Record.source``.

    Args:
        case: as in a record; choices that are not registered here are left out.
        notes: of its run, if there was one.
    """
    return dict(_hashes_of(*_modules(case, notes), unchanged.options_of(case)))


def source_files(case: Mapping[str, Any], notes: Mapping[str, Any]) -> frozenset[str]:
    """The files that a case runs, relative to the checkout."""
    return _files_of(*_modules(case, notes))


def _modules(
    case: Mapping[str, Any], notes: Mapping[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The modules that register measured code and measuring code, and whether ranks meet."""
    several = _num_ranks(case) > 1
    measured = [
        *_backends(case, notes),
        CACHES.home(_chosen(case, "cache")),
        # On one rank a strategy does nothing.
        STRATEGIES.home(_chosen(case, "parallel")) if several else None,
    ]
    measuring = [TASKS.home(_chosen(case, "task")), PROFILERS.home(_chosen(case, "profile"))]
    return tuple(filter(None, measured)), tuple(filter(None, measuring)), several


@cache
def _hashes_of(
    measured: tuple[str, ...], measuring: tuple[str, ...], several: bool, options: frozenset[str]
) -> dict[str, str]:
    return hashes(_files_of(measured, measuring, several), options)


@cache
def _files_of(
    measured: tuple[str, ...], measuring: tuple[str, ...], several: bool
) -> frozenset[str]:
    run_by_tasks = (*MEASURING, *_ON_ONE_DEVICE, *(_BY_TASKS if several else ()))
    return files_of(measured, MEASURED if several else _ON_ONE_DEVICE) | files_of(
        (*measuring, "harness.bench.bench"), run_by_tasks
    )


def changed_folders(
    source: Mapping[str, str], case: Mapping[str, Any], notes: Mapping[str, Any]
) -> set[str]:
    """The folders of a record's ``source`` of which a case runs something else now."""
    now = source_of(case, notes)
    changed = {key for key in {*source, *now} if source.get(key) != now.get(key)}
    if _ran_hopper_alone(case, notes):
        changed -= {_FOR_ANY_GPU}
    if _ran_float32_alone(case, notes):
        changed -= {_FOR_HOPPER}
    return changed


def _ran_hopper_alone(case: Mapping[str, Any], notes: Mapping[str, Any]) -> bool:
    """Whether a run launched kernels for Hopper and none of those for any GPU.

    Those of the compiled autograd node that did not note where tiles come from, as a run that
    launches the others does. A scheme notes nothing of the kernel that it calls.
    """
    is_scheme = bool((case.get("attention") or {}).get("kernel"))
    return notes.get("autograd") == "native" and "tiles" not in notes and not is_scheme


def _ran_float32_alone(case: Mapping[str, Any], notes: Mapping[str, Any]) -> bool:
    """Whether a run launched kernels in float32, which those for Hopper refuse, and no others."""
    precision = case.get("precision") or {}
    is_float32 = precision.get("parameters") == "float32" and not precision.get("autocast")
    return is_float32 and "float32_precision" in notes


def is_of_other_code(
    source: Mapping[str, str], case: Mapping[str, Any], notes: Mapping[str, Any]
) -> bool:
    """Whether what a case measured has changed since; not known, and no, without its hashes."""
    return bool(source) and any(map(is_measured, changed_folders(source, case, notes)))


def is_measured(folder: str) -> bool:
    """Whether a folder of :func:`source_of` holds measured code, rather than measuring code."""
    return not folder.startswith(_MEASURING_PREFIX)


def _chosen(case: Mapping[str, Any], part: str) -> str:
    return str((case.get(part) or {}).get("name"))


def _backends(case: Mapping[str, Any], notes: Mapping[str, Any]) -> list[str | None]:
    """The module of every backend that the case's options and the run's notes name."""
    named = [
        value
        for part in (case.get("attention") or {}, case.get("task") or {})
        for key, value in part.items()
        if key in ("name", "kernel") or key.endswith("attention")
    ]
    named += [notes.get(note) for note in _NAMING_NOTES]
    words = [word for value in named for word in re.findall(r"[\w-]+", str(value))]
    return [BACKENDS.home(word) for word in dict.fromkeys(words)]


def _num_ranks(case: Mapping[str, Any]) -> int:
    options = [*(case.get("parallel") or {}).items(), *(case.get("task") or {}).items()]
    sizes = [size for key, size in options if key in ("dp", "cp", "tp", "ranks")]
    return max((size for size in sizes if isinstance(size, int)), default=1)
