"""Entry points of the console scripts: make imports lazy, then start the command."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

from harness.commands import lazy_imports
from harness.commands.output import Streams
from harness.printing import warn

LOST = 1
USAGE = 2
INTERRUPTED = 130
"""Exit codes: what a command prints could not be written, it is wrong, and after Ctrl-C."""


def attnbench() -> int:
    """Measure, plan or show help."""
    return _start("attnbench")


def report() -> int:
    """Render tables, figures and reports."""
    return _start("report")


def writeup() -> int:
    """Write one document about everything that was measured."""
    return _start("writeup")


def compare() -> int:
    """Compare two results folders."""
    return _start("compare")


def pack() -> int:
    """Move records into compressed archives, or back."""
    return _start("pack")


def status() -> int:
    """List what is queued, running, done or failed."""
    return _start("status")


def cancel() -> int:
    """Stop what is queued or running."""
    return _start("cancel")


def _start(command: str) -> int:
    name = command if command == "attnbench" else f"attnbench-{command}"
    streams = Streams(name)
    try:
        streams.install()
        lazy_imports.install()
        with _garbage_collected_seldom():
            code = _run(command)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        warn("stopped", command=name)
        return INTERRUPTED
    return LOST if code == 0 and streams.lost else code


NEW_OBJECTS = 100_000
"""How many more objects there are before Python looks for garbage; by itself, some hundreds."""


@contextlib.contextmanager
def _garbage_collected_seldom() -> Iterator[None]:
    """Look for cycles of garbage less often, in this process and not in its workers.

    Nearly all that a command makes, modules and configurations, lives as long as it does. Looking
    through it again and again took a sixth of a plan's time.
    """
    usual = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _run(command: str) -> int:
    # Imports its package, and with it torch, unless imports are lazy.
    from kernels.registry import RegistryError

    try:
        module = importlib.import_module(f"harness.commands.{command}")
        return int(module.main())
    except SystemExit as ended:
        # After --help, or where arguments are wrong.
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        raise
    except RegistryError as error:
        warn(error)
        return USAGE
