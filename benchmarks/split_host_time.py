"""The host's time for a pass of attention on split sequences: no kernels, and nobody to wait for.

Run as ``python -m benchmarks.split_host_time [--ranks 2,4] [--only zigzag,ring]
[--against FOLDER] [--record FILE]``, on any machine with a CPU.

One process is one rank of a group whose transports deliver at once (torch's ``fake`` backend), and
the kernel returns empty tensors. What remains is what the host does itself: plans, checks,
autograd's nodes, transports, merges. Of each scheme, dense and packed, and of a forward pass as of
forward and backward together, a row gives

    ms          CPU time of this thread, the median and the quartiles; other work on the machine
                makes it longer, never shorter
    calls       Python functions entered, and functions of C called from Python: the same number in
                every run, so that two revisions compare by it
    launches    operations that would start a kernel on a device: neither views nor allocations
    kernels     attention calls; with the launches, all work that a GPU would be given
    messages    collectives and messages

``--against`` names another checkout, whose passes take turns with this one's, case by case.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import gc
import importlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCAL_LEN, HEADS, KV_HEADS, HEAD_DIM = 16, 4, 2, 8
"""A rank's tokens of a dense batch, and the heads."""
PACKED = ("ring", "zigzag", "striped", "llama3", "zigzag_llama3", "ulysses", "ulysses_zigzag")
SYMMETRIC = ("ring", "zigzag", "striped", "llama3", "zigzag_llama3", "ulysses")
"""Schemes that can read peers' memory, as they do on GPUs of one host."""
WARM_UP, PASSES, SAMPLES = 5, 20, 5
ROOT = Path(__file__).resolve().parents[1]

Pass = Callable[[], Any]


@dataclass(kw_only=True, frozen=True)
class Case:
    """A scheme on some ranks, as one row of the table."""

    scheme: str
    packed: bool
    num_ranks: int
    transport: str = "auto"
    window: int | None = None
    through: str = "bound"
    """``bound``, or ``split_attention`` with its checks."""

    @property
    def name(self) -> str:
        words = [self.scheme, "packed" if self.packed else "dense"]
        words += [f"window={self.window}"] if self.window else []
        words += ["symmetric"] if self.transport == "symmetric" else []
        words += [self.through] if self.through != "bound" else []
        return " ".join(words)


def cases(num_ranks: int) -> list[Case]:
    """All cases on so many ranks."""
    found = []
    for packed in (False, True):
        for scheme in (*PACKED, "documents"):
            if scheme == "documents" and not packed:
                continue
            if scheme == "ulysses_zigzag" and num_ranks < 4:
                # A mesh of one axis is one of the others.
                continue
            found.append(Case(scheme=scheme, packed=packed, num_ranks=num_ranks))
        for scheme in (*SYMMETRIC, *(("documents",) if packed else ())):
            found.append(
                Case(scheme=scheme, packed=packed, num_ranks=num_ranks, transport="symmetric")
            )
        found.append(Case(scheme="ring", packed=packed, num_ranks=num_ranks, window=8))
        found.append(
            Case(scheme="zigzag", packed=packed, num_ranks=num_ranks, through="split_attention")
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.split_host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--only", default="", help="schemes, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each case (default: 3)")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--record", type=Path, help="a CSV file for all rows")
    parser.add_argument("--profile", help="the functions that one case (a name of the table) calls")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve()
    chosen = [case for ranks in arguments.ranks.split(",") for case in cases(int(ranks))]
    if arguments.only:
        chosen = [case for case in chosen if case.scheme in arguments.only.split(",")]
    if arguments.profile:
        chosen = [case for case in chosen if case.name == arguments.profile]
        print_profile(chosen[-1])
        return 0
    folders = [ROOT] if arguments.against is None else [arguments.against.resolve(), ROOT]
    rows = compare(folders, chosen, arguments.rounds)
    print_table(rows, [*("before", "after")][-len(folders) :])
    if arguments.record:
        with arguments.record.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return 0


# The parent: a process for each checkout, which measures one case after another.


