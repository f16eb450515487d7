"""A worker that starts at once, without torch, and does what a test has written down.

It has the real worker's ends of the pipes. ``script.json`` in ``ATTNBENCH_TEST_FOLDER`` lists what
it does with the cases of each sequence length, attempt by attempt; the last entry holds for all
further ones, and cases without an entry go well. ``start`` lists what its starts do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.bench.outcome import Outcome
from harness.run.children.guard_main import MARK
from harness.run.children.worker_side import Channel, CleanStart
from harness.run.workers.worker_main import die_with_parent
from tests.support.daemons import detach

FOLDER = "ATTNBENCH_TEST_FOLDER"
SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]


class Scripted:
    """One process of a scripted worker."""

    def __init__(self) -> None:
        die_with_parent(int(os.environ[MARK].partition("-")[0]))
        values = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
        self.channel = Channel(int(values["--events-fd"]))
        self.folder = Path(os.environ[FOLDER])
        self.rank = int(values["--rank"])
        self.world_size = int(values["--world-size"])
        self.job, self.key = 0, ""

    def serve(self) -> None:
        environment = {"device_name": "test", "torch": "2"}
        clean_start = CleanStart()
        self.act(self.next_act("start"))
        self.channel.send(event="ready", environment=environment)
        for job in self.channel.jobs():
            self.job, self.key = job["job"], str(job["case"]["seq_len"])
            act = self.next_act(self.key)
            if act.startswith("unread_"):
                self.act(act.removeprefix("unread_"))
                continue
            self.channel.send(event="began", job=self.job)
            if act.startswith("early_"):
                self.act(act.removeprefix("early_"))
            clean_start.restore()
            self.stage("checking")
            self.stage("measuring")
            if not act.startswith(("early_", "late_")):
                self.act(act)
            self.result()
            if act.startswith("late_"):
                self.act(act.removeprefix("late_"))

    def next_act(self, key: str) -> str:
        script = json.loads((self.folder / "script.json").read_text())
        acts = script.get(f"{key}/{self.rank}", script.get(key, ["go_well"]))
        asked = self.folder / f"asked-{key}-{self.rank}"
        with asked.open("a") as file:
            file.write(f"{os.getpid()}\n")
        number = len(asked.read_text().splitlines())
        return str(acts[min(number, len(acts)) - 1])

    def act(self, name: str) -> None:
        ACTS[name](self)

    def stage(self, name: str) -> None:
        self.channel.send(event="stage", job=self.job, stage=name)

    def result(self, **changes: Any) -> None:
        outcomes = [
            asdict(
                Outcome(
                    rank=rank,
                    clocks={"step": "host"},
                    samples_ms={"step": [1.0, 1.1]},
                    check={"errors": {"o": float("nan")}, "tolerance": 1.0},
                )
            )
            for rank in range(self.world_size)
        ]
        event = {"event": "result", "job": self.job, "outcomes": outcomes, "healthy": True}
        if self.rank == 0:
            self.channel.send(**(event | changes))

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(self.channel._events_fd, left) :]

    def note(self, name: str, pid: int) -> None:
        aside = self.folder / f"{name}.tmp"
        aside.write_text(str(pid))
        aside.rename(self.folder / name)


def _die(worker: Scripted) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after_rank_0(worker: Scripted) -> None:
    """Die when rank 0 has its part of the job too, so that it acts on it as the script says."""
    while not (worker.folder / f"asked-{worker.key}-0").exists():
        time.sleep(0.01)
    _die(worker)


def _stop(worker: Scripted) -> None:
    worker.note("stopped", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)


def _die_and_leave_the_pipe(worker: Scripted) -> None:
    """A child with the pipe of events in its hands, as a program started by hand could have."""
    fd = worker.channel._events_fd
    child = subprocess.Popen(SLEEP, pass_fds=(fd,), start_new_session=True)
    worker.note("child", child.pid)
    _die(worker)


def _fork_and_die(worker: Scripted) -> None:
    """A fork goes on in the worker's own loop: it must neither report nor take a job."""
    pid = os.fork()
    if pid == 0:
        worker.stage("of the child")
        assert list(worker.channel.jobs()) == []
        time.sleep(1000)
    worker.note("child", pid)
    time.sleep(0.05)
    _die(worker)


