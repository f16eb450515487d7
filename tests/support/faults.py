"""Attention backends that misbehave, for tests of how the harness handles it.

Loaded through ``ATTNBENCH_PLUGINS=tests.support.faults``. Each name is one misbehaviour; the suffix
``_rank1`` confines it to rank 1, and ``_late`` lets the check pass and misbehaves in the
warm-up, while the other rank waits in a collective of the backward pass.

Two of them talk to the test through the folder in ``ATTNBENCH_TEST_FOLDER``: a backend says
there that it has been called and by which process, and the test says when it may go on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kernels import Attention, AttentionBackend, AttentionProblem, AttentionSpec, attention_backend
from kernels.backends.naive import Naive
from tests.support.daemons import detach

if TYPE_CHECKING:
    # Imported here alone, as every command imports this module: a name taken out of torch loads
    # torch, which takes longer than all else that the command does.
    from torch import Tensor

FOLDER_VARIABLE = "ATTNBENCH_TEST_FOLDER"

# The check of attention alone makes its call twice and then a forward pass with large scores; that
# of a training step, for a model of one layer, two calls.
CALLS_OF_THE_CHECK = 3
CALLS_OF_THE_CHECK_OF_A_STEP = 2

# A forward pass over two ranks is two kernel calls.
CALLS_OF_TWO_RANKS = 2

_callers: dict[int, tuple[AttentionBackend, int]] = {}
"""Backends by identity, with their calls; kept, so that no later case's has the same identity."""


def _count_call(backend: AttentionBackend) -> int:
    """Calls of the backend so far, with this one."""
    _, before = _callers.get(id(backend), (backend, 0))
    _callers[id(backend)] = backend, before + 1
    return before + 1


@attention_backend("fault_raise", kind="raise")
@attention_backend("fault_raise_rank1", kind="raise", rank=1)
@attention_backend(
    "fault_raise_rank1_late", kind="raise", rank=1, good_calls=CALLS_OF_THE_CHECK_OF_A_STEP
)
@attention_backend("fault_raise_late", kind="raise", good_calls=CALLS_OF_THE_CHECK)
@attention_backend("fault_flaky", kind="flaky")
@attention_backend("fault_oom", kind="oom")
@attention_backend("fault_oom_host", kind="oom_host")
@attention_backend("fault_oom_rank1", kind="oom", rank=1)
@attention_backend(
    "fault_oom_rank1_late", kind="oom", rank=1, good_calls=CALLS_OF_THE_CHECK_OF_A_STEP
)
@attention_backend("fault_sigkill", kind="sigkill")
@attention_backend("fault_sigkill_rank1", kind="sigkill", rank=1)
@attention_backend(
    "fault_sigkill_rank1_late", kind="sigkill", rank=1, good_calls=CALLS_OF_THE_CHECK_OF_A_STEP
)
@attention_backend("fault_segfault", kind="segfault")
@attention_backend("fault_exit", kind="exit")
@attention_backend("fault_hang", kind="hang")
@attention_backend("fault_hang_rank1", kind="hang", rank=1)
@attention_backend(
    "fault_hang_rank1_late", kind="hang", rank=1, good_calls=CALLS_OF_THE_CHECK_OF_A_STEP
)
@attention_backend("fault_wrong", kind="wrong")
@attention_backend("fault_nan", kind="nan")
@attention_backend("fault_unsupported", kind="unsupported")
@attention_backend("witness", kind="witness")
@attention_backend("held", kind="held")
@attention_backend("held_daemon", kind="held_daemon")
@dataclass(kw_only=True, slots=True)
class Fault(Attention):
    """Explicit softmax attention with one misbehaviour."""

    kind: str = "witness"
    rank: int | None = None
    """The only rank that misbehaves; None is all of them."""
    good_calls: int = 0
    """Calls that go well first."""

    def supports(self, problem: AttentionProblem) -> str | None:
        return "the test says so" if self.kind == "unsupported" else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        calls = _count_call(self)
        o = _attention(q, k, v, spec.causal, spec.scale)
        if self.rank not in (None, _rank()) or calls <= self.good_calls:
            return o
        return _MISBEHAVIOURS[self.kind](o)


@attention_backend("split_fault_raise", kind="raise")
@attention_backend("split_fault_sigkill", kind="sigkill")
@attention_backend("split_fault_hang", kind="hang")
@attention_backend("split_fault_raise_backward", kind="raise", good_calls=CALLS_OF_TWO_RANKS)
@attention_backend("split_fault_wrong", kind="wrong")
@attention_backend("split_fault_none", kind="none")
@dataclass(kw_only=True, slots=True)
class SplitFault(Naive):
    """A kernel that misbehaves on rank 1 alone, while rank 0 waits for it in a ring."""

    kind: str = "raise"
    good_calls: int = 0
    """Calls, forward and backward, that go well first."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        o, lse = Naive.forward(self, q, k, v, spec)
        return self._fault(o), lse

    def backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = Naive.backward(self, *arguments)
        return self._fault(dq), dk, dv

    def _fault(self, x: Tensor) -> Tensor:
        calls = _count_call(self)
        return _MISBEHAVIOURS[self.kind](x) if _rank() == 1 and calls > self.good_calls else x


def _raise(o: Tensor) -> Tensor:
    raise ValueError("this backend always raises\nand says more on a second line")


def _raise_while_broken(o: Tensor) -> Tensor:
    return _raise(o) if (_folder() / "broken").exists() else o


def _out_of_memory(o: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 PiB.")


def _exhaust_host_memory(o: Tensor) -> Tensor:
    return torch.zeros(2**50)


def _kill_self(o: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return o


def _segfault(o: Tensor) -> Tensor:
    ctypes.string_at(0)
    return o


def _exit(o: Tensor) -> Tensor:
    os._exit(7)


def _hang(o: Tensor) -> Tensor:
    time.sleep(1000)
    return o


def _witness(o: Tensor) -> Tensor:
    """Append this process and the sequence length to ``calls``."""
    with (_folder() / "calls").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {o.shape[-2]}\n")
    return o


def _held(o: Tensor) -> Tensor:
    """Stay, with a child in a session of its own, for as long as ``hold`` exists."""
    _witness(o)
    if (_folder() / "hold").exists():
        code = "import time; time.sleep(1000)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        (_folder() / f"held-{os.getpid()}").write_text(str(child.pid), encoding="utf-8")
        while (_folder() / "hold").exists():
            time.sleep(0.02)
        child.kill()
        child.wait()
    return o


def _daemon(o: Tensor) -> Tensor:
    (_folder() / f"daemon-{detach()}").touch()
    return o


_MISBEHAVIOURS = {
    "raise": _raise,
    "flaky": _raise_while_broken,
    "oom": _out_of_memory,
    "oom_host": _exhaust_host_memory,
    "sigkill": _kill_self,
    "segfault": _segfault,
    "exit": _exit,
    "hang": _hang,
    "none": lambda o: o,
    "wrong": lambda o: o * 1.01,
    "nan": lambda o: o * float("nan"),
    "witness": _witness,
    "held": _held,
    "held_daemon": lambda o: _held(_daemon(o)),
}


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if causal:
        hidden = scores.new_ones(scores.shape[-2:]).triu(diagonal=1).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1) @ v
