"""Every legal combination, and why whole families of others fall out.

Legal is what the project's own checks allow: a combination is a :class:`Case`, whose construction
raises ValueError for what cannot be, and whose attention says what it cannot compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.predictions.support import Support
from harness.recommend import space
from harness.recommend.combination import Combination, Variant
from harness.recommend.question import Question
from kernels import AttentionBackend
from parallel.context.attention import SequenceParallelAttention


@dataclass(kw_only=True, slots=True)
class Enumeration:
    """All combinations of a question.

    Whether activations are checkpointed and what is compiled is as legal for one base as for any
    other, so bases and variants are kept apart: every base with every way to checkpoint and every
    variant is a combination, but for captured ones of bases that cannot be captured.
    """

    bases: list[Combination] = field(default_factory=list)
    """Mesh, strategy, attention and micro-batch, in the first variant."""
    checkpoints: list[Any] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    """Those whose kernels are launched come first."""
    fallen: Counter[str] = field(default_factory=Counter)
    """Combinations that are none, by the reason."""
    left_out: list[space.LeftOut] = field(default_factory=list)

    def variants_of(self, item: Combination) -> list[Variant]:
        """The variants that a base, or a combination of it, can have."""
        if item.can_capture:
            return self.variants
        return [variant for variant in self.variants if not variant.is_captured]

    def count(self, items: Iterable[Combination]) -> int:
        """The combinations that these are in all their variants."""
        launched = sum(not variant.is_captured for variant in self.variants)
        return sum(len(self.variants) if item.can_capture else launched for item in items)

    @property
    def num_legal(self) -> int:
        return self.count(self.bases) * len(self.checkpoints)

    @property
    def number(self) -> int:
        return self.num_legal + self.fallen.total()


def enumerate_combinations(question: Question) -> Enumeration:
    """Every combination of a question's axes. ValueError if no mesh has the pinned axes."""
    meshes = space.meshes(question)
    if not meshes:
        raise ValueError(
            f"gpus={question.gpus}: no mesh has the given parallel.dp, parallel.cp and "
            "parallel.tp; their product must be the number of GPUs"
        )
    names, left_strategies = space.strategies(question)
    attentions, left_attentions = space.attention_choices(question)
    checkpoints = space.checkpoints(question)
    variants = [
        Variant(compile=compilation, task=task)
        for task, compilation in product(space.tasks(question), space.compilations(question))
    ]
    left_attentions += _of_no_mesh(question, attentions, meshes)
    found = Enumeration(left_out=[*left_attentions, *left_strategies])
    num_variants = len(checkpoints) * len(variants)
    parts = shared_parts(question) | {
        "task": variants[0].task,
        "checkpoint": checkpoints[0],
        "compile": variants[0].compile,
    }
    support = Support(question.machine)
    not_captured: Counter[str] = Counter()
    for mesh in meshes:
        taken = [item for item in attentions if _runs_on(item, mesh)]
        batches = space.micro_batches(question, mesh)
        if not batches:
            found.fallen[_BATCH] += len(names) * len(taken) * num_variants
            continue
        number = len(taken) * len(batches) * num_variants
        chosen = list(_strategies_on(question, mesh, names, found, number))
        for attention, strategy in product(taken, chosen):
            base = parts | {"attention": attention, "parallel": strategy}
            sized, fallen = _of_sizes(base, [size for size, _ in batches])
            for why, count in fallen.items():
                found.fallen[why] += count * num_variants
            if not sized:
                continue
            # Whether it is computed and captured does not depend on the batch.
            case = next(iter(sized.values()))
            if refused := support.why_not(case):
                found.fallen[refused] += len(sized) * num_variants
                continue
            if uncaptured := support.why_not_captured(case, variants[-1].task):
                not_captured[uncaptured] += len(sized)
            found.bases += [
                Combination(base=sized[size], accumulation=times, can_capture=uncaptured is None)
                for size, times in batches
                if size in sized
            ]
    _keep_legal_variants(found, checkpoints, variants)
    num_captured = sum(variant.is_captured for variant in found.variants)
    for reason, number in not_captured.items():
        found.fallen[reason] += number * num_captured * len(found.checkpoints)
    return found


