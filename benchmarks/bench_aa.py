"""How often real measurements of the same code are called different, and a planted idling is found.

``python -m benchmarks.bench_aa [--device cuda] [--planted 2] [--results FOLDER]`` runs the real
command with backends that it registers from a folder outside the repository: two names for the
same attention, and one that idles a stated part longer after it (``torch.cuda._sleep`` behind the
kernel, or a busy wait on a CPU). It prints a table of three comparisons:

- turns: the two names of the same code, measured in turns until decided;
- runs: one name in two runs of the command, one after the other, by ``attnbench-compare``;
- planted: the code against the one that idles, in turns until decided.

It exits with 1 where a floor is missed: at most one of the pairs of ``turns`` and of ``runs`` is
FASTER or SLOWER (none with a GPU), and 9 in 10 of ``planted`` are SLOWER. ``--load 2`` keeps two
cores busy meanwhile. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PLUGIN = '''
"""The same attention under two names, and under a third that idles longer."""

import os
import time
from dataclasses import dataclass

import torch

from kernels.backend import attention_backend
from kernels.backends.sdpa import Sdpa

PLANTED = float(os.environ["AA_PLANTED"])
FLUSH_BYTES = 256 * 2**20


@attention_backend("aa_one")
@attention_backend("aa_two")
@dataclass(kw_only=True, slots=True)
class Same(Sdpa):
    """PyTorch's attention."""


@attention_backend("aa_slow")
@dataclass(kw_only=True, slots=True)
class Slow(Sdpa):
    """PyTorch's attention, and then a stated part of its time in which nothing is done."""

    def attend(self, q, k, v, spec):
        if q.device.type == "cpu":
            began = time.perf_counter()
            o = Sdpa.attend(self, q, k, v, spec)
            ended = time.perf_counter()
            until = ended + PLANTED * (ended - began)
            while time.perf_counter() < until:
                pass
            return o
        key = (tuple(q.shape), tuple(k.shape), q.dtype, spec.causal)
        if key not in CYCLES:
            CYCLES[key] = self._idle_cycles(q, k, v, spec)
        o = Sdpa.attend(self, q, k, v, spec)
        torch.cuda._sleep(CYCLES[key])
        return o

    def _idle_cycles(self, q, k, v, spec):
        """Cycles of the planted part, by this device's clock, with an empty L2 as in the bench."""
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=q.device)
        call = lambda: Sdpa.attend(self, q, k, v, spec)
        call_ms = timed_ms(call, flush, q.device)
        sleep_ms = timed_ms(lambda: torch.cuda._sleep(1_000_000), flush, q.device)
        return max(1, round(PLANTED * call_ms / sleep_ms * 1_000_000))


CYCLES = {}


