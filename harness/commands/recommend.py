"""``attnbench recommend``: how to train a model on a machine, in one sentence and one page."""

from __future__ import annotations

import textwrap
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import forecast
from harness.cases import format as fmt
from harness.commands.output import begin_measuring
from harness.commands.questions import HERE, Asked, asked
from harness.printing import say
from harness.recommend import answer as answers
from harness.recommend import page
from harness.recommend.answer import Answer
from harness.recommend.combination import Combination
from harness.recommend.enumeration import Enumeration, enumerate_combinations
from harness.recommend.fitting import MemoryModel, fit, misfits
from harness.recommend.longest import longest
from harness.recommend.measuring import Bench, label_of, launched_first
from harness.recommend.predicting import Predicted, TimeModel, order_of, predict
from harness.recommend.screening import screen
from harness.run.launcher import LaunchError
from harness.run.workers.worker_group import WorkerStartError
from harness.terminal import PrintableConsole

HELP = """\
Usage: attnbench recommend model=NAME seq_len=N [gpus=N] [batch_tokens=N] [precision=bf16]
                           [goal=tokens_per_s|memory|longest_sequence]
                           [machine=h200] [measure=true|false] [budget_s=110] [KEY=VALUE...]

Enumerates every legal way to train (attention, mesh, strategy, checkpointing, compilation, capture
in CUDA graphs, micro-batch), drops what does not fit, predicts the time of the rest, and measures
the best few in turns until one is faster than the others or tied. machine= predicts for a machine
that is not here.
Keys of cases pin an axis: attention=sdpa,flash_triton parallel=fsdp parallel.tp=1 compile=none
task.cuda_graph=false.
"""

CANDIDATES = 4
"""Combinations that are measured, if a calibration predicts which are best."""

BUDGET_S = 110.0
"""Seconds for measuring, about, so that a calibrated machine answers in two minutes."""


def recommend(*arguments: str) -> Answer:
    """The answer of ``attnbench recommend``, predicted and not measured.

    Args:
        arguments: keys of the command, such as ``"model=medium", "machine=h200", "gpus=8"``.

    Returns:
        The answer; its ``best`` is a way to train or None, its ``ranked`` all that are predicted.

    Raises:
        ValueError: in one line, for a wrong argument, or a machine without a calibration.
    """
    wanted = asked("recommend", ("measure=false", *arguments))
    return _answer(wanted, *_time_model(wanted), PrintableConsole())


def main(arguments: list[str]) -> int:
    """The subcommand; ValueError in one line for a wrong argument."""
    if {"-h", "--help"} & set(arguments):
        print(HELP, end="")
        return 0
    wanted = asked("recommend", arguments)
    if wanted.measure:
        begin_measuring()
    console = PrintableConsole(soft_wrap=False)
    folder = Path(wanted.results).expanduser() / "sweeps" / label_of(wanted.question)
    times, remark = _time_model(wanted)
    try:
        # Before what takes a minute, and after all that is wrong with the question.
        folder.mkdir(parents=True, exist_ok=True)
        answer = _answer(wanted, times, remark, console)
        _print(answer, console)
        say(f"  report  {page.write(answer, folder)}")
    except OSError as error:
        raise ValueError(
            f"results={wanted.results}: cannot be written ({error.strerror})"
        ) from error
    return 0 if answer.best is not None else 1


def _answer(wanted: Asked, times: TimeModel | None, remark: str, console: Console) -> Answer:
    question, memory = wanted.question, MemoryModel()
    found = enumerate_combinations(question)
    fitting, others = fit(found, question.machine, memory)
    if question.goal == "longest_sequence":
        fitting = longest(fitting, question.machine, memory)
    predicted = predict(found, fitting, times, question.goal) if times else Predicted()
    answer = Answer(
        question=question,
        found=found,
        num_fitting=found.count(fitting),
        num_predicted=len(predicted.ranked),
        ranked=predicted.ranked,
        misfits=misfits(fitting, others, question.machine, memory),
        drawn=list(predicted.ranked),
        remarks=[remark] if remark else [],
        unpredicted=sorted(predicted.refused),
    )
    if wanted.measure and fitting:
        _measure(wanted, found, fitting, answer, console)
    elif not predicted.ranked and question.goal != "tokens_per_s":
        answer.ranked = sorted(fitting, key=order_of(question.goal))
    return answer


