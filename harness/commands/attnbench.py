"""The command ``attnbench``: compose, plan, launch, record, render.

Flags (``--help``, ``--cfg job``, ``--info``) are Hydra's own. A command without flags is
composed by :mod:`harness.request.compose`, so that every error is one line and every command a
sweep.
``attnbench backends`` is the one subcommand: it runs nothing and lists what can run.
Exit codes: 0 all cases have a result, 1 some failed, 2 the command is wrong, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

USAGE = 2
INTERRUPTED = 130

# Within this time after a first Ctrl-C, another one is the same wish.
STOPPING_S = 10.0


def main() -> int:
    """Console script; returns the exit code."""
    arguments = [item for item in sys.argv[1:] if item not in ("-m", "--multirun")]
    if arguments[:1] == ["backends"]:
        from harness.commands.backends import main as list_backends

        return list_backends(arguments[1:])
    if any(item.startswith("-") for item in arguments):
        if mistake := _no_such_flag(arguments):
            return _complain(mistake)
        _hydra_flags()
        return 0
    return run(arguments)


def _no_such_flag(arguments: list[str]) -> str | None:
    """What is wrong, for a key with dashes as other programs have it; None for Hydra's flags."""
    from hydra._internal.utils import get_args_parser

    _, unknown = get_args_parser().parse_known_args(arguments)
    flags = [item for item in unknown if item.startswith("-")]
    if not flags:
        return None
    flag, _, value = flags[0].partition("=")
    following = arguments[arguments.index(flags[0]) + 1 :][:1]
    if not value and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    return f"{flag}: no such flag; write {flag.lstrip('-') or 'KEY'}={value or 'VALUE'}"


def _hydra_flags() -> None:
    import hydra

    from harness.paths import CONF
    from harness.request.config_store import fill_config_store

    fill_config_store()

    def nothing_to_run(config: object) -> None:
        print("attnbench: leave the flag out to run cases", file=sys.stderr)

    hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(nothing_to_run)()


def run(arguments: list[str]) -> int:
    """Run a command line without flags; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        from harness.request.compose import compose_request
        from harness.request.session import run_request

        try:
            request = compose_request(arguments)
        except ValueError as error:
            return _complain(str(error))
        return run_request(request)
    except KeyboardInterrupt:
        print(
            "\nattnbench: stopped; the same command goes on where this one ended", file=sys.stderr
        )
        sys.stdout.flush()
        # While Python shuts down, its own handlers are gone already.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        return INTERRUPTED


_last_interrupt_s = -STOPPING_S


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Stop once: pressing Ctrl-C again must not cut short the ending of the workers."""
    global _last_interrupt_s
    now_s = time.monotonic()
    if now_s - _last_interrupt_s >= STOPPING_S:
        _last_interrupt_s = now_s
        raise KeyboardInterrupt


def _complain(message: str) -> int:
    """One line on standard error."""
    print(f"attnbench: {' '.join(message.split())}", file=sys.stderr)
    return USAGE
