"""Memory, traffic and overhead of a strategy by formula, against numbers worked out by hand."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

import pytest
import torch
from accounting_cases import PARAMETERS, case_of
from profiles import rows_of, table_of

from harness.bench.bench import Bench
from harness.predictions import training as accounting
from harness.predictions.bucket_overhead import LinkModel, fit_link
from harness.predictions.feed_forward import FeedForwardStack, Mesh
from harness.render.table import finding_of
from harness.request.compose import compose_request
from harness.store.record import Record
from models.accounting import num_parameters, parameter_sizes
from models.transformer import Transformer
from parallel.data.buckets import fill_buckets
from parallel.data.gradients import Bucket, buckets_of

STEP_COUNTS = 4 * 21
"""Bytes in which AdamW counts the steps of each of the model's 21 tensors."""


class TestFootprint:
    def test_parameters_by_hand(self) -> None:
        case = case_of()
        assert case.model is not None
        assert num_parameters(case.model) == PARAMETERS
        assert accounting.gradient_bytes(case_of("precision=bf16_pure")) == 2 * PARAMETERS

    @pytest.mark.parametrize("kv_heads", ["null", "2"])
    def test_sizes_are_those_of_the_model(self, kv_heads: str) -> None:
        case = case_of(f"model.num_kv_heads={kv_heads}")
        assert case.model is not None
        model = Transformer(case.model, case.attention, device="meta")
        assert parameter_sizes(case.model) == [p.numel() for p in model.parameters()]

    @pytest.mark.parametrize(
        ("strategy", "buffers", "loose", "state"),
        [
            ("none", 0, 1, 1),
            ("ddp_naive", 0, 1, 1),
            ("ddp_overlapped", 0, 1, 1),
            ("ddp_flat", 1, 1, 1),
            ("ddp_bucketed", 1, 0, 1),
            ("ddp_torch", 1, 0, 1),
            ("sharded_optimizer", 1, 0, 0.5),
            ("zero_redundancy_torch", 1, 0, 0.5),
        ],
    )
    def test_of_each_strategy(self, strategy: str, buffers: int, loose: int, state: float) -> None:
        """Memory in units of the parameters: AdamW has two more, flat has all gradients twice."""
        found = accounting.footprint(case_of(f"parallel={strategy}"))
        unit = 4 * PARAMETERS
        adamw = (2 * unit + STEP_COUNTS) * state
        assert found.parameters == unit
        assert found.gradient_buffers == buffers * unit
        assert found.loose_gradients == loose * unit
        assert found.optimizer_state == adamw
        rest = max(loose * unit, found.activations)
        assert found.peak == unit * (1 + buffers) + adamw + rest

    def test_one_rank_has_no_buffers(self) -> None:
        alone = accounting.footprint(case_of("parallel=ddp_bucketed", "parallel.dp=1"))
        assert alone == accounting.footprint(case_of())

    def test_sharded_parameters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A strategy that shards all three: a quarter each, and besides whole weights in use."""
        case = case_of("parallel=ddp_naive", "parallel.dp=4")
        for name in ("parameter_share", "gradient_share", "optimizer_state_share"):
            monkeypatch.setattr(type(case.parallel), name, 0.25)
        found = accounting.footprint(case)
        assert found.parameters == found.gradients == PARAMETERS
        assert found.optimizer_state == 2 * PARAMETERS + STEP_COUNTS / 4
        block, outside = 4 * (65_536 + 147_456), 4 * 2 * 128_000
        assert found.gathered_parameters == outside + 2 * block
        # At the first block, whose gradients are there twice, with those of the head, and a
        # quarter of all others.
        step = accounting.step_memory(case)
        left = step.saved - 2 * step.of_block
        assert found.activations == left + 2 * block + outside / 2 + PARAMETERS
        assert case.parallel.traffic == {"all_gather": 2, "reduce_scatter": 1}
        monkeypatch.setattr(type(case.parallel), "parameter_share", 1.0)
        assert case.parallel.traffic == {"all_gather": 1, "reduce_scatter": 1}

    @pytest.mark.parametrize("name", ["fsdp", "fsdp_torch"])
    def test_modules_compute_in_what_travels(self, name: str) -> None:
        """Nothing is left for autocast to copy; what the optimizer has stays float32."""
        low = case_of(f"parallel={name}", "parallel.compute_dtype=bfloat16", "precision=bf16")
        pure = case_of(f"parallel={name}", "precision=bf16_pure")
        found, wanted = accounting.footprint(low), accounting.footprint(pure)
        assert accounting.step_memory(low).saved == accounting.step_memory(pure).saved
        assert found.gathered_parameters == wanted.gathered_parameters
        assert found.parameters == 2 * wanted.parameters == 4 * PARAMETERS / 2
        assert accounting.traffic_bytes(low) == accounting.traffic_bytes(pure)
        assert accounting.traffic_bytes(low)["all_gather"] == 2 * 2 * PARAMETERS

    def test_what_is_sent(self) -> None:
        """Four ranks: an all-reduce carries 2 x 3/4 of a size, a broadcast all of it."""
        size = 4 * PARAMETERS
        sharded = case_of("parallel=sharded_optimizer", "parallel.dp=4")
        traffic = accounting.traffic_bytes(sharded)
        assert traffic == {"all_reduce": size, "broadcast": size}
        assert accounting.sent_bytes(traffic, 4) == 2.5 * size
        assert sharded.task.work(sharded)["step"].sent_bytes == 2.5 * size
        forward = case_of("parallel=ddp_naive", "task.mode=forward")
        assert accounting.traffic_bytes(forward) == {}
        assert case_of().task.work(case_of())["step"].sent_bytes is None

    @pytest.mark.parametrize("mib", [0.01, 0.5, 1.0, 100.0])
    def test_buckets_are_those_that_are_made(self, mib: float) -> None:
        case = case_of()
        assert case.model is not None
        model = Transformer(case.model, case.attention, device="meta")
        made = buckets_of(list(model.parameters())[::-1], mib * 2**20)
        assert accounting.buckets_of_case(case, mib) == len(made)
        bucketed = case_of("parallel=ddp_bucketed", f"parallel.bucket_size_mb={mib}")
        in_buffers = sum(
            4 * sum(p.numel() for p in bucket.parameters)
            for bucket in made
            if isinstance(bucket, Bucket)
        )
        assert accounting.footprint(bucketed).gradient_buffers == pytest.approx(in_buffers)

    def test_buckets_by_hand(self) -> None:
        assert fill_buckets([3, 1, 1, 9, 1], 4) == [[3, 1], [1], [9], [1]]
        assert fill_buckets([3, 1, 1, 9, 1], 100) == [[3, 1, 1, 9, 1]]


class TestCommunicationAccounting:
    """CS336 assignment 2 and the errata of its worked answers."""

    XXL = FeedForwardStack(d_model=16384, d_ff=53248, num_blocks=126)
    MESH = Mesh(fsdp=16, tp=4, fsdp_axes=2, tp_axes=1, flops_per_s=4.6e14, bytes_per_s=1.8e11)

    def test_memory(self) -> None:
        assert self.XXL.num_parameters == 219_848_638_464
        assert self.XXL.static_bytes == 16 * 219_848_638_464
        assert self.XXL.activation_bytes_per_token == 126 * 69_632 * 2 == 17_547_264

    def test_shards(self) -> None:
        """3,517.6 / 95 = 37.03; with 4,096 tokens (3,517.6 + 35.9) / (95 - 35.9) = 60.2."""
        assert self.XXL.least_shards(95e9, 0) == 38
        assert self.XXL.least_shards(95e9, 4096) == 61
        assert self.XXL.least_shards(95e9, 20_000) is None

    def test_batch(self) -> None:
        """ERRATA: B > 20,444 tokens in all, 319 a device; F > 10,222."""
        assert self.MESH.least_batch() == pytest.approx(20_444, abs=1)
        assert self.MESH.least_batch() / self.MESH.num_devices == pytest.approx(319.4, abs=0.1)
        assert self.MESH.least_d_ff() == pytest.approx(10_222, abs=1)

    def test_both_axes_in_turns(self) -> None:
        """On the least batch, the times of the formulas are equal."""
        mesh, d_model, d_ff = self.MESH, self.XXL.d_model, self.XXL.d_ff
        batch = mesh.least_batch_in_turns(d_ff)
        assert batch is not None
        computing = 4 * batch * d_model * d_ff / (64 * 4.6e14)
        gathering = 4 * d_model * d_ff / (4 * 1.8e11 * 2)
        exchanging = 4 * batch * d_model / (16 * 1.8e11 * 1)
        assert computing == pytest.approx(gathering + exchanging)
        assert mesh.least_batch_in_turns(10_000) is None

    def test_splits(self) -> None:
        """The best split of real numbers needs least; of whole ones 4 x 16, not 2 x 32 or 8 x 8."""
        best = self.MESH.best_split(self.XXL.d_ff)
        assert best is not None
        assert (best.fsdp, best.tp) == (4, 16)
        any_split = self.MESH.least_batch_of_any_split(self.XXL.d_ff)
        x = math.sqrt(any_split * 64 * 2 / self.XXL.d_ff)
        computing = any_split * self.XXL.d_ff / (64 * 4.6e14)
        assert computing == pytest.approx(self.XXL.d_ff / (64 / x * 1.8e11 * 2))
        assert computing == pytest.approx(any_split / (x * 1.8e11))
        assert any_split < best.least_batch() < self.MESH.least_batch()
        assert self.MESH.best_split(100) is None

    def test_table(self) -> None:
        record = counted_record("task=communication_accounting")
        table = table_of("communication_accounting", record)
        found = {row["quantity"]: row["value"] for row in rows_of(table)}
        assert found["parameters"] == "219,848,638,464"
        assert found["least N_FSDP for 95 GB, no tokens"] == "38"
        assert found["least batch bound by compute (tokens)"] == "20,444"
        assert found["least batch a device, X x Y = 4 x 16 (tokens)"] == "79.9"
        assert "take turns, from 395 on; split 4 x 16 instead, 79.9 are" in finding_of(table)
        text = {row["quantity"]: row["text"] for row in rows_of(table)}
        assert text["the same, a device (tokens)"] == "623"
        other = counted_record("task=communication_accounting", "task.d_ff=1024")
        columns = table_of("communication_accounting", other).columns
        assert "text" not in [column.header for column in columns]

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ("task.d_ff=0", "task.d_ff=0: must be at least 1"),
            ("task.tflops=inf", "task.tflops=inf: must be a finite number"),
            ("parallel=ddp_naive", "parallel.dp=2: task=communication_accounting runs in one"),
        ],
    )
    def test_bad_input(self, argument: str, message: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            compose_request(["task=communication_accounting", "device=cpu", argument])


def counted_record(*arguments: str) -> Record:
    """The record of a task that measures nothing."""
    (case,) = compose_request([*arguments, "device=cpu"]).cases
    bench = Bench(device=torch.device("cpu"))
    case.task.run(case, bench)
    work = {name: asdict(item) for name, item in case.task.work(case).items()}
    notes = bench.outcome.notes
    return Record(case_id=case.id, case=case.to_dict(), status="ok", work=work, notes=notes)


class TestOverhead:
    LINK = LinkModel(overhead_s=1e-4, bytes_per_s=1e10)

    def test_by_hand(self) -> None:
        """4 GB in 10 buckets: 10 x 0.1 ms + 400 MB at 10 GB/s; best is sqrt(4e9 x 1e10 x 1e-4)."""
        assert self.LINK.added_seconds(4e9, 10) == pytest.approx(1e-3 + 0.04)
        assert self.LINK.best_bucket_bytes(4e9) == pytest.approx(6.3246e7, rel=1e-4)
        assert self.LINK.best_bucket_bytes(1e3) == 1e3
        best = 4e9 / self.LINK.best_bucket_bytes(4e9)
        added = self.LINK.added_seconds(4e9, best)
        for buckets in (best / 1.1, best * 1.1):
            assert self.LINK.added_seconds(4e9, buckets) > added

    def test_a_queue_behind_a_long_pass_leaves_the_last_bucket(self) -> None:
        """1 ms a bucket of 9 MB and o; a pass of a second hides all but the last."""
        sizes = [9e6] * 8
        assert self.LINK.queued_seconds(sizes, 1.0) == pytest.approx(1e-3)
        assert self.LINK.queued_seconds([9e6, 9e6, 1e6], 1.0) == pytest.approx(2e-4)

    def test_a_queue_behind_a_short_pass_leaves_all_that_did_not_fit(self) -> None:
        """The first bucket is ready after 1/8 of 4 ms; from then on the link is never idle."""
        assert self.LINK.queued_seconds([9e6] * 8, 4e-3) == pytest.approx(5e-4 + 8e-3 - 4e-3)
        assert self.LINK.queued_seconds([], 1.0) == 0

    def test_fit_finds_what_made_the_times(self) -> None:
        sizes = [1e4, 1e6, 1e8, 1e9]
        found = fit_link(sizes, [self.LINK.seconds(size) for size in sizes])
        assert found is not None
        assert found.overhead_s == pytest.approx(1e-4)
        assert found.bytes_per_s == pytest.approx(1e10)

    def test_small_sizes_count_as_much_as_large_ones(self) -> None:
        """The largest is off by 10 ms, a hundred calls' overhead, and o hardly moves."""
        sizes = [1e4, 1e5, 1e6, 1e9]
        times = [self.LINK.seconds(size) for size in sizes]
        found = fit_link(sizes, [*times[:-1], times[-1] + 0.01])
        assert found is not None
        assert found.overhead_s == pytest.approx(1e-4, rel=0.02)

    def test_no_negative_overhead_and_no_fit_of_nothing(self) -> None:
        found = fit_link([1e6, 2e6], [1e-4, 3e-4])
        assert found is not None
        assert found.overhead_s == 0
        assert fit_link([1e6, 1e6], [1e-4, 2e-4]) is None
        assert fit_link([1e6, 2e6], [2e-4, 1e-9]) is None
