"""``attnbench fits``: largest batch, longest sequence and fewest GPUs of each strategy."""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table

from harness.cases import format as fmt
from harness.commands.output import begin_measuring
from harness.commands.questions import Asked, asked
from harness.predictions.capacity import GIB
from harness.recommend.answer import CAPTURED_MEMORY
from harness.recommend.bisection import Edge
from harness.recommend.limits import Limits, limits_of
from harness.recommend.measuring import Bench, label_of
from harness.recommend.probing import Tried, tried, until
from harness.recommend.question import Question
from harness.run.launcher import LaunchError
from harness.run.workers.worker_group import WorkerStartError
from harness.terminal import PrintableConsole
from models import accounting
from models.variants import PLAIN

HELP = """\
Usage: attnbench fits model=NAME [machine=h200] [gpus=8] [seq_len=8192] [KEY=VALUE...]
       attnbench fits model=NAME measure=true [budget_s=600] [KEY=VALUE...]

Says for each strategy of training what the memory of a machine allows, by prediction: the fewest
GPUs for one sequence of seq_len, the largest batch of such sequences in one step of all gpus, and
the longest sequence. Keys pin what is tried: parallel=fsdp checkpoint=block parallel.tp=1.
measure=true tries the last two on the GPUs of this host, to within 2%.
"""


def main(arguments: list[str]) -> int:
    """The subcommand; ValueError in one line for a wrong argument."""
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    asked_for = asked("fits", arguments)
    question = asked_for.question
    measures = asked_for.measure and any(word.startswith("measure=") for word in arguments)
    if measures and question.machine.device == "cpu":
        raise ValueError(ON_A_CPU)
    if "checkpoint" not in question.typed:
        question.typed["checkpoint"] = list(CHECKPOINTS)
    rows = limits_of(question)
    if not rows:
        raise ValueError(_why_no_row(question))
    console = PrintableConsole(soft_wrap=False)
    console.print(opening(question), highlight=False)
    console.print()
    found = _tried(asked_for, rows, console) if measures else None
    console.print(_table(rows, found, question))
    if question.is_captured:
        console.print(f"\n{CAPTURED_MEMORY}", highlight=False)
    if found and not all(edge.is_sure for one in found for edge in _edges(one)):
        console.print("\n>= fits, and the time was over; budget_s= gives more", highlight=False)
    return 0


def _why_no_row(question: Question) -> str:
    """Why none of the wanted strategies can train."""
    names = ",".join(map(str, question.pinned("parallel", [])))
    if question.is_captured:
        which = f"no step of parallel={names}" if names else "no step"
        return (
            f"task.cuda_graph=true: {which} can be captured in CUDA graphs on "
            f"{question.machine.name}"
        )
    return f"parallel={names}: needs several GPUs; leave it out with gpus=1"


ON_A_CPU = (
    "measure=true: a host without memory left ends processes instead of refusing it, so that "
    "fits measures on GPUs alone; leave measure= out for predictions"
)

BUDGET_S = 600.0
"""Seconds for trying, about, unless budget_s= says otherwise."""


def _tried(wanted: Asked, rows: list[Limits], console: PrintableConsole) -> list[Tried]:
    """Each row's limits, tried on this host; ValueError in one line where that fails."""
    begin_measuring()
    question = wanted.question
    budget_s = BUDGET_S if wanted.budget_s is None else wanted.budget_s
    bench = Bench(
        results=Path(wanted.results).expanduser(),
        launcher=question.choose("launcher", {}),
        budget_s=budget_s,
        timeout_s=wanted.timeout_s,
        console=console,
        command=question.asked,
        label=label_of(question, "fits"),
    )
    fits = until(time.monotonic() + budget_s, bench.fits)
    try:
        return [tried(row, fits) for row in rows]
    except (LaunchError, WorkerStartError, OSError) as error:
        raise ValueError(str(error)) from error


def _edges(found: Tried) -> list[Edge]:
    return [edge for edge in (found.batch, found.longest) if edge is not None]


CHECKPOINTS = ("none", "block")
"""The two ends: all activations are kept, or those between blocks."""


def opening(question: Question) -> str:
    """The model with its parameters and masks, and the machine with its memory."""
    variant, machine = question.variant, question.machine
    count = accounting.count_parameters(question.model, variant)
    sinks = f", {count.sinks:,} of them sinks" if count.sinks else ""
    masks = f"{variant.words()}, " if variant != PLAIN else ""
    usable, whole = machine.usable_bytes / GIB, machine.memory_bytes / GIB
    device = fmt.counted(question.gpus, "GPU") if machine.device == "cuda" else "one CPU"
    return (
        f"{question.model.name}: {parameters(count.total)} parameters{sinks}, {masks}"
        f"{question.precision}, on "
        f"{device} ({machine.name}: {usable:.0f} of {whole:.0f} GiB for tensors)"
    )


def parameters(number: int) -> str:
    """``1.11 M``, ``8.03 B``."""
    return f"{fmt.number(number / 1e9)} B" if number >= 1e9 else f"{fmt.number(number / 1e6)} M"


def _table(rows: list[Limits], found: list[Tried] | None, question: Question) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("checkpoint")
    gpus = "GPUs" if question.machine.device == "cuda" else "ranks"
    table.add_column(f"fewest {gpus}", justify="right")
    table.add_column(f"most sequences of {question.seq_len:,}", justify="right")
    if found is not None:
        table.add_column("tried", justify="right")
    table.add_column("longest sequence", justify="right")
    if found is not None:
        table.add_column("tried", justify="right")
    for place, row in enumerate(rows):
        cells = [
            row.strategy,
            row.checkpoint,
            f"{row.fewest_gpus:,}" if row.fewest_gpus else fmt.ABSENT,
            _number(row.batch),
            _number(row.longest),
        ]
        if found is not None:
            one = found[place]
            cells[4:] = [_edge(one.batch), cells[4], _edge(one.longest)]
        table.add_row(*cells)
    return table


def _number(value: int) -> str:
    return f"{value:,}" if value else "none fits"


def _edge(found: Edge | None) -> str:
    if found is None:
        return fmt.ABSENT
    if found.is_sure:
        return _number(found.number)
    return f">= {found.number:,}" if found.number else fmt.ABSENT
