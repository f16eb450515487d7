"""The answer to a question: what to run, how sure that is, and what came near or does not fit."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

from harness.cases import format as fmt
from harness.recommend.combination import Combination
from harness.recommend.commands import command_of
from harness.recommend.enumeration import Enumeration
from harness.recommend.fitting import Misfit
from harness.recommend.measuring import standing
from harness.recommend.predicting import EQUAL, TIED
from harness.recommend.question import Question

SHOWN = 5
"""Rows of the table of the best."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """Everything that the terminal and the report say."""

    question: Question
    found: Enumeration
    num_fitting: int
    num_predicted: int
    ranked: list[Combination]
    """The best first: measured ones, then those that are only predicted. A new list whenever any
    are measured."""
    misfits: list[Misfit]
    drawn: list[Combination] = field(default_factory=list)
    """Every combination with a memory and a time, for the figure."""
    remarks: list[str] = field(default_factory=list)
    unpredicted: list[str] = field(default_factory=list)
    """Why combinations that fit have no predicted time, a reason each."""
    _grouped: tuple[list[Combination], list[list[Combination]]] | None = field(
        default=None, init=False, repr=False
    )

    @property
    def best(self) -> Combination | None:
        return self.ranked[0] if self.ranked else None

    @property
    def groups(self) -> list[list[Combination]]:
        """The best first, those of one prediction together, which are told apart by nothing."""
        if self._grouped is None or self._grouped[0] is not self.ranked:
            found: dict[object, list[Combination]] = {}
            for item in self.ranked:
                found.setdefault(_prediction(item), []).append(item)
            self._grouped = self.ranked, list(found.values())
        return self._grouped[1]

    @property
    def shown(self) -> list[list[Combination]]:
        """The groups that tables list, by their first."""
        return self.groups[:SHOWN]

    @property
    def runner_up(self) -> Combination | None:
        """The best that is not predicted to be the same as the very best."""
        return self.groups[1][0] if len(self.groups) > 1 else None

    def command(self, item: Combination) -> str:
        """What measures it: here, or on the hosts of a cluster where one has too few GPUs."""
        command, machine = command_of(item.case, self.question.choose), self.question.machine
        if machine.is_here or item.case.world_size <= machine.gpus_per_host:
            return command
        return f"{command} launcher=slurm"


def _prediction(item: Combination) -> object:
    """What is predicted of a combination, as answers show it; of a measured one, itself."""
    if item.measured_ms is not None or item.step_ms is None:
        return id(item)
    ms_a_token = item.batch_ms(item.step_ms) / item.batch_tokens
    width = math.log(item.step.high_ms / item.step.low_ms)
    times = round(math.log(ms_a_token) / EQUAL), round(width, 2)
    return *times, round(item.memory_gib, 2), item.base.seq_len


def ties(best: Combination, other: Combination) -> bool:
    """Whether two are the same, or not told apart."""
    if best.record is not None and other.record is not None:
        return standing(best, other) != "SLOWER"
    if best.step is None or other.step is None or other.measured_ms is not None:
        return False
    # Two predictions of one model err together; what both share says nothing about their order.
    return bool(other.step_ms and _gap(best, other) < TIED)


def _gap(best: Combination, other: Combination) -> float:
    """How much longer a token of ``other`` takes: 0.1 is 10%."""
    assert best.step_ms is not None
    assert other.step_ms is not None
    one = best.batch_ms(best.step_ms) / best.batch_tokens
    return other.batch_ms(other.step_ms) / other.batch_tokens / one - 1


def sentence(answer: Answer) -> str:
    """What to run, how fast it is, and how sure that is."""
    best, question = answer.best, answer.question
    if best is None:
        return _nothing(answer)
    goal = {
        "tokens_per_s": "Run",
        "memory": "For the least memory run",
        "longest_sequence": f"For the longest sequence, {best.base.seq_len:,} tokens, run",
    }[question.goal]
    return f"{goal} {best.name}: {_speed(best)}, {_memory(best)}."


def _nothing(answer: Answer) -> str:
    if not answer.found.num_legal:
        return "No combination is possible, for the reasons that are listed."
    if not answer.num_fitting:
        return "Nothing fits: see what would, below."
    return "No time can be predicted for what fits."


def _speed(item: Combination) -> str:
    if item.step_ms is None:
        return "no time is predicted"
    speed = fmt.number(item.tokens_per_s(item.step_ms))
    if item.measured_ms is not None:
        return f"{speed} tokens/s measured"
    low = fmt.number(item.tokens_per_s(item.step.high_ms))
    high = fmt.number(item.tokens_per_s(item.step.low_ms))
    return f"{speed} tokens/s predicted (90% interval {low} to {high})"


def _memory(item: Combination) -> str:
    launched = " as if launched" if item.is_captured else ""
    usable = item.usable_bytes / 2**30
    return f"{item.memory_gib:.3g} of {usable:.3g} GiB predicted{launched}{_a_gpu(item)}"


def _a_gpu(item: Combination) -> str:
    return " on each GPU" if item.case.world_size > 1 and item.case.device == "cuda" else ""


def alike(answer: Answer, most: int = 4) -> str:
    """What else has the very prediction of the best; empty if nothing has."""
    if answer.best is None or len(answer.groups[0]) == 1:
        return ""
    best, *others = answer.groups[0]
    # What differs in one word first.
    told = sorted((_in_place(best, item) for item in others), key=len)
    named = ", ".join(" and ".join(words) for words in told[:most])
    more = f", and {len(told) - most:,} more" if len(told) > most else ""
    return f"The same is predicted with {named}{more}."


def _in_place(best: Combination, other: Combination) -> list[str]:
    """The words of a name that the best's does not have."""
    return [word for word in other.words if word not in best.words]