def _time_model(wanted: Asked) -> tuple[TimeModel | None, str]:
    """The calibrated model of the machine, or why there is none.

    ValueError in one line where times are asked for and can be neither predicted nor measured.
    """
    machine = wanted.question.machine
    try:
        folder = Path(wanted.results).expanduser()
        return forecast.machine(HERE if machine.is_here else machine.name, folder), ""
    except (LookupError, ValueError) as error:
        if wanted.measure:
            return None, "This machine has no calibration: candidates were found by short runs."
        why = " ".join(str(error.args[0]).split())
        if wanted.question.goal == "tokens_per_s":
            raise ValueError(f"{why}; goal=memory and attnbench fits need none") from error
        return None, why


def _measure(
    wanted: Asked,
    found: Enumeration,
    fitting: list[Combination],
    answer: Answer,
    console: Console,
) -> None:
    """Measure the best few, and put those first, the fastest before the others."""
    question = wanted.question
    bench = Bench(
        results=Path(wanted.results).expanduser(),
        launcher=question.choose("launcher", {}),
        budget_s=BUDGET_S if wanted.budget_s is None else wanted.budget_s,
        timeout_s=wanted.timeout_s,
        console=console,
        command=question.asked,
        label=label_of(question),
    )
    if not answer.ranked:
        about_s = round(bench.budget_s)
        say(f"No calibration of this machine: short runs find what is best, about {about_s} s,")
        say(
            "and longer where one step takes long (budget_s= and a smaller model or seq_len= help):"
        )
    try:
        with bench.warm():
            candidates = answer.ranked[:CANDIDATES] or _found_by_measuring(found, fitting, bench)
            if len(candidates) > 1:
                say(f"{fmt.counted(len(candidates), 'candidate')} in turns:")
            if candidates:
                bench.contest(candidates)
    except (LaunchError, WorkerStartError, OSError) as error:
        raise ValueError(str(error)) from error
    if bench.left_out:
        names = "; ".join(item.name for item in bench.left_out)
        answer.remarks.append(
            f"{names}: in one round, in which others were faster, since "
            f"budget_s={bench.budget_s:g} does not suffice for all. The same command goes on."
        )
        candidates = [item for item in candidates if item not in bench.left_out]
    measured = [item for item in candidates if item.measured_ms is not None]
    for item in candidates:
        if item.measured_ms is None and item.record is not None:
            answer.remarks.append(f"{item.name}: {item.record.status} when it was measured.")
    rest = [item for item in answer.ranked if item not in candidates]
    shortly = [item for item in bench.screened if item.measured_ms and item not in candidates]
    rest += sorted(shortly, key=order_of(question.goal))
    ranked = launched_first(sorted(measured, key=order_of(question.goal)))
    answer.ranked = [*ranked, *rest]
    answer.drawn = list({id(item): item for item in [*answer.drawn, *bench.screened]}.values())


def _found_by_measuring(
    found: Enumeration, fitting: list[Combination], bench: Bench
) -> list[Combination]:
    """All that fit if they are few, else the best of a screening."""
    everything = [item.varied(variant) for item in fitting for variant in found.variants_of(item)]
    if len(everything) <= CANDIDATES:
        return everything
    return screen(found, fitting, bench)


def _print(answer: Answer, console: Console) -> None:
    console.print(answers.counts(answer), highlight=False)
    for line in answers.fallen(answer):
        console.print(_wrapped(line, console.width), highlight=False, style="dim")
    console.print()
    console.print(answers.sentence(answer), highlight=False, style="bold")
    for line in filter(None, (answers.alike(answer), answers.second(answer))):
        console.print(line, highlight=False)
    for remark in [*answer.remarks, *answers.assumptions(answer)]:
        console.print(remark, highlight=False)
    if answer.ranked:
        console.print()
        console.print(_table(answer))
        for word, (item, *_) in zip(("Run:", "Or:"), answer.shown, strict=False):
            console.print(f"\n{word}", style="bold")
            console.print(answer.command(item), highlight=False, soft_wrap=True)
    if answer.misfits:
        console.print("\nDoes not fit, and what would:", highlight=False)
        console.print(_misfit_table(answer))
    console.print()


def _wrapped(line: str, width: int) -> str:
    """A line with its continuation under its text."""
    return textwrap.fill(line, width, subsequent_indent=" " * 11, drop_whitespace=True)


def _table(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in page.COLUMNS:
        first = name == page.COLUMNS[0]
        table.add_column(name, justify="left" if first else "right", overflow="fold")
    for group in answer.shown:
        table.add_row(*page.cells(group))
    return table


def _misfit_table(answer: Answer) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    by_strategy = all(item.name == item.nearest.base.parallel.name for item in answer.misfits)
    table.add_column("strategy" if by_strategy else "attention", overflow="fold")
    table.add_column("missing (GiB)", justify="right")
    table.add_column("fits with", overflow="fold")
    for item in answer.misfits:
        table.add_row(item.name, fmt.number(item.nearest.short_gib), item.change)
    return table
