"""Python programs as forks of a process that has imported the slow modules.

``python -m harness`` imports for one to three seconds, and each worker that it starts for five:
torch, and for an optimizer torch._dynamo with sympy. :class:`ForkedPython` takes the arguments of
:class:`subprocess.Popen` for such a program, and asks a server for a fork of itself that runs it:
a child of the caller with the wanted arguments, environment, folder and file descriptors, also
as /proc shows them, where the harness looks for the marks of its workers.

What a program does while it imports, and how it takes closed or odd standard streams, only a
process of its own shows; tests of that start one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.run.children import rank
from harness.run.children.family import PR_SET_CHILD_SUBREAPER, set_process_option
from harness.run.children.rank import ENTRY

ROOT = Path(__file__).parents[2]

MODULES = (
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "pandas", "hydra", "rich.console"),
    *("matplotlib.figure", "matplotlib.backends.backend_svg", "matplotlib.backends.backend_pdf"),
    *("harness.run.workers.worker", "harness.commands.attnbench"),
)

ROOM = "ATTNBENCH_TEST_ROOM"
"""A variable as long as the environment of a program may be: /proc shows the program's there."""

ROOM_BYTES = 65536
LONGEST_REQUEST = 100_000

READ_AT_IMPORT = ("CUDA_", "LC_", "MPL", "OMP_", "PYTHON", "TRITON_")
"""How variables begin that modules or the interpreter read when they start."""

FREELY_SET = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED")

WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}

TIMEOUT_S = 600

PR_GET_CHILD_SUBREAPER = 37

Environment = dict[str, str]


class ForkedPython(subprocess.Popen[Any]):
    """A process that runs ``[sys.executable, "-m", module, ...]``, or ``"-c", code, ...``."""

    def __init__(self, args: Any, **options: Any) -> None:
        self._new_session = bool(options.get("start_new_session"))
        super().__init__(args, **options)

    def _execute_child(self, args: Any, *further: Any) -> None:
        pass_fds, cwd, environment = further[3:6]
        input_fd, _, _, output_fd, _, error_fd = further[9:15]
        streams = [fd if fd >= 0 else i for i, fd in enumerate((input_fd, output_fd, error_fd))]
        request = {
            "arguments": [str(word) for word in args],
            "environment": dict(os.environ if environment is None else environment),
            "cwd": os.fspath(cwd or os.getcwd()),
            "fds": [0, 1, 2, *pass_fds],
            "new_session": self._new_session,
        }
        try:
            self.pid = _server().fork(request, [*streams, *pass_fds])
            self._child_created = True
        finally:
            self._close_pipe_fds(*further[9:15])


def can_fork(environment: Environment) -> bool:
    """Whether a fork would differ in nothing from a process with this environment."""
    return sys.platform == "linux" and _read_at_import(environment) == _read_at_import(
        _environment()
    )


def run_python(
    *arguments: str, environment: Environment, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """A program without a GPU, and how it ended; it is a fork if that makes no difference."""
    variables = os.environ | WITHOUT_GPU | environment
    popen: type[subprocess.Popen[Any]] = ForkedPython if can_fork(variables) else subprocess.Popen
    with popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _read_at_import(environment: Environment) -> Environment:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_AT_IMPORT) and name not in FREELY_SET
    }