def compare(folders: list[Path], chosen: list[Case], num_rounds: int) -> list[dict[str, Any]]:
    """A row for each case, phase and checkout, the checkouts measured in turns."""
    children = [_start(folder) for folder in folders]
    rows = []
    for case in chosen:
        found: list[list[dict[str, Any]]] = [[] for _ in folders]
        for turn in range(num_rounds):
            # Each is the first one as often as the others.
            order = list(range(len(folders)))
            for place in order if turn % 2 == 0 else reversed(order):
                found[place].append(_ask(children[place], case, folders[place]))
        for phase in ("forward", "both"):
            for name, answers in zip(("before", "after")[-len(folders) :], found, strict=True):
                times = sorted(ms for answer in answers for ms in answer[phase]["ms"])
                low, _, high = statistics.quantiles(times, n=4)
                rows.append(
                    {
                        "case": case.name,
                        "ranks": case.num_ranks,
                        "phase": "forward" if phase == "forward" else "forward + backward",
                        "revision": name,
                        "ms": round(statistics.median(times), 3),
                        "low_ms": round(low, 3),
                        "high_ms": round(high, 3),
                        **answers[0][phase]["counts"],
                    }
                )
        print(f"{case.num_ranks} {case.name}", file=sys.stderr)
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
        child.wait()
    return rows


def _start(folder: Path) -> subprocess.Popen[str]:
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(folder)!r}]; sys.argv[1:] = ['--serve']; "
        f"runpy.run_path({str(Path(__file__).resolve())!r}, run_name='__main__')"
    )
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
    )


def _ask(child: subprocess.Popen[str], case: Case, folder: Path) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(vars(case)) + "\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit(
            f"{case.name} on {case.num_ranks} ranks: {folder} cannot run it (its error is above); "
            "leave the scheme out with --only"
        )
    answer: dict[str, Any] = json.loads(line)
    return answer


def print_table(rows: list[dict[str, Any]], revisions: list[str]) -> None:
    """Rows of one case beside each other, one line for each phase."""
    columns = ("calls", "launches", "kernels", "messages")
    head = "".join(f"{name + ' ms':>12}{'quartiles':>14}" for name in revisions)
    head += "".join(f"{column:>{6 + 6 * len(revisions)}}" for column in columns)
    print(f"{'ranks':>5}  {'case':<34}{'phase':<20}{head}")
    by_line: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_line.setdefault((row["ranks"], row["case"], row["phase"]), []).append(row)
    for (ranks, name, phase), found in by_line.items():
        line = f"{ranks:>5}  {name:<34}{phase:<20}"
        for row in found:
            quartiles = f"{row['low_ms']:.2f}-{row['high_ms']:.2f}"
            line += f"{row['ms']:>12.3f}{quartiles:>14}"
        for column in columns:
            values = " -> ".join(str(row[column]) for row in found)
            line += f"{values:>{6 + 6 * len(revisions)}}"
        print(line)


# The child: one rank.


def serve() -> int:
    """Measure the cases that come as lines of JSON, each with an answer of one line."""
    import torch

    torch.set_num_threads(1)
    # What torch brought with it is no garbage, and would be looked through before each sample.
    gc.freeze()
    for line in sys.stdin:
        case = Case(**json.loads(line))
        with _passes(case) as (forward, both):
            answer = {"forward": _measured(forward), "both": _measured(both)}
        print(json.dumps(answer), flush=True)
    return 0


def print_profile(case: Case) -> None:
    """The functions that a forward and backward pass spends most time in."""
    with _passes(case) as (_, both):
        for _ in range(WARM_UP):
            both()
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(PASSES):
            both()
        profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def _measured(run: Pass) -> dict[str, Any]:
    times = []
    for _ in range(WARM_UP):
        run()
    for _ in range(SAMPLES):
        gc.collect()
        start = time.thread_time()
        for _ in range(PASSES):
            run()
        times.append((time.thread_time() - start) / PASSES * 1e3)
    return {"ms": times, "counts": _counts(run)}


def _counts(run: Pass) -> dict[str, int]:
    """Calls of functions, and operations by kind, of one pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    gc.disable()
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    gc.enable()
    calls = sum(entry.callcount for entry in profile.getstats())  # type: ignore[attr-defined]
    found: Counter[str] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            found[_kind(func, result)] += 1
            return result

    NULL_CALLS.clear()
    with Count():
        run()
    return {
        "calls": calls,
        "launches": found["launch"],
        "kernels": len(NULL_CALLS),
        "messages": found["message"],
    }


def _kind(operation: Any, result: Any) -> str:
    namespace, name = operation._schema.name.split("::")
    if namespace in ("c10d", "_c10d_functional"):
        return "message"
    if name.startswith(("empty", "new_empty", "detach", "alias")) or operation.is_view:
        return "free"
    empty = hasattr(result, "numel") and not result.numel()
    return "free" if empty or name in ("lift_fresh", "_reshape_alias", "_unsafe_view") else "launch"


NULL_CALLS: list[str] = []
"""The null kernel's calls."""


