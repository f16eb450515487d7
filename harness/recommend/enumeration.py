"""Every legal combination, and why whole families of others fall out.

Legal is what the project's own checks allow: a combination is a :class:`Case`, whose construction
raises ValueError for what cannot be, and whose attention says what it cannot compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from harness.cases.case import Case
from harness.predictions.support import Support
from harness.recommend import space
from harness.recommend.combination import Combination
from harness.recommend.question import Question
from kernels import AttentionBackend
from parallel.context.attention import SequenceParallelAttention

TASK = "train_step"


@dataclass(kw_only=True, slots=True)
class Enumeration:
    """All combinations of a question.

    Whether activations are checkpointed and what is compiled is as legal for one base as for any
    other, so bases and variants are kept apart: every base with every variant is a combination.
    """

    bases: list[Combination] = field(default_factory=list)
    """Mesh, strategy, attention and micro-batch, with the first variant."""
    checkpoints: list[Any] = field(default_factory=list)
    compilations: list[Any] = field(default_factory=list)
    fallen: Counter[str] = field(default_factory=Counter)
    """Combinations that are none, by the reason."""
    left_out: list[space.LeftOut] = field(default_factory=list)

    @property
    def num_legal(self) -> int:
        return len(self.bases) * len(self.checkpoints) * len(self.compilations)

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
    checkpoints, compilations = space.checkpoints(question), space.compilations(question)
    found = Enumeration(left_out=[*left_attentions, *left_strategies])
    num_variants = len(checkpoints) * len(compilations)
    parts = shared_parts(question) | {"checkpoint": checkpoints[0], "compile": compilations[0]}
    support = Support(question.machine)
    for mesh in meshes:
        # A scheme on whole sequences is its kernel, which is enumerated by itself.
        taken = [item for item in attentions if _splits(item) == (mesh.cp > 1)]
        batches = space.micro_batches(question, mesh)
        if not batches:
            found.fallen[_BATCH] += len(names) * len(taken) * num_variants
            continue
        number = len(taken) * len(batches) * num_variants
        chosen = list(_strategies_on(question, mesh, names, found, number))
        for attention, strategy, (size, accumulation) in product(taken, chosen, batches):
            base = {"attention": attention, "parallel": strategy, "batch_size": size}
            try:
                case = Case(**parts, **base)
            except ValueError as error:
                found.fallen[_family(str(error))] += num_variants
                continue
            if reason := support.why_not(case):
                found.fallen[reason] += num_variants
            else:
                found.bases.append(Combination(base=case, accumulation=accumulation))
    _keep_legal_variants(found, checkpoints, compilations)
    return found


def _keep_legal_variants(
    found: Enumeration, checkpoints: list[Any], compilations: list[Any]
) -> None:
    """Count the variants that no base can have, and keep the others."""
    if not found.bases:
        return
    case = found.bases[0].base
    found.compilations = compilations
    for checkpoint in checkpoints:
        try:
            replace(case, checkpoint=checkpoint)
        except ValueError as error:
            found.fallen[_family(str(error))] += len(found.bases) * len(compilations)
        else:
            found.checkpoints.append(checkpoint)


_BATCH = "parallel.dp does not divide the batch's sequences"


def shared_parts(question: Question) -> dict[str, Any]:
    """What all cases of a question have in common."""
    task_options = {key: values[0] for key, values in question.typed.items() if "task." in key}
    return {
        "task": question.choose("task", {"task": TASK, **task_options}),
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


def _splits(attention: AttentionBackend) -> bool:
    return isinstance(attention, SequenceParallelAttention)
