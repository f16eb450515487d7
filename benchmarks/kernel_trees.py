"""Times the attention kernels of several source trees in turns, beside other backends.

Run as ``python -m benchmarks.kernel_trees [OPTIONS] NAME[=FOLDER] ...`` in the repository. An arm
is NAME=FOLDER, the ``--backend`` of the package ``kernels`` in FOLDER (a worktree, or what
``git archive REVISION kernels`` unpacks), or the name of another backend, of this tree. Each runs
in a process of its own and on the same inputs, bfloat16 on a GPU and float32 on a CPU; one
measures while the others wait, in rounds whose order is drawn anew, as a GPU at its power limit is
slower after an arm that has heated it. L2 is emptied before every pass.

Prints for each shape and arm the median over rounds of forward and backward; the ratio, the median
over rounds of its time over the first arm's; and the range: largest minus smallest over median. Two
passes whose gradients differ in a bit, and sums of |dq|, |dk| or |dv| that are off by 1% from the
first arm's, are named; that is no test.
Shapes are BxH:H_kvxSxD:D_v, where H_kv and D_v, of fewer columns of values, may be left out, and
/full or /window=W for another mask; with
/packed at the end the sequences are packed, with /ragged they have unequal lengths, too, and as
many pairs as the dense batch, and with /skewed the first has half of all tokens. Exits with 1 if an
arm failed, or does not take one of the shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness.tasks.lengths import ragged_lengths
from kernels import BACKENDS, Attention, AttentionProblem, AttentionSpec, Packing

ROOT = Path(__file__).parents[1]

SHAPES = (
    *("1x16x16384x64", "1x16x16384x128", "4x16x4096x64", "4x16x4096x128", "8x12x1024x64"),
    *("1x1x32768x64", "1x1x32768x128", "1x32:8x8192x128", "1x8x8192x256"),
    *("1x32:8x65536x128/window=1024", "1x16x16384x128/full"),
)

PASSES = ("forward", "backward")
FLUSH_BYTES = 256 << 20
"""Several times the L2 cache of any GPU so far."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Shape:
    """One call."""

    text: str
    batch_size: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    packing: str = "none"
    """Or "packed", "ragged" or "skewed"."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        if self.packing == "ragged":
            return ragged_lengths(self.batch_size, self.tokens, seed=0)
        if self.packing == "skewed":
            return skewed_lengths(self.batch_size, self.tokens)
        return [self.tokens] * self.batch_size


def skewed_lengths(num_sequences: int, tokens: int) -> list[int]:
    """As many tokens as ``num_sequences`` of ``tokens``, half of them in the first sequence."""
    if num_sequences == 1:
        return [tokens]
    total = num_sequences * tokens
    others = max(1, total // 2 // (num_sequences - 1))
    return [total - others * (num_sequences - 1), *[others] * (num_sequences - 1)]


def shape_of(text: str) -> Shape:
    """As the command line has it; raises argparse.ArgumentTypeError."""
    mask, packing = r"(/full|/window=(\d+))?", "(?:/(packed|ragged|skewed))?"
    found = re.fullmatch(r"(\d+)x(\d+)(?::(\d+))?x(\d+)x(\d+)(?::(\d+))?" + mask + packing, text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text}: must be like 1x32:8x8192x128/window=1024 or 1x16x4096x192:128, or with /full,"
            " /packed, /ragged or /skewed"
        )
    batch_size, heads, kv_heads, tokens, head_dim = (
        int(found[i]) for i in (1, 2, 3 if found[3] else 2, 4, 5)
    )
    if min(batch_size, heads, kv_heads, tokens, head_dim) < 1 or heads % kv_heads:
        raise argparse.ArgumentTypeError(f"{text}: sizes must be positive, and H_kv divide H")
    if found[6] and int(found[6]) >= head_dim:
        raise argparse.ArgumentTypeError(f"{text}: D_v must be less than D, or left out")
    return Shape(
        text=text,
        batch_size=batch_size,
        heads=heads,
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        value_dim=int(found[6]) if found[6] else None,
        causal=found[7] != "/full",
        window=int(found[8]) if found[8] else None,
        packing=found[9] or "none",
    )


def serve(backend: str, calls: int, passes: Sequence[str]) -> None:
    """The process of one arm: answers each line, a shape or a request to measure, with one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    attention = BACKENDS[backend].target(name=backend).role(Attention)
    scratch = torch.empty(FLUSH_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def milliseconds(run: Callable[[], object]) -> float:
        run()
        times = []
        events = []
        for _ in range(calls):
            scratch.zero_()
            if device == "cuda":
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                pair[0].record()
                run()
                pair[1].record()
                events.append(pair)
            else:
                started = time.perf_counter()
                run()
                times.append((time.perf_counter() - started) * 1e3)
        if device == "cuda":
            torch.cuda.synchronize()
            times = [start.elapsed_time(end) for start, end in events]
        return statistics.median(times)

    def prepare(shape: Shape) -> dict[str, Callable[[], Any]]:
        lengths = shape.lengths
        problem = AttentionProblem(
            batch_size=shape.batch_size,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            q_len=max(lengths),
            kv_len=max(lengths),
            head_dim=shape.head_dim,
            value_dim=shape.value_dim,
            dtype=str(dtype).removeprefix("torch."),
            device=device,
            causal=shape.causal,
            needs_grad=True,
            window=shape.window,
            packed=shape.packing != "none",
        )
        if reason := attention.why_unsupported(problem):
            raise ValueError(reason)
        torch.manual_seed(0)
        packing = None
        of_queries, of_keys = (
            (sum(lengths), n) if problem.packed else (shape.batch_size, n, shape.tokens)
            for n in (shape.heads, shape.kv_heads)
        )
        if problem.packed:
            ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
            packing = Packing(
                cu_seqlens_q=ends,
                cu_seqlens_k=ends,
                max_q_len=problem.q_len,
                max_kv_len=problem.kv_len,
            )
        q, k, v, do = (
            torch.randn(*size, columns, device=device, dtype=dtype)
            for size, columns in (
                *((of_queries, shape.head_dim), (of_keys, shape.head_dim)),
                *((of_keys, problem.v_dim), (of_queries, problem.v_dim)),
            )
        )
        inputs = [x.requires_grad_() for x in (q, k, v)]
        spec = AttentionSpec(
            causal=shape.causal,
            scale=shape.head_dim**-0.5,
            window=shape.window,
            packing=packing,
        )
        o = attention.attend(q, k, v, spec)
        return {
            "forward": lambda: attention.attend(q, k, v, spec),
            "backward": lambda: torch.autograd.grad(o, inputs, do, retain_graph=True),
        }

    runs: dict[str, Callable[[], Any]] = {}
    for line in sys.stdin:
        try:
            if line.strip():
                runs.clear()
                runs = prepare(shape_of(line.strip()))
                first, second = runs["backward"](), runs["backward"]()
                answer = {
                    "sums": [x.double().abs().sum().item() for x in first],
                    "same": all(map(torch.equal, first, second)),
                }
            else:
                answer = {name: milliseconds(runs[name]) for name in passes}
        # Whatever a kernel raises is its arm's result, and the others go on.
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(answer), flush=True)