@contextmanager
def _passes(case: Case) -> Iterator[tuple[Pass, Pass]]:
    """A forward pass that keeps what backward needs, and forward and backward together."""
    import torch
    import torch.distributed as dist

    # Registers the backend, whose options are private.
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    options = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup.Options()
    _register()
    # The last rank: under a causal mask no scheme gives it less to do than another.
    rank = case.num_ranks - 1
    dist.init_process_group(
        "fake",
        store=dist.HashStore(),
        rank=rank,
        world_size=case.num_ranks,
        pg_options=options,
    )
    try:
        with _attend(case) as (attend, length):
            shape = (length,) if case.packed else (1, length)
            q, k, v, do = (
                torch.randn(*shape, heads, HEAD_DIM).bfloat16()
                for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            )
            if not case.packed and case.through == "bound":
                q, k, v, do = (x.transpose(1, 2).contiguous() for x in (q, k, v, do))
            for x in (q, k, v):
                x.requires_grad_()

            def forward() -> Any:
                return attend(q, k, v)

            def both() -> Any:
                return torch.autograd.grad(attend(q, k, v), (q, k, v), do)

            yield forward, both
    finally:
        dist.destroy_process_group()


@contextmanager
def _attend(case: Case) -> Iterator[tuple[Callable[..., Any], int]]:
    """The scheme's function of q, k and v, and a rank's number of tokens."""
    import torch
    import torch.distributed as dist

    from kernels import BACKENDS, AttentionSpec, Packing
    from parallel.split import bound_attention

    # Several documents on a rank, and one that lies on several ranks.
    lengths = [8 * case.num_ranks, 4 * case.num_ranks, 4 * case.num_ranks]
    offsets = [0, lengths[0], lengths[0] + lengths[1], sum(lengths)]
    options = {} if case.transport == "auto" else {"transport": case.transport}
    if case.through != "bound":
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        packing = {"cu_seqlens": cu_seqlens} if case.packed else {}
        with bound_attention(case.scheme, kernel="null", **options) as attend:
            yield (
                lambda q, k, v: attend(q, k, v, causal=True, window=case.window, **packing),
                LOCAL_LEN,
            )
        return
    entry = BACKENDS[case.scheme]
    scheme = entry.target(name=case.scheme, kernel="null", **entry.preset, **options)
    packed = None
    if case.packed:
        starts = torch.tensor(offsets, dtype=torch.int32)
        packed = Packing(
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_q_len=max(lengths),
            max_kv_len=max(lengths),
        )
    spec = AttentionSpec(causal=True, scale=HEAD_DIM**-0.5, packing=packed, window=case.window)
    with scheme.bind(dist.group.WORLD, torch.device("cpu")) as bound:
        yield lambda q, k, v: bound.attend(q, k, v, spec), LOCAL_LEN


def _register() -> None:
    """Make ``null`` a backend: results of the right shapes, which nothing computes."""
    from kernels.backend import BACKENDS, Attention, attention_backend
    from kernels.problem import MASKS

    if "null" in BACKENDS:
        return

    @dataclass(kw_only=True, slots=True)
    class Null(Attention):
        takes = frozenset((*MASKS, "shift"))

        def forward(self, q: Any, k: Any, v: Any, spec: Any) -> Any:
            NULL_CALLS.append("forward")
            shape = q.shape[:-1] if spec.packing is None else (q.shape[1], q.shape[0])
            return q.new_empty(q.shape), q.new_empty(shape, dtype=_float32())

        def forward_onto(self, o: Any, lse: Any, q: Any, k: Any, v: Any, spec: Any) -> Any:
            # As a kernel that starts from them.
            NULL_CALLS.append("forward")
            return o, lse

        def backward(self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, spec: Any) -> Any:
            NULL_CALLS.append("backward")
            return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    attention_backend("null")(Null)


def _float32() -> Any:
    import torch

    return torch.float32


if __name__ == "__main__":
    sys.exit(main())
