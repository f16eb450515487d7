"""The compiled autograd node (``native.cpp``): built when first needed, and fed with launches.

A training step on a short sequence waits for the host, not for its kernels: autograd around a
Python function takes most of that time, and preparing the launches in Python the rest. The node
does both without Python. It is built by the C++ compiler that Triton needs as well, in some ten
seconds, and kept in the user's cache; where that cannot be done gradients run through Python.

It repeats calls that ran before. Python runs the first of a kind (a device, a dtype, a layout of
q, k and v, and options), then :func:`learn_forward` and :func:`learn_backward` hand over what was
launched.
PyTorch's compiled autograd, which wants to trace every node, cannot trace this one: under it, of a
forward pass that is not compiled, choose Python's.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import warnings
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kernels.flash import dispatch
from kernels.flash.any_gpu import launch as any_gpu
from kernels.flash.any_gpu.configs import cache_folder
from kernels.flash.call.arguments import BackwardPass, FlashCall, FlashOptions, ForwardPass
from kernels.flash.call.problem import PRECISIONS, Problem, automatic_precision
from kernels.launching import driver as driver_launch
from kernels.launching.device import on
from kernels.launching.prepared import PlannedPass, is_watched
from kernels.problem import AttentionSpec

SOURCE = Path(__file__).with_name("native.cpp")

_BUILD_TIMEOUT_S = 300


class NotBuilt(Exception):
    """Why there is no compiled node here, in one line."""


class _Node:
    """The compiled module of this process, once it is built or found impossible."""

    module: Any = None
    reason: str | None = None
    """The reason why there is none."""
    num_calls = 0


_lock = Lock()


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, options: FlashOptions
) -> Tensor | None:
    """o, differentiable; None if Python has to run this call."""
    module = _Node.module
    if module is None or is_watched():
        return None
    kind = _kind(q, options)
    if kind is None:
        return None
    o = module.attend(q, k, v, causal, scale, kind)
    if o is not None:
        _Node.num_calls += 1
    return o


_OPTIONS = tuple(
    FlashOptions(implementation=implementation, precision=precision, autotune=autotune)
    for implementation in ("auto", *dispatch.IMPLEMENTATIONS)
    for precision in PRECISIONS
    for autotune in (False, True)
)
"""By kind."""

_KINDS = {(x.implementation, x.precision, x.autotune): kind for kind, x in enumerate(_OPTIONS)}


def _kind(q: Tensor, options: FlashOptions) -> int | None:
    """A number for what else decides how a call runs: options, and how PyTorch multiplies float32.

    None if an option is none that there is, which Python says.
    """
    precision = options.precision
    if q.dtype != torch.float32:
        precision = "ieee" if precision in PRECISIONS else precision
    elif precision == "auto":
        precision = automatic_precision(q)
    return _KINDS.get((options.implementation, precision, options.autotune))


def forget() -> None:
    """Have Python run the next call of every kind."""
    if _Node.module is not None:
        _Node.module.forget()


def why_not() -> str | None:
    """None if kernels are compiled here, and so can be launched by compiled code."""
    return "Triton's interpreter compiles nothing" if any_gpu.INTERPRETED else None


def is_built() -> bool:
    """Whether there is a compiled node in this process, which may have learned some calls."""
    return _Node.module is not None


def num_calls() -> int:
    """How many calls of this process have run without Python."""
    return _Node.num_calls


def learn_forward(
    problem: Problem,
    call: FlashCall,
    o: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    *,
    required: bool,
) -> None:
    """Let the compiled node run later calls like this one, which has just run.

    Args:
        rest: of :func:`dispatch.empty_rest`.
        required: whether to raise where there is no node, and not to warn. A call that cannot be
            repeated, such as one of tensors that begin at odd places, stays Python's all the same.

    Raises:
        ValueError: there is no compiled node, and it is required.
    """
    q, k, v = call.q, call.k, call.v
    kind = _kind(q, call.options)
    is_impossible = _Node.reason is not None and not required
    if is_impossible or kind is None or not _are_plain(q, k, v, o):
        return
    given = _apart({"q": q, "k": k, "v": v, "o": o, "lse": lse, "rest": rest})
    implementation = dispatch._choose(problem, call.options.implementation, "forward")
    forward = ForwardPass(problem=problem, scale=1.0, **given)
    found = _found(implementation.planned_forward(forward), given)
    if found is None:
        return
    module = _module(required)
    if module is not None:
        with on(problem.device):
            module.learn_forward((q, k, v, o), problem.causal, kind, rest is not None, *found)


def learn_backward(
    problem: Problem,
    call: FlashCall,
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Let the compiled node run later calls like this one, which has just run."""
    q, k, v = call.q, call.k, call.v
    kind = _kind(q, call.options)
    if _Node.module is None or kind is None or not _are_plain(do, q, k, v, o, *gradients):
        return
    dq, dk, dv = gradients
    given = _apart(
        {"q": q, "k": k, "v": v, "o": o, "lse": lse, "rest": rest, "do": do,
         "dq": dq, "dk": dk, "dv": dv}
    )  # fmt: skip
    implementation = dispatch._choose(problem, call.options.implementation, "backward")
    backward = BackwardPass(problem=problem, dlse=None, scale=1.0, **given)
    found = _found(implementation.planned_backward(backward), given)
    if found is not None:
        with on(problem.device):
            _Node.module.learn_backward((q, k, v, o, do, *gradients), problem.causal, kind, *found)


_SLOTS = ("q", "k", "v", "o", "lse", "rest", "do", "dq", "dk", "dv")
"""The tensors of native.cpp's Slot; the workspace's parts follow."""

_GRANULARITY = 512
"""Bytes at whose multiples torch's allocator would let each part of a workspace begin."""