def _answer_when_told(worker: Scripted) -> None:
    """Answer once there is a file ``told``, and say so; the usual answer that follows is late."""
    while not (worker.folder / "told").exists():
        time.sleep(0.01)
    worker.result()
    worker.note("answered", os.getpid())


def _daemon(worker: Scripted) -> None:
    worker.note("daemon", detach())


def _daemon_without_environment(worker: Scripted) -> None:
    code = (
        "import os,sys,time\nif os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(1000)"
    )
    path = worker.folder / "daemon"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(path)],
        env={},
        start_new_session=True,
        check=True,
    )
    while not path.exists() or not path.read_text():
        time.sleep(0.01)


def _print_much(worker: Scripted) -> None:
    os.write(1, b"the first line\n")
    for _ in range(64):
        os.write(1, b"x" * 2**20 + b"\n")
    os.write(1, b"the last line\n")


def _spoil_the_process(worker: Scripted) -> None:
    """Everything a case can do to its process that outlasts it."""
    os.chdir("/")
    sys.stdout.close()
    os.close(1)
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(3))
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=time.sleep, args=(1000,)).start()


def _tell_about_the_process(worker: Scripted) -> None:
    print("printed")
    found = {
        "folder": os.getcwd(),
        "stdout": os.readlink("/proc/self/fd/1"),
        "alarm": str(signal.getsignal(signal.SIGALRM)),
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": signal.getitimer(signal.ITIMER_REAL)[0],
        "input": sys.stdin.read(),
    }
    (worker.folder / "process.json").write_text(json.dumps(found))


ACTS: dict[str, Callable[[Scripted], None]] = {
    "go_well": lambda worker: None,
    "die": _die,
    "die_after_rank_0": _die_after_rank_0,
    "exit": lambda worker: os._exit(0),
    "raise_exit": lambda worker: sys.exit(3),
    "stop": _stop,
    "take_its_time": lambda worker: time.sleep(0.3),
    "hang": lambda worker: time.sleep(1000),
    "close": lambda worker: (os.close(worker.channel._events_fd), time.sleep(1000))[1],
    "die_and_leave_the_pipe": _die_and_leave_the_pipe,
    "fork_and_die": _fork_and_die,
    "daemon": _daemon,
    "daemon_then_die": lambda worker: (_daemon(worker), _die(worker))[1],
    "daemon_then_hang": lambda worker: (_daemon(worker), time.sleep(1000))[1],
    "daemon_without_environment": _daemon_without_environment,
    "junk": lambda worker: worker.write(b"\x00\xff not an event\n"),
    "junk_line": lambda worker: worker.write(b"hello\n" * 3),
    "much_junk": lambda worker: worker.write(b"j" * (50 * 2**20)),
    "long_event": lambda worker: worker.write(
        b'{"event": "stage", "job": 1, "stage": "' + b"s" * (50 * 2**20) + b'"}\n'
    ),
    "deep": lambda worker: worker.write(b'{"event": "ready", "a": ' + b"[" * 200_000 + b"\n"),
    "typed_wrong": lambda worker: worker.result(outcomes=[{"rank": "0"}]),
    "no_outcome": lambda worker: worker.result(outcomes=[]),
    "ready_again": lambda worker: worker.channel.send(event="ready", environment={}),
    "answer_twice": lambda worker: worker.result(),
    "answer_when_told": _answer_when_told,
    "answer_for_another": lambda worker: worker.result(job=worker.job + 1),
    "flood": lambda worker: [worker.stage(f"stage {i}") for i in range(100_000)] and None,
    "escape": lambda worker: worker.stage("\x1b[2J"),
    "print_much": _print_much,
    "spoil": _spoil_the_process,
    "tell": _tell_about_the_process,
}


if __name__ == "__main__":
    Scripted().serve()
