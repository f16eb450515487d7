"""The command ``attnbench``: compose, plan, launch, record, render.

Flags (``--cfg job``, ``--info``) are Hydra's own; its ``--help`` is written by
:mod:`harness.request.help`, which is faster. A command without flags is composed by
:mod:`harness.request.compose`, so that every error is one line and every command a sweep.
``attnbench backends`` is the one subcommand: it runs nothing and lists what can run.
Exit codes: 0 all cases have a result, 1 some failed, 2 the command is wrong, 129 the terminal was
closed (SIGHUP), 130 interrupted (SIGINT, SIGTERM). Who stops reading the output changes none of
them; where it cannot be written, as on a full disk, 1 takes the place of 0.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

import hydra
from hydra._internal.utils import get_args_parser

from harness.commands.backends import main as list_backends
from harness.commands.output import begin_measuring
from harness.paths import CONF
from harness.printing import warn
from harness.request.compose import compose_request
from harness.request.config_store import store_everything
from harness.request.help import help_text, template
from harness.request.session import run_request

USAGE = 2
INTERRUPTED = 130
HUNG_UP = 129

# A second Ctrl-C within this time is taken for the same request.
STOPPING_S = 10.0


def main() -> int:
    """Console script; returns the exit code."""
    arguments = [item for item in sys.argv[1:] if item not in ("-m", "--multirun")]
    try:
        os.getcwd()
    except OSError as error:
        return _complain(f"the working folder is gone ({error.strerror}); cd to one that exists")
    if arguments[:1] == ["backends"]:
        return list_backends(arguments[1:])
    if any(item.startswith("-") for item in arguments):
        return _flags(arguments)
    return run(arguments)


def _flags(arguments: list[str]) -> int:
    """A command line with flags: Hydra's, or a key written with dashes by mistake."""
    flags, unknown = get_args_parser().parse_known_args(arguments)
    if mistakes := [item for item in unknown if item.startswith("-")]:
        return _complain(_no_such_flag(mistakes[0], arguments))
    of_hydra = flags.config_dir or flags.config_path or flags.config_name
    if not flags.help or of_hydra or any(map(_is_of_hydra, flags.overrides)):
        store_everything(template())
        main = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
        main(_nothing_to_run)()
        return 0
    try:
        print(help_text(flags.overrides, resolve=flags.resolve))
    except ValueError as error:
        return _complain(str(error))
    return 0


def _is_of_hydra(override: str) -> bool:
    return override.lstrip("+~").startswith("hydra")


def _no_such_flag(item: str, arguments: list[str]) -> str:
    """The error for a key that is written with dashes, like another program's flag."""
    flag, _, value = item.partition("=")
    following = arguments[arguments.index(item) + 1 :][:1]
    if not value and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    return f"{flag}: no such flag; write {flag.lstrip('-') or 'KEY'}={value or 'VALUE'}"


def _nothing_to_run(config: object) -> None:
    warn("leave the flag out to run cases")


def run(arguments: list[str]) -> int:
    """Run a command line without flags; returns the exit code."""
    _stop_on_signals()
    try:
        try:
            request = compose_request(arguments)
        except ValueError as error:
            return _complain(str(error))
        if not request.plan:
            begin_measuring()
        return run_request(request)
    except KeyboardInterrupt as stopped:
        # While Python shuts down, its own handlers are gone already.
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)
        # Following jobs, it says what goes on.
        said = str(stopped) or "stopped; the same command goes on where this one ended"
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
