"""``attnbench backends``: what each attention backend can do on this machine, and why not.

Nothing is listed by hand: a backend is asked whether it supports a small problem, and then the
same problem with one thing changed at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from harness.cases import format as fmt
from harness.printing import warn
from harness.terminal import PrintableConsole
from kernels import Attention, AttentionBackend, AttentionProblem, DenseAttention
from kernels.decoding import DecodeProblem
from parallel import BACKENDS
from parallel.context.attention import ContextParallelAttention, SequenceParallelAttention
from parallel.context.heads.nested import SplitsGroups
from parallel.context.heads.split import SplitsHeads

USAGE = "attnbench backends [device=auto|cpu|cuda]"

HELP = f"""\
Usage: {USAGE}

Lists every attention backend for one device with its library's version, whether it is usable on
this machine (forward: without gradients; decode: from a cache only), and if not why. For those
that are:
  grouped    fewer heads of keys and values than of queries
  packed     sequences of different lengths end to end: natively, or in a loop
  S_q≠S_k    a causal mask with more keys than queries (S_k>S_q), or any number of them
  ring       gives the log-sum-exp, so that it can run on a sequence over many devices
  head_dim   which widths of a head it takes; 8-256 by 8 are the multiples of 8 from 8 to 256
Then the caches that they attend from, with task=decode; the options of masks that they take here,
attention.window=, prefix_len=, softcap= and sinks=; those that take values narrower than keys, such
as 128 columns beside 192; and the schemes that split a sequence over several ranks.
"""

DEVICES = ("auto", "cpu", "cuda")

HEAD_DIMS = (1, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 512, 1024)

EACH_MASK: dict[str, float] = {"window": 100, "prefix_len": 100, "softcap": 30.0, "sinks": True}
"""A value of each of ``kernels.problem.MASKS``, to ask a backend about."""

YES, NO, UNKNOWN = "yes", "no", fmt.ABSENT


@dataclass(kw_only=True, slots=True, frozen=True)
class Features:
    """One row: the features of a backend, as text."""

    name: str
    version: str
    usable: str
    """``yes``, ``forward`` where it has no gradients here, ``decode`` where it attends from a cache
    and nothing else, or ``no``."""
    reason: str | None
    """Why it is not, or not wholly, usable."""
    grouped: str = UNKNOWN
    packed: str = UNKNOWN
    """``native``, or a ``loop`` of one call per sequence."""
    lengths: str = UNKNOWN
    """Causal masks where keys and queries differ in number: ``any``, ``S_k>S_q``, or ``no``."""
    ring: str = UNKNOWN
    """Whether its log-sum-exp lets it run inside a ring of devices."""
    head_dims: str = UNKNOWN
    masks: str = NO
    """The options of a mask that it takes on this machine: ``window, softcap, sinks``."""
    narrow_values: bool = False
    """Whether values may have 128 columns beside keys of 192, as latent attention trains them."""
    caches: str = NO
    """Caches that it can take steps from: ``contiguous, paged``; and why none, for ``reason``."""


def backends(device: str = "auto") -> list[Features]:
    """The features of every attention on one device, as ``attnbench backends`` lists them.

    Schemes over several ranks are not among them: see ``scheme_names``.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for the GPU if there is one.

    Raises:
        ValueError: in one line, for another device or one that is not there.
    """
    return features_on(_device([f"device={device}"]))


def features_on(device: str) -> list[Features]:
    """One row for each attention on one device."""
    asked = [item for item in _every_backend() if not isinstance(item, SequenceParallelAttention)]
    return [features_of(item, device) for item in asked]


def _every_backend() -> list[AttentionBackend]:
    return [entry.target(name=entry.name, **entry.preset) for entry in BACKENDS]


def main(arguments: list[str]) -> int:
    """The subcommand, without its name; returns the exit code."""
    if arguments in (["--help"], ["-h"]):
        print(HELP, end="")
        return 0
    try:
        device = _device(arguments)
    except ValueError as error:
        warn(error)
        return 2
    schemes = [item for item in _every_backend() if isinstance(item, SequenceParallelAttention)]
    rows = features_on(device)
    console = PrintableConsole(soft_wrap=False)
    _print(rows, device, console)
    for line in _split(schemes, device):
        console.print(f"\n{line}", highlight=False, soft_wrap=True)
    return 0


def _split(schemes: list[SequenceParallelAttention], device: str) -> Iterable[str]:
    """The schemes for sequences split over several ranks: usable or not, and why not."""
    reasons = {item.name: _why_not_split(item, device) for item in schemes}
    able = [item for item in schemes if reasons[item.name] is None]
    merging = (ContextParallelAttention, SplitsGroups)
    ours = [item.name for item in able if isinstance(item, merging)]
    if ours:
        kernels = "attention.kernel= any usable one whose ring column says yes"
        yield f"Over parallel.cp ranks, with {kernels}: {', '.join(ours)}."
    whole = [item for item in able if isinstance(item, SplitsHeads) and item.name not in ours]
    if by_heads := [item.name for item in whole]:
        yield f"Over parallel.cp ranks, with any usable attention.kernel=: {', '.join(by_heads)}."
    if others := [item.name for item in able if item.name not in (*ours, *by_heads)]:
        yield f"Over parallel.cp ranks, with kernels of their own: {', '.join(others)}."
    refused = [item for item in schemes if item not in able]
    packed = [item.name for item in refused if _why_not_split(item, device, packed=True) is None]
    if packed:
        kernels = "any usable attention.kernel= that takes them"
        yield f"Over parallel.cp ranks, packed batches alone, with {kernels}: {', '.join(packed)}."
    for item in refused:
        if item.name not in packed:
            yield f"Not over parallel.cp ranks here: {item.name} ({reasons[item.name]})."


def _why_not_split(scheme: AttentionBackend, device: str, *, packed: bool = False) -> str | None:
    problems = [replace(problem, cp=2, packed=packed) for problem in _plain_problems(device)]
    if _first_supported(scheme, problems) is not None:
        return None
    return scheme.why_unsupported(problems[0])


def _device(arguments: list[str]) -> str:
    """Raises ValueError, in one line, for anything but one device that exists."""
    device = "auto"
    for item in arguments:
        key, equals, value = item.partition("=")
        if key != "device" or not equals:
            raise ValueError(f"backends {item}: no such key; usage: {USAGE}")
        if value not in DEVICES:
            raise ValueError(f"device={value}: must be one of {', '.join(DEVICES)}")
        device = value
    if device == "cpu":
        return device
    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise ValueError("device=cuda: torch sees no CUDA device; use device=cpu")
    return "cpu"


def features_of(backend: AttentionBackend, device: str) -> Features:
    """Ask a backend what it can do on ``cpu`` or ``cuda``."""
    # Without the local part (+cpu, +cu128), which is that of one torch for all.
    version = (backend.version() or UNKNOWN).split("+")[0]
    problem = _first_supported(backend, _plain_problems(device))
    caches = _caches(backend, device)
    if problem is None:
        reason = backend.why_unsupported(next(iter(_plain_problems(device))))
        if not isinstance(backend, Attention) and caches == NO:
            # A decoding backend's only reason is the one about caches.
            reason = _why_no_cache(backend, device)
        usable = NO if caches == NO else "decode"
        return Features(
            name=backend.name, version=version, usable=usable, reason=reason, caches=caches
        )
    reason = None
    if not problem.needs_grad:
        reason = backend.why_unsupported(replace(problem, needs_grad=True))

    def takes(**changes: float) -> bool:
        return backend.why_unsupported(replace(problem, **changes)) is None  # type: ignore[arg-type]

    longer = takes(kv_len=problem.kv_len + 64)
    any_length = longer and takes(kv_len=problem.kv_len - 64)
    return Features(
        name=backend.name,
        version=version,
        usable=YES if problem.needs_grad else "forward",
        reason=reason,
        grouped=YES if takes(num_kv_heads=problem.num_heads // 4) else NO,
        packed=_packed(backend, replace(problem, packed=True)),
        lengths="any" if any_length else "S_k>S_q" if longer else NO,
        ring=YES if isinstance(backend, Attention) and backend.gives_lse else NO,
        head_dims=_head_dims([dim for dim in HEAD_DIMS if takes(head_dim=dim)]),
        masks=", ".join(name for name, value in EACH_MASK.items() if takes(**{name: value})) or NO,
        narrow_values=takes(head_dim=192, value_dim=128),
        caches=caches,
    )


def _cache_problems(device: str) -> dict[str, list[DecodeProblem]]:
    """A small step from each kind of cache, in the dtypes that a device is used with."""
    kinds: dict[str, dict[str, Any]] = {
        "contiguous": {"head_dim": 64},
        "paged": {"head_dim": 64, "block_size": 256},
        "latent": {
            "head_dim": 128, "block_size": 64, "kv_lora_rank": 512, "rope_head_dim": 64
        },
    }  # fmt: skip
    return {
        name: [
            DecodeProblem(
                batch_size=2,
                num_heads=16,
                num_kv_heads=1 if name == "latent" else 4,
                new_tokens=1,
                max_len=512,
                dtype=dtype,
                device=device,
                **sizes,
            )
            for dtype in ("bfloat16", "float32")
        ]
        for name, sizes in kinds.items()
    }


def _caches(backend: AttentionBackend, device: str) -> str:
    found = [
        name
        for name, problems in _cache_problems(device).items()
        if any(backend.supports_decode(problem) is None for problem in problems)
    ]
    return ", ".join(found) or NO


def _why_no_cache(backend: AttentionBackend, device: str) -> str | None:
    """The reason against the cache that it comes nearest to: the last one that it checks."""
    reasons = [
        backend.supports_decode(problems[0]) for problems in _cache_problems(device).values()
    ]
    telling = [reason for reason in reasons if reason and not reason.startswith("takes ")]
    return (telling or reasons)[0]


def _plain_problems(device: str) -> Iterable[AttentionProblem]:
    """Small dense calls in the device's usual dtype, with gradients if the backend has them."""
    for needs_grad in (True, False):
        for dtype in ("bfloat16", "float32"):
            yield AttentionProblem(
                batch_size=2,
                num_heads=8,
                num_kv_heads=8,
                q_len=256,
                kv_len=256,
                head_dim=64,
                dtype=dtype,
                device=device,
                causal=True,
                needs_grad=needs_grad,
            )


