"""``attnbench fits``: largest batch, longest sequence and fewest GPUs of each strategy."""

from __future__ import annotations

from rich.table import Table

from harness.cases import format as fmt
from harness.commands.questions import asked
from harness.predictions.capacity import GIB
from harness.recommend.limits import Limits, limits_of
from harness.recommend.question import Question
from harness.terminal import PrintableConsole
from models import accounting

HELP = """\
Usage: attnbench fits model=NAME [machine=h200] [gpus=8] [seq_len=8192] [KEY=VALUE...]

Says for each strategy of training what the memory of a machine allows, by prediction: the fewest
GPUs for one sequence of seq_len, the largest batch of such sequences in one step of all gpus, and
the longest sequence. Keys pin what is tried: parallel=fsdp checkpoint=block parallel.tp=1.
"""


def main(arguments: list[str]) -> int:
    """The subcommand; ValueError in one line for a wrong argument."""
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    asked_for = asked("fits", arguments)
    question = asked_for.question
    if asked_for.measure and any(word.startswith("measure=") for word in arguments):
        raise ValueError(MEASURE)
    if "checkpoint" not in question.typed:
        question.typed["checkpoint"] = list(CHECKPOINTS)
    rows = limits_of(question)
    console = PrintableConsole(soft_wrap=False)
    console.print(opening(question), highlight=False)
    console.print()
    console.print(_table(rows, question))
    return 0


MEASURE = "measure=true: fits only predicts; attnbench recommend measures what it recommends"

CHECKPOINTS = ("none", "block")
"""The two ends: all activations are kept, or those between blocks."""


def opening(question: Question) -> str:
    """The model with its parameters, and the machine with its memory."""
    count, machine = accounting.count_parameters(question.model), question.machine
    usable, whole = machine.usable_bytes / GIB, machine.memory_bytes / GIB
    device = fmt.counted(question.gpus, "GPU") if machine.device == "cuda" else "one CPU"
    return (
        f"{question.model.name}: {parameters(count.total)} parameters, {question.precision}, on "
        f"{device} ({machine.name}: {usable:.0f} of {whole:.0f} GiB for tensors)"
    )


def parameters(number: int) -> str:
    """``1.11 M``, ``8.03 B``."""
    return f"{fmt.number(number / 1e9)} B" if number >= 1e9 else f"{fmt.number(number / 1e6)} M"


def _table(rows: list[Limits], question: Question) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    table.add_column("checkpoint")
    gpus = "GPUs" if question.machine.device == "cuda" else "ranks"
    table.add_column(f"fewest {gpus}", justify="right")
    table.add_column(f"most sequences of {question.seq_len:,}", justify="right")
    table.add_column("longest sequence", justify="right")
    for row in rows:
        table.add_row(
            row.strategy,
            row.checkpoint,
            f"{row.fewest_gpus:,}" if row.fewest_gpus else fmt.ABSENT,
            f"{row.batch:,}" if row.batch else "none fits",
            f"{row.longest:,}" if row.longest else "none fits",
        )
    return table