def timed_ms(call, flush, device):
    """The median of 20 calls by CUDA events, after 5 untimed ones."""
    pairs = []
    for index in range(25):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    times = sorted(begin.elapsed_time(end) for begin, end in pairs[5:])
    return times[len(times) // 2]
'''

SHAPES = {
    "cpu": ["task.num_heads=4", "batch_size=1"],
    "cuda": ["task.num_heads=16", "batch_size=4", "precision=bf16"],
}
LENGTHS = {
    "cpu": "128,160,192,224,256,320,384,448,512",
    "cuda": "1024,1536,2048,3072,4096,5120,6144,8192,10240,12288",
}
SAME_POINTS = ["task.head_dim=32,64", "task.causal=true,false"]
"""With the lengths 36 pairs on a CPU and 40 on a GPU."""

PLANTED_POINTS = ["task.head_dim=64", "task.causal=false"]
PLANTED_LENGTHS = {**LENGTHS, "cpu": f"{LENGTHS['cpu']},640"}
"""10 pairs with :data:`PLANTED_POINTS`."""

WORDS = ("FASTER", "SLOWER", "SAME", "UNCLEAR")


class Command:
    """The real command, in a folder with the plugin."""

    def __init__(self, folder: Path, device: str, planted: float) -> None:
        package = folder / "aa_plugin"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "backends.py").write_text(PLUGIN)
        self._folder = folder
        self._keys = [
            "task=attention",
            "task.mode=forward",
            f"device={device}",
        ]
        self._keys += SHAPES[device]
        paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "ATTNBENCH_PLUGINS": "aa_plugin.backends",
            "AA_PLANTED": str(planted),
        }

    def measure(self, attention: str, results: str, *arguments: str) -> Path:
        """Measure attention at all lengths; returns the results folder."""
        path = self._folder / results
        command = [sys.executable, "-m", "harness", *self._keys, f"attention={attention}"]
        command += [f"results={path}", *arguments]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)
        return path

    def compare(self, a: Path, b: Path) -> Counter[str]:
        """The verdicts of ``attnbench-compare A B``."""
        output = self._folder / "compared"
        code = "import sys; from harness.commands.compare import main; sys.exit(main())"
        command = [sys.executable, "-c", code, str(a), str(b), f"--output={output}"]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)
        (table,) = output.rglob("*.csv")
        return verdicts(table)


def verdicts(table: Path) -> Counter[str]:
    """The words in a table of comparisons."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return Counter(row.get("outcome") or row["verdict"] for row in rows)


def in_turns(command: Command, other: str, points: list[str], keys: list[str]) -> Counter[str]:
    """The verdicts on ``aa_one`` and another backend, measured in turns until decided."""
    path = command.measure(f"aa_one,{other}", f"with-{other}", "until=decided", *points, *keys)
    (table,) = path.glob("sweeps/*/tables/comparison.csv")
    return verdicts(table)


def two_runs(command: Command, points: list[str], keys: list[str]) -> Counter[str]:
    """The verdicts on two runs of the same cases."""
    paths = [
        command.measure("aa_one", name, "interleave=5", *points, *keys)
        for name in ("first-run", "second-run")
    ]
    return command.compare(*paths)


@contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep cores busy until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--planted", type=float, help="percent; 10 on a CPU, 2 on a GPU")
    parser.add_argument("--budget", type=float, default=60.0, help="budget_s of each command")
    parser.add_argument("--passes", type=int, default=50, help="task.measure_steps")
    parser.add_argument("--only", nargs="+", choices=("turns", "runs", "planted"))
    parser.add_argument("--load", type=int, default=0, help="cores to keep busy meanwhile")
    parser.add_argument("--results", type=Path, help="keeps the records; a temporary folder if not")
    parser.add_argument("--lengths", help="sequence lengths, separated by commas")
    options = parser.parse_args()
    planted = options.planted or (10.0 if options.device == "cpu" else 2.0)
    passes = [f"task.measure_steps={options.passes}", "task.warmup_steps=3"]
    turns = [*passes, f"budget_s={options.budget:g}"]
    most_false = 1 if options.device == "cpu" else 0
    missed = False
    with tempfile.TemporaryDirectory(prefix="bench-aa-") as temporary, busy(options.load):
        folder = (options.results or Path(temporary)).resolve()
        command = Command(folder, options.device, planted / 100)
        print(f"{'':<14}{'pairs':>6}" + "".join(f"{word:>9}" for word in WORDS) + "  minutes")
        for name in options.only or ("turns", "runs", "planted"):
            began = time.monotonic()
            among, points = (
                (PLANTED_LENGTHS, PLANTED_POINTS) if name == "planted" else (LENGTHS, SAME_POINTS)
            )
            points = [*points, f"seq_len={options.lengths or among[options.device]}"]
            if name == "runs":
                found = two_runs(command, points, passes)
            else:
                found = in_turns(command, "aa_two" if name == "turns" else "aa_slow", points, turns)
            number = sum(found.values())
            label = f"planted {planted:g}%" if name == "planted" else name
            counts = "".join(f"{found[word]:>9}" for word in WORDS)
            minutes = (time.monotonic() - began) / 60
            print(f"{label:<14}{number:>6}{counts}{minutes:>9.1f}", flush=True)
            false = found["FASTER"] + found["SLOWER"]
            good = found["SLOWER"] >= 0.9 * number if name == "planted" else false <= most_false
            missed |= not good
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