def _first_supported(
    backend: AttentionBackend, problems: Iterable[AttentionProblem]
) -> AttentionProblem | None:
    return next((item for item in problems if backend.why_unsupported(item) is None), None)


def _packed(backend: AttentionBackend, problem: AttentionProblem) -> str:
    """Whether a packed batch is one call of its own, or one call for each sequence."""
    if backend.why_unsupported(problem) is not None:
        return NO
    choice = backend.choice(problem)
    solver = type(backend) if choice == backend.name else BACKENDS[choice].target
    return "loop" if issubclass(solver, DenseAttention) else "native"


def _head_dims(supported: list[int]) -> str:
    """The probed head_dims that are supported, in as few words as are true of them."""
    if supported == list(HEAD_DIMS):
        return "any"
    if not supported:
        return UNKNOWN
    least, most, step = supported[0], supported[-1], math.gcd(*supported)
    if supported != [dim for dim in HEAD_DIMS if least <= dim <= most and dim % step == 0]:
        return ", ".join(map(str, supported))
    multiples = f" by {step}" if step > 1 else ""
    if least == most:
        return str(most)
    if least == 1:
        return f"up to {most}"
    return f"{least}{'+' if most == HEAD_DIMS[-1] else f'-{most}'}{multiples}"


COLUMNS = {
    "attention": "name",
    "version": "version",
    "usable": "usable",
    "grouped": "grouped",
    "packed": "packed",
    "S_q≠S_k": "lengths",
    "ring": "ring",
    "head_dim": "head_dims",
}