def second(answer: Answer) -> str:
    """The runner-up and by how much it is behind; empty without one."""
    best, other = answer.best, answer.runner_up
    if best is None or other is None or best.step_ms is None or other.step_ms is None:
        return ""
    gap = _gap(best, other)
    slower = "as fast" if abs(gap) < 5e-4 else f"{100 * abs(gap):.1f}% "
    if slower != "as fast":
        slower += "slower" if gap > 0 else "faster by median"
    if answer.question.goal == "memory":
        more = (other.memory_bytes - best.memory_bytes) / 2**30
        behind = f"{more:.3g} GiB more" if more >= 0.005 else "as little memory"
        return f"Runner-up: {other.name}, {behind}, {slower}."
    if answer.question.goal == "longest_sequence":
        return f"Runner-up: {other.name}, {other.base.seq_len:,} tokens, {slower}."
    text = f"Runner-up: {other.name}, {slower}."
    tied = [group[0] for group in answer.groups[1:] if ties(best, group[0])]
    if not tied:
        return text
    how = (
        "measured as the same or not told apart" if best.record else "within 2%, so not told apart"
    )
    if tied[0] is other:
        text, tied = f"Runner-up: {other.name}, {slower} ({how}).", tied[1:]
    if not tied:
        return text
    names = "; ".join(item.name for item in tied[:2])
    others = f", and {len(tied) - 2:,} more" if len(tied) > 2 else ""
    return f"{text} Tied as well: {names}{others}."


CAPTURED_MEMORY = (
    "A captured step is taken to need the memory of the same step launched: what CUDA graphs keep "
    "besides is not predicted."
)


def assumptions(answer: Answer) -> list[str]:
    """What was not measured of the best and the runner-up, in sentences; empty if all was."""
    named = [item for item in (answer.best, answer.runner_up) if item is not None]
    predicted = [item for item in named if item.measured_ms is None and item.step is not None]
    notes = dict.fromkeys(note for item in predicted for note in item.step.notes)
    found = [f"Extrapolated: {'; '.join(notes)}."] if notes else []
    if any(item.is_captured for item in named):
        found.append(CAPTURED_MEMORY)
    return found


def counts(answer: Answer) -> str:
    """How many combinations there are, fit, and have a predicted time."""
    found = answer.found
    if not found.num_legal:
        return f"{found.number:,} combinations, none of them legal."
    legal = f"{found.number:,} combinations, {found.num_legal:,} of them legal"
    if not answer.num_fitting:
        return f"{legal}, none fits."
    return (
        f"{legal}, {answer.num_fitting:,} fit; times predicted for the {answer.num_predicted:,} "
        "that may be best."
    )


NOT_INSTALLED = "not installed on this host"


def fallen(answer: Answer, most: int = 8) -> list[str]:
    """Why families fell out, a line each: how many combinations, whose, and the reason."""
    numbers: Counter[str] = Counter()
    names: dict[str, list[str]] = {}
    machine = answer.question.machine
    for reason, number in answer.found.fallen.items():
        name, text = _split(reason)
        if text == NOT_INSTALLED and not machine.is_here:
            text += f", so not known of {machine.name}"
        numbers[text] += number
        if name and name not in names.setdefault(text, []):
            names[text].append(name)
    lines = []
    for text, total in numbers.most_common(most):
        whose = f"{', '.join(names[text])}: " if text in names else ""
        lines.append(f"{total:>9,}  {whose}{text}")
    rest = sum(number for _, number in numbers.most_common()[most:])
    if rest:
        lines.append(f"{rest:>9,}  for {fmt.counted(len(numbers) - most, 'other reason')}")
    for item in answer.found.left_out:
        lines.append(f"{'none':>9}  of {', '.join(item.names)}: {item.reason}")
    for reason in dict.fromkeys(whole.split("; ")[0] for whole in answer.unpredicted):
        lines.append(f"{'no time':>9}  {reason}")
    return lines


def _split(reason: str) -> tuple[str, str]:
    """The choice that a reason is about, if any, and the reason without its remedy."""
    name = ""
    if found := re.match(r"attention=(\w+)(?:\([^)]*\))?: (.*)|parallel=(\w+) is (not .*)", reason):
        name, reason = filter(None, found.groups())
    head, colon, tail = reason.partition(": ")
    if "install" in head:
        return name, NOT_INSTALLED
    text = f"{head}{colon}{tail.split('; ')[0]}"
    return name, re.sub(
        r"^\d+ query heads are too few for \d+ ranks", "too few heads for ranks", text
    )