class Server:
    """The caller's end of the socket to a server, of which the caller is a forefather."""

    def __init__(self, end: socket.socket) -> None:
        self.pid = os.getpid()
        self._end = end
        self._lock = threading.Lock()

    def fork(self, request: dict[str, Any], fds: list[int]) -> int:
        """The process id of the program, a child of this process."""
        message = json.dumps(request).encode()
        assert len(message) < LONGEST_REQUEST
        with self._lock, _adopting():
            socket.send_fds(self._end, [message], fds)
            answer = self._end.recv(100)
        if not answer:
            raise ChildProcessError("the server of forked programs has ended")
        return int(answer)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of a descendant whose parent ends."""
    before = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        set_process_option(PR_SET_CHILD_SUBREAPER, before.value)


_lock = threading.Lock()
_started: Server | None = None


def _server() -> Server:
    """The server of this process, started with the first program."""
    global _started
    with _lock:
        if _started is None or _started.pid != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            code = "import sys, forked; forked.finish(forked.serve(int(sys.argv[1])))"
            with theirs:
                server = subprocess.Popen(
                    [sys.executable, "-c", code, str(theirs.fileno()), "x" * ROOM_BYTES],
                    cwd=ROOT,
                    env=_environment() | {ROOM: "x" * ROOM_BYTES},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            _started = Server(ours)
            atexit.register(_end, ours, server)
        return _started


def _end(end: socket.socket, server: subprocess.Popen[Any]) -> None:
    end.close()
    server.wait()


def _environment() -> Environment:
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parent)))
    return os.environ | WITHOUT_GPU | {"PYTHONPATH": paths}


def serve(fd: int) -> Callable[[], None]:
    """Import, then fork for each request; returns what a fork is to do."""
    global _started
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _ignore_signals()
    while True:
        request, fds = _wait_for_requests(fd)
        _become(request, fds)
        if request["arguments"][1:3] == ["-m", ENTRY]:
            break
        # Before it does anything: workers are like it, and its children.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            _started = Server(ours)
            rank.subprocess = fork_workers()
            break
        ours.close()
        fd = theirs.detach()
        _serve_unseen()
    return functools.partial(_run, request)


def finish(program: Callable[[], None]) -> None:
    """End as the interpreter does, without the second that it takes to take torch apart."""
    code = 0
    try:
        program()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code & 0xFF)


def _wait_for_requests(fd: int) -> tuple[dict[str, Any], list[int]]:
    """Serve until the other end closes; in a fork, return the request and its descriptors."""
    while True:
        end = socket.socket(fileno=os.dup(fd))
        message, fds, _, _ = socket.recv_fds(end, LONGEST_REQUEST, 64)
        if not message:
            os._exit(0)
        go_read, go_write = os.pipe()
        pid_read, pid_write = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(pid_write, str(pid).encode())
                os._exit(0)
            # Its parent is the caller once the process between has been waited for.
            os.close(go_write)
            os.read(go_read, 1)
            end.detach()
            return json.loads(message), fds
        os.waitpid(between, 0)
        pid = os.read(pid_read, 20)
        for number in (go_read, go_write, pid_read, pid_write, *fds):
            os.close(number)
        end.send(pid)
        end.close()


def _become(request: dict[str, Any], fds: list[int]) -> None:
    """Take over what the program inherits."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    _place(dict(zip(request["fds"], fds, strict=True)))
    _restore_signals()
    _take_environment(request["environment"], request["arguments"])


def _run(request: dict[str, Any]) -> None:
    """Run the program."""
    _open_streams(unbuffered="PYTHONUNBUFFERED" in request["environment"])
    flag, what, *rest = request["arguments"][1:]
    sys.orig_argv = list(request["arguments"])
    sys.argv = [flag, *rest]
    _set_path(request["environment"])
    if flag == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        code = compile(what, "<string>", "exec", dont_inherit=True)
        exec(code, sys.modules["__main__"].__dict__)


def _place(wanted: dict[int, int]) -> None:
    """Have the descriptors under the numbers that are asked for, and no others."""
    last = max(*wanted, *wanted.values()) + 1
    aside = {number: _beyond(fd, last) for number, fd in wanted.items()}
    for number, fd in aside.items():
        os.dup2(fd, number)
    begin = 0
    for number in [*sorted(wanted), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
        if begin < number:
            os.closerange(begin, number)
        begin = number + 1


def _beyond(fd: int, last: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD, last)


def _ignore_signals() -> None:
    """Those that end a whole group of processes; a server ends with its caller."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _restore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_environment(environment: Environment, arguments: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    importlib.invalidate_caches()
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments_at, arguments_end, environment_at, environment_end = map(int, stat[45:49])
    shown = [f"{name}={value}" for name, value in environment.items()]
    _write(arguments_at, arguments_end, arguments)
    _write(environment_at, environment_end, shown)


def _write(begin: int, end: int, words: list[str]) -> None:
    data = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(data) <= end - begin
    ctypes.memmove(begin, data.ljust(end - begin, b"\0"), end - begin)


def _serve_unseen() -> None:
    """Hold nothing of the program's open."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    _ignore_signals()


def fork_workers() -> Any:
    """What :mod:`harness.run.children.rank` is to take for ``subprocess``, to fork workers."""

    def start(args: list[str], **options: Any) -> Any:
        forks = args[1:3] == ["-m", ENTRY] and can_fork(options["env"])
        return (ForkedPython if forks else subprocess.Popen)(args, **options)

    return SimpleNamespace(**vars(subprocess) | {"Popen": start})


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(open(0, "rb", closefd=False))  # noqa: SIM115
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        stream = io.TextIOWrapper(
            open(fd, "wb", closefd=False),  # noqa: SIM115
            errors=errors,
            line_buffering=fd == 2 or os.isatty(fd),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _set_path(environment: Environment) -> None:
    before = [str(ROOT), str(Path(__file__).parent)]
    rest = [item for item in sys.path if item and item not in before]
    named = [item for item in environment.get("PYTHONPATH", "").split(os.pathsep) if item]
    first = [] if "PYTHONSAFEPATH" in environment else [os.getcwd()]
    sys.path[:] = [*first, *named, *rest]