def _of_sizes(base: dict[str, Any], sizes: list[int]) -> tuple[dict[int, Case], Counter[str]]:
    """The legal cases by the size of their micro-batch, and why the others are none."""
    cases: dict[int, Case] = {}
    fallen: Counter[str] = Counter()
    for tried, size in enumerate(sizes):
        try:
            cases[size] = Case(**base, batch_size=size)
        except ValueError as error:
            if "batch_size" not in str(error):
                # It is about no size, and true of all that are left.
                fallen[_family(str(error))] += len(sizes) - tried
                break
            fallen[_family(str(error))] += 1
    return cases, fallen


def _keep_legal_variants(
    found: Enumeration, checkpoints: list[Any], variants: list[Variant]
) -> None:
    """Count what no base can have, and keep the others."""
    if not found.bases:
        return
    case = found.bases[0].base
    for variant in variants:
        try:
            replace(case, compile=variant.compile, task=variant.task)
        except ValueError as error:
            found.fallen[_family(str(error))] += len(found.bases) * len(checkpoints)
        else:
            found.variants.append(variant)
    for checkpoint in checkpoints:
        try:
            replace(case, checkpoint=checkpoint)
        except ValueError as error:
            found.fallen[_family(str(error))] += len(found.bases) * len(found.variants)
        else:
            found.checkpoints.append(checkpoint)


_BATCH = "parallel.dp does not divide the batch's sequences"


def shared_parts(question: Question) -> dict[str, Any]:
    """What all cases of a question have in common, and the task that it launches if it does."""
    return {
        "task": space.tasks(question)[0],
        "model": question.model,
        "precision": question.choose("precision", {"precision": question.precision}),
        "seq_len": question.seq_len,
        "seed": 0,
        "device": question.machine.device,
    }


def _strategies_on(
    question: Question, mesh: space.Mesh, names: list[str], found: Enumeration, number: int
) -> Iterator[Any]:
    """The strategies of a mesh; those that cannot be are counted ``number`` times each."""
    options = question.options("parallel")
    for name in names:
        try:
            made = question.choose("parallel", {"parallel": name, **mesh.keys, **options})
        except ValueError as error:
            found.fallen[_family(str(error))] += number
            continue
        # On one data rank it is what another name stands for.
        if not space.does_nothing(made) or "parallel" in question.typed:
            yield made


def _family(message: str) -> str:
    """An error without the size that differs within a family: ``parallel.tp: must divide ...``."""
    return re.sub(r"^([\w.]+)=[^:\s]+:", r"\1:", " ".join(message.split()))


def _runs_on(attention: AttentionBackend, mesh: space.Mesh) -> bool:
    """A scheme on whole sequences is its kernel, which is enumerated by itself."""
    return isinstance(attention, SequenceParallelAttention) == (mesh.cp > 1)


def _of_no_mesh(
    question: Question, attentions: list[AttentionBackend], meshes: list[space.Mesh]
) -> list[space.LeftOut]:
    """The attentions that the user named and that no mesh has a use for."""
    if "attention" not in question.typed:
        return []
    left = [item for item in attentions if not any(_runs_on(item, mesh) for mesh in meshes)]
    schemes = [item.name for item in left if isinstance(item, SequenceParallelAttention)]
    whole = [item.name for item in left if item.name not in schemes]
    ranks = f"{fmt.counted(question.gpus, 'GPU')}, no mesh has"
    out = [
        space.LeftOut(names=schemes, reason=f"splits sequences, and of {ranks} parallel.cp over 1"),
        space.LeftOut(names=whole, reason=f"takes whole sequences, and of {ranks} parallel.cp=1"),
    ]
    return [item for item in out if item.names]
