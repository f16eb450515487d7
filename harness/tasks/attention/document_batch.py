"""``task=document_batch``: attention on documents of log-normal lengths, as in training on text.

Otherwise it is ``task=attention`` on a packed batch. Lengths of documents of web text are close
to log-normal: most are short, and a few of them have much of the work. A training run packs
documents up to a number of tokens, so the batch has ``batch_size`` documents of ``seq_len``
tokens in the mean, whatever the spread.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

from harness.cases import format as fmt
from harness.cases.case import Case
from harness.cases.column import CaseColumn, Point, option
from harness.cases.task import task, task_type
from harness.store.record import Record
from harness.tasks.attention.attention import AttentionTask


def log_normal_lengths(num_documents: int, mean: int, spread: float, seed: int) -> list[int]:
    """Lengths whose logarithms are normal with deviation ``spread``, and whose mean is ``mean``.

    One is drawn from each of ``num_documents`` equally probable parts of the distribution, so that
    batches of different seeds are alike, and they are put in a random order. The longest is
    adjusted so that the mean is exact. Equal arguments give equal lengths.
    """
    draw = random.Random(seed)
    normal = NormalDist()
    shares = []
    for index in range(num_documents):
        quantile = (index + draw.uniform(0.01, 0.99)) / num_documents
        shares.append(math.exp(spread * normal.inv_cdf(quantile)))
    draw.shuffle(shares)
    total = num_documents * mean
    lengths = [max(1, round(share * total / sum(shares))) for share in shares]
    longest = lengths.index(max(lengths))
    lengths[longest] += total - sum(lengths)
    return lengths


def packed_lengths(record: Record) -> list[int] | None:
    """Documents of a packed batch whose sequences are split over ranks; None of any other case."""
    values = record.case["task"]
    if values.get("packing", "none") == "none" or not issubclass(
        task_type(values["name"]), AttentionTask
    ):
        return None
    case = Case.from_dict(record.case)
    assert isinstance(case.task, AttentionTask)
    return case.task.lengths(case) if case.parallel.cp > 1 else None


def key_bytes(record: Record) -> float | None:
    """Bytes of one token's key and value in all heads, of the cases of :func:`packed_lengths`."""
    if packed_lengths(record) is None:
        return None
    problem = Case.from_dict(record.case).attention_problem
    size = 4 if problem.dtype == "float32" else 2
    return 2.0 * problem.num_kv_heads * problem.head_dim * size


@task("document_batch")
@dataclass(kw_only=True, slots=True)
class DocumentBatch(AttentionTask):
    """One attention call on a packed batch of documents of log-normal lengths."""

    packing: str = "ragged"
    """Always ``ragged``: end to end, each of its own length."""
    spread: float = 1.0
    """Standard deviation of the logarithm of a document's length."""

    columns: ClassVar[tuple[CaseColumn, ...]] = (
        *AttentionTask.columns,
        CaseColumn(
            name="length_spread",
            read=option("spread"),
            point=Point(
                header="spread of ln(length)",
                describe=lambda value: f"lengths log-normal with spread {fmt.number(value)}",
                format=fmt.number,
                after="layout",
            ),
        ),
        CaseColumn(name="packed_lengths", read=packed_lengths),
        CaseColumn(name="key_bytes", read=key_bytes),
    )

    def validate(self, case: Case) -> None:
        if self.packing != "ragged":
            raise ValueError(
                f"task.packing={self.packing}: documents differ in length, so that it must be "
                "ragged; for other batches use task=attention"
            )
        AttentionTask.validate(self, case)
        if not 0 < self.spread <= 4:
            raise ValueError(f"task.spread={self.spread}: must be above 0 and at most 4")

    def words(self) -> list[str]:
        return [f"spread{self.spread:g}", *AttentionTask.words(self)[1:]]

    def lengths(self, case: Case) -> list[int]:
        return log_normal_lengths(case.batch_size, case.seq_len, self.spread, case.seed)