@dataclass(kw_only=True, slots=True)
class Arm:
    """One process, its answers on the shape at hand, and why it takes no part in it."""

    name: str
    process: subprocess.Popen[str]
    patience_s: float
    first: dict[str, Any] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None

    def ask(self, line: str) -> None:
        """Without waiting: arms compile at the same time."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What the process prints next; an ``error`` if it ends or hangs, for good."""
        assert self.process.stdout is not None
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.stop()

        timer = threading.Timer(self.patience_s, give_up)
        timer.start()
        try:
            # Libraries may print, too.
            line = next((line for line in self.process.stdout if line.startswith("{")), "")
        finally:
            # Python does not end before its timers do, not by Ctrl-C either.
            timer.cancel()
        if is_late.is_set():
            found = {"error": f"no answer in {self.patience_s:g} s"}
        else:
            found = json.loads(line) if line else {"error": "its process has ended"}
        self.error = found.get("error")
        return found

    def stop(self) -> None:
        """Kill the process, and what it has started: it leads a session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def works(self) -> bool:
        return self.error is None


def start(text: str, arguments: argparse.Namespace) -> Arm:
    """The process of NAME=FOLDER or of a backend's name."""
    name, equals, folder = text.partition("=")
    tree = Path(folder).resolve() if equals else ROOT
    paths = [str(tree), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # By its path, since with -m the package kernels of the current folder would come first.
    backend = arguments.backend if equals else name
    process = subprocess.Popen(
        [
            *(sys.executable, __file__, "--serve", backend, "--calls", str(arguments.calls)),
            *("--passes", *arguments.passes),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        text=True,
        # Ctrl-C is for this process alone, which then ends the others.
        start_new_session=True,
    )
    return Arm(name=name, process=process, patience_s=arguments.patience_s)


def measure(arms: list[Arm], shape: Shape, rounds: int) -> None:
    """Fill in the answers of each arm on one shape."""
    for arm in arms:
        arm.rounds, arm.first = [], {}
        arm.error = None if arm.process.poll() is None else "its process has ended"
        if arm.works:
            arm.ask(shape.text)
    for arm in arms:
        if arm.works:
            arm.first = arm.answer()
    orders = random.Random(shape.text)
    for _ in range(rounds):
        for arm in orders.sample(arms, len(arms)):
            if arm.works:
                arm.ask("")
                found = arm.answer()
                if arm.works:
                    arm.rounds.append(found)


def lines_of(arms: list[Arm], passes: Sequence[str] = PASSES) -> Iterator[str]:
    """The rows of one shape."""
    first = next((arm for arm in arms if arm.rounds), None)
    for arm in arms:
        if first is None or not arm.rounds:
            yield f"    {arm.name:<24}{arm.error}"
            continue
        row = f"    {arm.name:<24}"
        for name in passes:
            times = [answer[name] for answer in arm.rounds]
            median = statistics.median(times)
            # An arm that failed in between has fewer rounds.
            pairs = zip(arm.rounds, first.rounds, strict=False)
            ratio = statistics.median(own[name] / other[name] for own, other in pairs)
            spread = (max(times) - min(times)) / median
            row += f"{name:>10} {median:9.4f} ms  ratio {ratio:5.3f}  range {spread:5.3f}"
        notes = ["two passes differ"] if not arm.first["same"] else []
        sums = zip(arm.first["sums"], first.first["sums"], strict=True)
        if any(abs(own - other) > 0.01 * abs(other) for own, other in sums):
            notes.append("gradients of another size")
        yield "  ".join([row, *notes])


def at_least_one(text: str) -> int:
    """As the command line has it; raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number from 1 on")
    return int(text)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.kernel_trees",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("arms", nargs="*", metavar="NAME[=FOLDER]")
    made.add_argument("--backend", default="flash_triton", help="of NAME=FOLDER (flash_triton)")
    made.add_argument("--shapes", nargs="+", type=shape_of, metavar="SHAPE")
    made.add_argument("--rounds", type=at_least_one, default=7, help="of each shape (7)")
    made.add_argument("--calls", type=at_least_one, default=20, help="of each pass in a round (20)")
    made.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    made.add_argument("--limit-s", type=float, help="after which no further shape starts")
    made.add_argument("--patience-s", type=float, default=300.0, help="with one answer (300)")
    made.add_argument("--serve", help=argparse.SUPPRESS)
    return made


def main() -> int:
    arguments = parser().parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.calls, arguments.passes)
        return 0
    if not arguments.arms:
        parser().error("name the trees to compare, as NAME=FOLDER")
    for text in arguments.arms:
        name, equals, folder = text.partition("=")
        if equals and not (Path(folder) / "kernels").is_dir():
            parser().error(f"{text}: {folder} has no folder kernels")
        try:
            backend = arguments.backend if equals else name
            BACKENDS[backend].target(name=backend).role(Attention)
        except ValueError as error:
            parser().error(str(error))
    started = time.monotonic()
    failed = False
    arms = [start(text, arguments) for text in arguments.arms]
    try:
        for shape in arguments.shapes or map(shape_of, SHAPES):
            if arguments.limit_s and time.monotonic() - started > arguments.limit_s:
                print(f"{shape.text}: not measured, {arguments.limit_s:g} s are over")
                continue
            measure(arms, shape, arguments.rounds)
            print(shape.text, *lines_of(arms, arguments.passes), sep="\n", flush=True)
            failed = failed or not all(arm.works for arm in arms)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"output: {error.strerror}", file=sys.stderr)
        # Python writes at its end what is left, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        for arm in arms:
            arm.stop()
            arm.process.wait()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