def _lines(rows: list[Features]) -> list[str]:
    """The header and a line for each backend. A terminal may wrap them; nothing is cut."""
    cells = [list(COLUMNS), *([getattr(row, key) for key in COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _print(rows: list[Features], device: str, console: Console) -> None:
    console.print(f"Attention backends on {_device_name(device)}\n", highlight=False)
    header, *lines = _lines(rows)
    console.print(header, style="bold", highlight=False, soft_wrap=True)
    console.print("─" * max(map(len, [header, *lines])), highlight=False, soft_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        style = "dim" if row.usable == NO else ""
        console.print(escape(line), style=style, highlight=False, soft_wrap=True)
    caches = {row.name: row.caches for row in rows if row.caches != NO}
    _print_each("From a cache, with task=decode:", caches, console)
    masks = {row.name: row.masks for row in rows if row.masks != NO}
    _print_each("Options of masks besides the causal one, attention.NAME=:", masks, console)
    if narrow := [row.name for row in rows if row.narrow_values]:
        line = f"\nValues narrower than keys, with task.value_dim=: {', '.join(narrow)}."
        console.print(line, highlight=False, soft_wrap=True)
    reasons = {row.name: row.reason for row in rows if row.reason is not None}
    _print_each("Why not, or not wholly:", reasons, console)
    for row in rows:
        chosen = _choice(row.name, device) if row.usable != NO else row.name
        if chosen != row.name:
            console.print(f"\nattention={row.name} would choose {chosen} here.", highlight=False)


def _print_each(title: str, texts: dict[str, str], console: Console) -> None:
    """A line for each backend that has a text, or nothing."""
    if not texts:
        return
    width = max(map(len, texts))
    console.print(f"\n{title}", highlight=False)
    for name, text in texts.items():
        console.print(escape(f"  {name:<{width}}  {text}"), highlight=False, soft_wrap=True)


def _choice(name: str, device: str) -> str:
    entry = BACKENDS[name]
    backend = entry.target(name=name, **entry.preset)
    problem = _first_supported(backend, _plain_problems(device))
    return name if problem is None else backend.choice(problem)


def _device_name(device: str) -> str:
    if device == "cpu":
        return "this CPU"
    return str(torch.cuda.get_device_name())
