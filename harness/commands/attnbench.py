"""The command ``attnbench``: compose, plan, launch, record, render.

Flags are those of :mod:`harness.commands.flags`. A command without flags is composed by
:mod:`harness.request.compose`, so that every error is one line and every command a sweep.
Subcommands are ``attnbench backends``, which lists what can run, ``attnbench recommend`` and
``attnbench fits``.
Exit codes: 0 all cases have a result, 1 some failed, 2 the command is wrong, 129 the terminal was
closed (SIGHUP), 130 interrupted (SIGINT, SIGTERM). Who stops reading the output changes none of
them; where it cannot be written, as on a full disk, 1 takes the place of 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from harness.commands.flags import run_flags, without_own_folders
from harness.commands.output import begin_measuring
from harness.printing import warn
from harness.request.compose import compose_request
from harness.request.session import run_request

USAGE = 2
INTERRUPTED = 130
HUNG_UP = 129

# A second Ctrl-C within this time is taken for the same request.
STOPPING_S = 10.0

GOES_ON = "stopped; the same command goes on where this one ended"


def main() -> int:
    """Console script; returns the exit code."""
    try:
        os.getcwd()
    except OSError as error:
        return _complain(f"the working folder is gone ({error.strerror}); cd to one that exists")
    try:
        arguments, flags = without_own_folders(sys.argv[1:])
        # Each of the three loads what other commands do without.
        if arguments[:1] == ["backends"]:
            from harness.commands import backends

            return backends.main(arguments[1:])
        if arguments[:1] == ["fits"]:
            from harness.commands import fits

            return fits.main(arguments[1:])
        if arguments[:1] == ["recommend"]:
            return _recommend(arguments[1:])
        if any(item.startswith("-") for item in arguments):
            run_flags(arguments)
            return 0
    except ValueError as error:
        return _complain(str(error))
    return run(arguments, flags)


def _recommend(arguments: list[str]) -> int:
    """The subcommand that may measure, and stops as other commands do."""
    from harness.commands import recommend

    _stop_on_signals()
    try:
        return recommend.main(arguments)
    except KeyboardInterrupt:
        return _stopped(GOES_ON)


def run(arguments: list[str], flags: Sequence[str] = ()) -> int:
    """Run a command line without flags; returns the exit code.

    Args:
        flags: those that were typed and have been followed, for the command that records keep.
    """
    _stop_on_signals()
    try:
        try:
            request = compose_request(arguments, flags)
        except ValueError as error:
            return _complain(str(error))
        if not request.plan:
            begin_measuring()
        return run_request(request)
    except KeyboardInterrupt as stopped:
        # Following jobs, it says what goes on.
        return _stopped(str(stopped) or GOES_ON)


def _stopped(said: str) -> int:
    """Say how an interrupted command ended; returns its exit code."""
    # While Python shuts down, its own handlers are gone already.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    print(file=sys.stderr)
    warn(said)
    sys.stdout.flush()
    return HUNG_UP if _stopped_by == signal.SIGHUP else INTERRUPTED


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_last_interrupt_s = -STOPPING_S
_stopped_by = 0


def _stop_on_signals() -> None:
    """Let signals end the workers and remove the run folder before they end this process.

    A signal that is ignored from the start stays ignored, as nohup wants SIGHUP to be and a shell
    SIGINT in the background.
    """
    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop once: pressing Ctrl-C again must not cut short the ending of the workers."""
    global _last_interrupt_s, _stopped_by
    now_s = time.monotonic()
    if now_s - _last_interrupt_s >= STOPPING_S:
        _last_interrupt_s, _stopped_by = now_s, number
        raise KeyboardInterrupt


def _complain(message: str) -> int:
    """One line on standard error."""
    warn(" ".join(message.split()))
    return USAGE
