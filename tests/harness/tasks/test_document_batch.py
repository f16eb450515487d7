"""Batches of documents of log-normal lengths, and the table that counts their balance."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from document_records import make_case, record_of

from harness.analysis.frame import build_frame
from harness.bench.bench import Bench
from harness.cases.case import Case
from harness.render.table import Table, build_table, finding_of
from harness.request.compose import compose_request
from harness.run.workers.worker import why_unsupported
from harness.store.record import Record
from harness.tasks.attention.attention import AttentionTask
from harness.tasks.attention.document_batch import log_normal_lengths
from parallel.context.blocks.layouts import Contiguous, Zigzag
from parallel.context.documents.counts import count_documents
from parallel.context.documents.layout import Documents
from parallel.context.documents.placement import place


def lengths_of(case: Case) -> list[int]:
    assert isinstance(case.task, AttentionTask)
    return case.task.lengths(case)


class TestLengths:
    @pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
    @pytest.mark.parametrize("seed", range(3))
    def test_mean_and_spread(self, spread: float, seed: int) -> None:
        lengths = log_normal_lengths(64, 1024, spread, seed)
        assert len(lengths) == 64
        assert sum(lengths) == 64 * 1024
        assert min(lengths) >= 1
        found = statistics.pstdev(map(math.log, lengths))
        assert found == pytest.approx(spread, rel=0.15)

    def test_depend_on_the_seed_alone(self) -> None:
        assert lengths_of(make_case("seed=3")) == lengths_of(make_case("seed=3"))
        assert lengths_of(make_case("seed=3")) != lengths_of(make_case("seed=4"))
        assert lengths_of(make_case("seed=3")) == log_normal_lengths(6, 32, 1.0, 3)


class TestTask:
    def test_work_is_that_of_each_document(self) -> None:
        case = make_case()
        # The formula leaves out half of the diagonal, as S^2 / 2 does.
        pairs = sum(length**2 / 2 for length in lengths_of(case))
        assert case.task.work(case)["forward"].flops == 4 * 4 * 16 * pairs
        assert case.attention_problem.q_len == max(lengths_of(case))
        assert case.attention_problem.packed

    def test_runs(self) -> None:
        case = make_case("attention=naive")
        bench = Bench(device=torch.device("cpu"))
        case.task.run(case, bench)
        assert bench.outcome.check is not None
        assert 0 < max(bench.outcome.check["errors"].values()) <= bench.outcome.check["tolerance"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["task.packing=equal"], "task.packing=equal: documents differ in length"),
            (["batch_size=1"], "task.packing=ragged: needs batch_size=2"),
            (["task.spread=0"], "task.spread=0"),
            (["task.spread=5"], "task.spread=5"),
        ],
    )
    def test_mistakes(self, arguments: list[str], message: str) -> None:
        with pytest.raises(ValueError, match=rf"^{message}"):
            make_case(*arguments)

    def test_a_dense_batch_has_no_documents_to_place(self) -> None:
        split = ("attention=documents", "parallel.cp=2")
        assert why_unsupported(make_case(*split)) is None
        small = ("seq_len=32", "batch_size=2", "device=cpu")
        for task in (("task=attention",), ("task=train_step", "model=tiny")):
            (case,) = compose_request([*task, *split, *small]).cases
            reason = why_unsupported(case)
            assert reason is not None
            assert "attention=zigzag" in reason


class TestCounts:
    LENGTHS = (9, 30, 4, 17)

    @pytest.mark.parametrize("num_ranks", [2, 3, 4])
    def test_all_pairs_are_counted(self, num_ranks: int) -> None:
        counts = count_documents(Documents(num_ranks=num_ranks), self.LENGTHS)
        assert sum(counts.pairs) == sum(length * (length + 1) // 2 for length in self.LENGTHS)
        placement = place(self.LENGTHS, num_ranks)
        assert counts.received == [placement.received(rank) for rank in range(num_ranks)]
        assert counts.padding == num_ranks * placement.local_len - 60

    def test_contiguous_parts_by_hand(self) -> None:
        """Of 4 and 8 tokens: the first halves have 3 and 10 pairs, the second 7 and 26."""
        counts = count_documents(Contiguous(num_ranks=2), (4, 8))
        assert counts.pairs == [13, 33]
        assert counts.received == [6, 6]
        assert counts.imbalance == pytest.approx(33 / 23)

    def test_zigzag_pads_each_document(self) -> None:
        counts = count_documents(Zigzag(num_ranks=2), (3, 6))
        assert (counts.local_len, counts.padding) == (6, 3)


class TestTable:
    def build(self, *records: Record) -> Table | None:
        return build_table("document_balance", build_frame(list(records)))

    def test_numbers(self) -> None:
        schemes = ("documents", "zigzag", "llama3", "ulysses")
        split = [
            record_of(f"attention={name}", "attention.kernel=naive", "parallel.cp=2")
            for name in schemes
        ]
        built = self.build(*split, record_of("attention=naive"))
        assert built is not None
        rows = built.rows.set_index("scheme")
        # Ulysses sends tokens of some heads, and no keys to queries.
        assert sorted(rows.index) == ["documents", "llama3", "zigzag"]
        lengths = log_normal_lengths(16, 64, 1.0, 0)
        placement = place(tuple(lengths), 2)
        row_mib = 2 * 2 * 16 * 4 / 2**20
        received = placement.received(0) + placement.received(1)
        assert rows.loc["documents", "keys_mib"] == pytest.approx(received * row_mib)
        assert rows.loc["documents", "tokens"] == 512
        assert rows.loc["documents", "padding"] == 0
        assert rows.loc["documents", "keys_share"] == pytest.approx(received / 1024)
        assert rows.loc["documents", "keys_share"] < 0.1
        assert rows.loc["documents", "pair_imbalance"] < 1.02
        assert rows.loc["llama3", "pair_imbalance"] > 1.45
        assert rows.loc["zigzag", "keys_share"] >= 1
        assert rows.loc["documents", "efficiency"] == pytest.approx(0.5)

    def test_the_sentence_joins_schemes_that_are_alike(self) -> None:
        schemes = ("zigzag", "llama3", "zigzag_llama3", "ring")
        options = ("task=attention", "task.packing=equal", "attention.kernel=naive")
        built = self.build(
            *(record_of(f"attention={name}", "parallel.cp=2", *options) for name in schemes)
        )
        assert built is not None
        said = finding_of(built)
        assert said.count("the mean with") == 1
        assert "100% of those that a gather brings with" in said
        assert said.count("zigzag and zigzag_llama3") == 1

    def test_packed_batches_are_told_by_their_tokens(self) -> None:
        split = [
            record_of(f"attention={name}", "attention.kernel=naive", "parallel.cp=2")
            for name in ("zigzag", "llama3")
        ]
        built = build_table("context_parallel", build_frame(split))
        assert built is not None
        # Sixteen documents of 64 tokens in the mean.
        assert finding_of(built).startswith("With 2 ranks and 1,024 tokens in 16 documents, ")
        assert not any("at every length" in note for note in built.footnotes)

    def test_documents_of_another_task(self) -> None:
        options = ("task=attention", "task.packing=ragged", "attention=documents")
        built = self.build(record_of(*options, "attention.kernel=naive", "parallel.cp=2"))
        assert built is not None
        assert built.rows["pair_imbalance"].iloc[0] < 1.02

    def test_nothing_to_show(self) -> None:
        assert self.build(record_of("attention=naive")) is None
        dense = ("task=attention", "attention=zigzag", "attention.kernel=naive", "parallel.cp=2")
        assert self.build(record_of(*dense)) is None
