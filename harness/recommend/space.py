"""The axes along which combinations are enumerated: meshes, strategies, attention, and options.

Every axis lists typed choices, made once by the same code as those of a command line, and what was
left out of it with a reason. Nothing here names a choice: registries and files list them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.cases.task import Task
from harness.paths import config_files
from harness.recommend.question import CAPTURE_KEY, Question
from kernels import BACKENDS, Attention, AttentionBackend
from kernels.backend import DelegatedAttention
from parallel import STRATEGIES, Strategy
from parallel.context.attention import SequenceParallelAttention

TASK = "train_step"

GRAPHS = "reduce-overhead"
"""The mode of torch.compile that captures CUDA graphs."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Mesh:
    """Ranks of each axis."""

    dp: int
    cp: int
    tp: int

    @property
    def data_ranks(self) -> int:
        return self.dp * self.cp

    @property
    def keys(self) -> dict[str, int]:
        return {"parallel.dp": self.dp, "parallel.cp": self.cp, "parallel.tp": self.tp}


@dataclass(kw_only=True, slots=True, frozen=True)
class LeftOut:
    """Choices that no combination is made of, by the reason."""

    names: list[str]
    reason: str


def meshes(question: Question) -> list[Mesh]:
    """All products of three axes that use every GPU, with the axes that were pinned."""
    gpus = question.gpus
    divisors = [number for number in range(1, gpus + 1) if gpus % number == 0]
    found = [
        Mesh(dp=gpus // (cp * tp), cp=cp, tp=tp)
        for tp in question.pinned("parallel.tp", divisors)
        for cp in question.pinned("parallel.cp", divisors)
        if gpus % (cp * tp) == 0
    ]
    dp = question.pinned("parallel.dp", [mesh.dp for mesh in found])
    return [mesh for mesh in found if mesh.dp in dp]


def strategies(question: Question) -> tuple[list[str], list[LeftOut]]:
    """Names of strategies, without those that a later one improves on unless they were named."""
    if "parallel" in question.typed:
        return [str(name) for name in question.typed["parallel"]], []
    improved = {entry.target.improves_on for entry in STRATEGIES} - {None}
    names = [entry.name for entry in STRATEGIES]
    left = [name for name in names if name in improved]
    out = [LeftOut(names=left, reason="a later strategy improves on it")] if left else []
    return [name for name in names if name not in improved], out


def does_nothing(strategy: Strategy) -> bool:
    """Whether a strategy, on one data rank, has nothing to do that it does on several."""
    return strategy.data_ranks == 1 and type(strategy)(name=strategy.name).dp > 1


def attention_choices(question: Question) -> tuple[list[AttentionBackend], list[LeftOut]]:
    """Every backend that attends in training, and every scheme with each of its transports."""
    options = question.options("attention")
    if "attention" in question.typed:
        names = question.typed["attention"]
        return [question.choose("attention", {"attention": name, **options}) for name in names], []
    found: list[AttentionBackend] = []
    delegates, decoding = [], []
    for entry in BACKENDS:
        if issubclass(entry.target, SequenceParallelAttention):
            transports: tuple[str, ...] = getattr(entry.target, "transports", ())
            points: list[dict[str, Any]] = [
                {"attention.transport": transport} for transport in transports
            ]
            for point in points or [{}]:
                try:
                    values = {"attention": entry.name, **point, **question.masks}
                    made = question.choose("attention", values)
                except ValueError:
                    continue
                found.append(made)
        elif issubclass(entry.target, DelegatedAttention):
            delegates.append(entry.name)
        elif issubclass(entry.target, Attention):
            values = {"attention": entry.name, **question.masks}
            found.append(question.choose("attention", values))
        else:
            decoding.append(entry.name)
    out = [
        LeftOut(names=delegates, reason="chooses among the others"),
        LeftOut(names=decoding, reason="attends from a cache only"),
    ]
    return found, [item for item in out if item.names]


def usual_attentions(question: Question) -> list[AttentionBackend]:
    """Those pinned; else what chooses among the backends of one device, and the schemes, those
    that balance a causal mask first, by their places in tables."""
    if "attention" in question.typed:
        return attention_choices(question)[0]

    def place(entry: Any) -> tuple[bool, bool, int]:
        balances = getattr(entry.target, "needs_causal", False)
        splits = issubclass(entry.target, SequenceParallelAttention)
        return splits, not balances, (entry.look.place if entry.look else None) or 0

    usual = [entry for entry in BACKENDS if issubclass(entry.target, DelegatedAttention)]
    names = [entry.name for entry in sorted(usual, key=place)]
    masks = question.masks
    return [question.choose("attention", {"attention": name, **masks}) for name in names]


def checkpoints(question: Question) -> list[Any]:
    """Every file of ``conf/checkpoint``, the one that checkpoints nothing first."""
    names = sorted(config_files("checkpoint"))
    options = question.options("checkpoint")
    made = [
        question.choose("checkpoint", {"checkpoint": name, **options})
        for name in question.pinned("checkpoint", list(names))
    ]
    return sorted(made, key=lambda choice: choice.scope != "none")


def compilations(question: Question) -> list[Any]:
    """Every file of ``conf/compile``, eager PyTorch first; and with CUDA graphs on a GPU."""
    options = question.options("compile")
    names = question.pinned("compile", sorted(config_files("compile")))
    made = []
    for name in names:
        choice = question.choose("compile", {"compile": name, **options})
        made.append(choice)
        if choice.scope != "none" and not options and question.machine.device == "cuda":
            made.append(question.choose("compile", {"compile": name, "compile.mode": GRAPHS}))
    return sorted(made, key=lambda choice: choice.scope != "none")


def tasks(question: Question) -> list[Task]:
    """A step whose kernels are launched one by one; and on a GPU one captured in CUDA graphs."""
    options = question.options("task")
    chosen = [False, True] if question.machine.device == "cuda" else [False]
    return [
        question.choose("task", {"task": TASK, **options, CAPTURE_KEY: captured})
        for captured in sorted(question.pinned(CAPTURE_KEY, chosen))
    ]


def micro_batches(question: Question, mesh: Mesh) -> list[tuple[int, int]]:
    """Sequences of a micro-batch on each data-parallel rank, and how many are accumulated."""
    if question.sequences % mesh.dp:
        return []
    own = question.sequences // mesh.dp
    sizes = [size for size in range(1, own + 1) if own % size == 0]
    wanted = question.pinned("batch_size", sizes)
    return [(size, own // size) for size in sizes if size in wanted]