def _apart(tensors: dict[str, Tensor | None]) -> dict[str, Any]:
    """Distinct objects for the arguments, since a user may pass one tensor as q, k and v."""
    return {name: None if x is None else x.detach() for name, x in tensors.items()}


def _found(
    planned: PlannedPass | None, given: dict[str, Tensor | None]
) -> tuple[list[int], int, list[tuple]] | None:
    """Where parts of the workspace begin, its bytes, and the launches; None if not all are known.

    Of each launch the contents, the places of its tensors, and its floats: those of a scale of 1
    are what the scale is to be multiplied with.
    """
    if planned is None:
        return None
    parts, offsets, total = _laid_out(planned)
    places = {id(given.get(name)): place for place, name in enumerate(_SLOTS)}
    places |= {id(part): len(_SLOTS) + place for place, part in enumerate(parts)}
    launches = []
    for step in planned.steps:
        contents = step.launch.contents()
        if contents is None:
            return None
        launches.append((*contents, tuple(places[id(x)] for x in step.tensors), step.floats))
    return offsets, total, launches


def _laid_out(planned: PlannedPass) -> tuple[list[Tensor], list[int], int]:
    """The parts of a workspace, the bytes before each of them, and those of the whole."""
    parts: list[Tensor] = []
    offsets: list[int] = []
    common = total = 0
    for number, stage in enumerate((planned.workspace, *planned.stages)):
        end = common
        for part in stage:
            parts.append(part)
            offsets.append(end)
            end += -(-part.numel() * part.element_size() // _GRANULARITY) * _GRANULARITY
        if number == 0:
            common = end
        total = max(total, end)
    return parts, offsets, total


def _are_plain(*tensors: Tensor) -> bool:
    return all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)


def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    causal: bool,
    scale: float,
    kind: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass of a call that the compiled node knows the forward pass of alone."""
    spec = AttentionSpec(causal=causal, scale=scale)
    call = FlashCall(q=q, k=k, v=v, spec=spec, options=_OPTIONS[kind])
    problem = call.problem()
    gradients = dispatch.backward_of(problem, call, do, o, lse, None, rest)
    learn_backward(problem, call, do, o, lse, rest, gradients)
    return gradients


def _module(required: bool) -> Any:
    """The compiled module; None, after one warning, where there is none."""
    with _lock:
        if _Node.module is None and _Node.reason is None:
            try:
                module = build(cache_folder())
                module.connect(*_addresses(), _backward)
                _Node.module = module
            except NotBuilt as error:
                _Node.reason = str(error)
                if not required:
                    warnings.warn(
                        f"flash_triton: gradients run through Python, which takes longer than "
                        f"short sequences' kernels: {error}",
                        stacklevel=2,
                    )
    if _Node.module is None and required:
        raise ValueError(f"flash attention: autograd=native: {_Node.reason}")
    return _Node.module


def _addresses() -> tuple[int, ...]:
    """Addresses of the driver's functions that native.cpp's Driver calls."""
    names = (
        "cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuCtxGetCurrent", "cuCtxSetCurrent",
    )  # fmt: skip
    try:
        driver = driver_launch._driver()
        # PyTorch's stable C interface; loaded already, in builds for CUDA.
        library = ctypes.CDLL(str(_torch_folder() / "lib" / "libtorch_cuda.so"))
        functions = [getattr(driver, name) for name in names]
        functions.append(library.aoti_torch_get_current_cuda_stream)
    except (OSError, AttributeError, driver_launch.NotKnown) as error:
        raise NotBuilt(_one_line(str(error))) from error
    return tuple(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)


def build(folder: Path) -> Any:
    """The module, compiled now unless ``folder`` has it; NotBuilt says why there is none.

    Another process may do the same at the same time: each compiles to a file of its own, and puts
    it, once it has been loaded, in the place that all of them look at.
    """
    command = _command()
    try:
        facts = (SOURCE.read_text(encoding="utf-8"), torch.__version__, torch.version.git_version,
                 sysconfig.get_config_var("SOABI"), *command)  # fmt: skip
        name = hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:16]
        path = folder / f"native-{name}.so"
        if path.exists():
            try:
                return _load(path)
            except ImportError:
                # A damaged one is replaced.
                pass
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as building:
            made = Path(building) / path.name
            _compile(command, made)
            module = _load(made)
            os.replace(made, path)
        return module
    except (OSError, ImportError) as error:
        raise NotBuilt(_one_line(f"{type(error).__name__}: {error}")) from error


def _command() -> list[str]:
    """The compiler and its arguments, but for the files that it reads and writes."""
    torch_folder = _torch_folder()
    include = torch_folder / "include"
    return [
        *shlex.split(os.environ.get("CXX") or "g++"),
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        f"-I{sysconfig.get_path('include')}",
        f"-L{torch_folder / 'lib'}",
    ]


def _compile(command: list[str], made: Path) -> None:
    if shutil.which(command[0]) is None:
        raise NotBuilt(f"no C++ compiler: {command[0]} is not found (CXX names another)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise NotBuilt(f"no Python.h in {sysconfig.get_path('include')}; install Python's headers")
    libraries = ("-ltorch_python", "-ltorch_cpu", "-lc10")
    try:
        run = subprocess.run(
            [*command, str(SOURCE), "-o", str(made), *libraries],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"{command[0]} took more than {_BUILD_TIMEOUT_S} s") from error
    if run.returncode:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        reason = next((line for line in lines if "error" in line.lower()), lines[-1])
        raise NotBuilt(_one_line(f"{command[0]}: {reason}"))


def _load(path: Path) -> Any:
    loader = ExtensionFileLoader("kernels.flash._native", str(path))
    spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
